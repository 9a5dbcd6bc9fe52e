"""TorchRL's estimator classes with the recursion computed by rl_triton, and one for Retrace, which TorchRL lacks."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from tensordict.nn import set_skip_existing as skipping
from tensordict.utils import NestedKey
from torchrl.objectives import utils
from torchrl.objectives.value import advantages as stock

import rl_triton as rlt
from rl_triton.adapters._functions import FunctionPatch
from rl_triton.adapters.torchrl import _functions, _stock_function

# This module binds TorchRL's functions like the modules of TorchRL do, and has them patched for good, whatever
# `patch()` and `unpatch()` do to the others. So these classes are counted under names of their own.
_HERE = sys.modules[__name__]
_served: dict[str, FunctionPatch] = {}
for _name, _function in _functions().items():
    if _name in vars(stock):
        setattr(_HERE, _name, _stock_function(_name))
        _served[_name] = FunctionPatch(_HERE, _name, _function)
        _served[_name].on()


def _rebuilt(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of TorchRL's under the same decorators, whose code finds this module's functions by their names.

    TorchRL has no hook around the recursion, and a copy of its methods would freeze one version of them.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    inner = getattr(function, "__wrapped__", None)
    namespace, closure = function.__globals__, function.__closure__
    if inner is None:
        namespace = {**namespace, **{name: getattr(_HERE, name) for name in _served}}
        if not _served.keys() & set(function.__code__.co_names):
            raise RuntimeError(f"{name} of this TorchRL calls none of the functions that it used to")
    else:
        cells = closure or ()
        replaced = _rebuilt(inner)
        if not any(cell.cell_contents is inner for cell in cells):
            raise RuntimeError(f"{name} of this TorchRL is decorated otherwise than it used to be")
        closure = tuple(types.CellType(replaced) if cell.cell_contents is inner else cell for cell in cells)
    rebuilt = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    if inner is None:
        return functools.update_wrapper(rebuilt, function, updated=())
    return functools.update_wrapper(rebuilt, replaced)


class GAE(stock.GAE):
    """`torchrl.objectives.value.GAE`, with the same arguments, keys and results; rl_triton computes the advantages.

    `vectorized` decides nothing but the dtype of results, as in TorchRL: the loop keeps that of the values.
    """

    forward = _rebuilt(stock.GAE.forward)
    value_estimate = _rebuilt(stock.GAE.value_estimate)


if hasattr(stock, "MultiAgentGAE"):

    class MultiAgentGAE(stock.MultiAgentGAE, GAE):
        """`torchrl.objectives.value.MultiAgentGAE`, with the same arguments; rl_triton computes the advantages."""


class TDLambdaEstimator(stock.TDLambdaEstimator):
    """`torchrl.objectives.value.TDLambdaEstimator`, with the same arguments; rl_triton computes the returns."""

    value_estimate = _rebuilt(stock.TDLambdaEstimator.value_estimate)


class TD1Estimator(stock.TD1Estimator):
    """`torchrl.objectives.value.TD1Estimator`, with the same arguments; rl_triton computes the returns."""

    value_estimate = _rebuilt(stock.TD1Estimator.value_estimate)


class VTrace(stock.VTrace):
    """`torchrl.objectives.value.VTrace`, with the same arguments; rl_triton computes targets and advantages."""

    forward = _rebuilt(stock.VTrace.forward)


# ------------------------------------------------------------------------------------------------------- the registry

_CLASSES = {"GAE": GAE, "TDLambda": TDLambdaEstimator, "TD1": TD1Estimator, "VTrace": VTrace}
if hasattr(stock, "MultiAgentGAE"):
    _CLASSES["MAGAE"] = MultiAgentGAE
# (TorchRL's entry, our class) of each key. What is registered still is when this module is reloaded.
_replaced: dict[Any, tuple[Any, type]] = globals().get("_replaced", {})
_depth: int = globals().get("_depth", 0)
_kept: bool = globals().get("_kept", False)


def register() -> None:
    """Make TorchRL's losses build these classes: by default, by `ValueEstimators.GAE` and its like, and by "gae".

    The defaults of TorchRL's registry and the loss's own keys are handed on as before. Estimators that exist already,
    and those that are built from TorchRL's classes directly, stay TorchRL's. Undo it with `unregister()`.

    Raises:
        RuntimeError: TorchRL has no registry; it came with 0.13.
    """
    global _kept
    _fill()
    _kept = True


def unregister() -> None:
    """Put TorchRL's own entries back. Does nothing if they are in place."""
    global _kept
    _kept = False
    _clear()


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """`register()` inside a `with` block. Blocks nest."""
    global _depth
    _fill()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        _clear()


def _fill() -> None:
    if not hasattr(utils, "register_value_estimator"):
        raise RuntimeError("this TorchRL has no registry of estimators (0.13 and later have); use torchrl.patch()")
    for name, ours in _CLASSES.items():
        key = utils.ValueEstimators[name]
        if key not in _replaced:
            entry = utils.get_value_estimator_entry(key)
            _replaced[key] = entry, ours
            utils.register_value_estimator(key, default_kwargs=entry.default_kwargs)(ours)


def _clear() -> None:
    if _kept or _depth:
        return
    for key, (entry, ours) in _replaced.items():
        if utils.get_value_estimator_entry(key).cls is ours:
            utils.register_value_estimator(key, default_kwargs=entry.default_kwargs)(entry.cls)
        else:
            warnings.warn(f"{key} was registered again after rl_triton did; that entry is left in place", stacklevel=3)
    _replaced.clear()


# ------------------------------------------------------------------------------------------------------------ Retrace


class Retrace(stock.ValueEstimatorBase):
    """Retrace(λ) for critics of discrete actions (Munos et al. 2016, arXiv 1606.02647): off-policy targets for Q(s, a).

        E'[t] = Σ_a π(a|s'_t) Q(s'_t, a), 0 where terminated;    c[t] = λ min(c_thresh, π(a_t|s_t) / μ(a_t|s_t))
        D[t]  = r[t] + γ E'[t] - Q[t] + γ c[t+1] (not done[t]) D[t+1]
        value_target[t] = Q[t] + D[t]
        advantage[t]    = min(rho_thresh, π/μ) (r[t] + γ x'[t] - Q[t]),
                          x'[t] = E'[t] where done or at the window's edge, else value_target[t+1]

    Reads the observations, `action` (one-hot, or indices of the shape of the reward or without its last axis), the
    behaviour's `sample_log_prob`, and ("next", reward, done, terminated) of shape [*B, T, 1]; writes `advantage` and
    `value_target` of that shape.

    Keyword Args:
        gamma: γ, a float or a 0-d tensor.
        lmbda: λ, the same.
        value_network: the Q-network; it writes `action_value`, [*B, T, n_actions]. None: `action_value` and
            ("next", "action_value") are in the data.
        actor_network: the policy π, with a categorical or one-hot categorical distribution, masked or not; the action
            need not be encoded as this distribution encodes it.
        c_thresh: the bar of the ratios in the trace.
        rho_thresh: the bar of the ratio that the advantage is weighted with.
        average_adv: standardize the advantages, as `VTrace` does.
        differentiable: results carry the graph.
        skip_existing: networks skip what is in the data already.
        device: of the buffers.
        time_dim: the time axis of the tensordict; None: its axis named "time", else its last.
    """

    @dataclass
    class _AcceptedKeys(stock.ValueEstimatorBase._AcceptedKeys):
        """The keys of TorchRL's estimators, the action's, and that of the values of all actions."""

        # set_keys() knows those alone that this class itself holds.
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "chosen_action_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        action: NestedKey = "action"
        action_value: NestedKey = "action_value"

    default_keys = _AcceptedKeys

    def __init__(
        self,
        *,
        gamma: float | torch.Tensor,
        lmbda: float | torch.Tensor = 1.0,
        value_network: TensorDictModule | None,
        actor_network: TensorDictModule,
        c_thresh: float | torch.Tensor = 1.0,
        rho_thresh: float | torch.Tensor = 1.0,
        average_adv: bool = False,
        differentiable: bool = False,
        skip_existing: bool | None = None,
        device: torch.device | None = None,
        time_dim: int | None = None,
    ) -> None:
        super().__init__(
            value_network=value_network, differentiable=differentiable, skip_existing=skip_existing, device=device
        )
        numbers = {"gamma": gamma, "lmbda": lmbda, "c_thresh": c_thresh, "rho_thresh": rho_thresh}
        for name, number in numbers.items():
            number = torch.as_tensor(number, device=self._device)
            if number.dim():
                raise ValueError(f"Retrace: {name} must be a single number, got shape {list(number.shape)}")
            if not number.is_floating_point():
                number = number.to(torch.get_default_dtype())
            self.register_buffer(name, number)
        self.average_adv = average_adv
        # Not a submodule, like value_network: its parameters belong to the loss.
        self.__dict__["actor_network"] = actor_network
        self.time_dim = time_dim

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> Retrace:
        """An estimator with the critic and the actor of a loss; hand it to `loss.make_value_estimator`."""
        if "value_network" not in hyperparams:
            networks = (getattr(loss_module, f"{name}_network", None) for name in ("critic", "qvalue", "value"))
            hyperparams["value_network"] = next((network for network in networks if network is not None), None)
        if "actor_network" not in hyperparams:
            actor = getattr(loss_module, "actor_network", None)
            if actor is None:
                raise ValueError(f"Retrace: {type(loss_module).__name__} has no actor_network; pass actor_network")
            if getattr(loss_module, "functional", False):  # what the loss holds has no parameters of its own
                actor = deepcopy(actor)
                loss_module.actor_network_params.to_module(actor, preserve_module_state=False)
            hyperparams["actor_network"] = actor
        return cls(**hyperparams)

    @property
    def in_keys(self) -> list[NestedKey]:
        networks = [network for network in (self.value_network, self.actor_network) if network is not None]
        observed = list(dict.fromkeys(key for network in networks for key in network.in_keys))
        keys = self.tensor_keys
        if self.value_network is None:
            observed.append(keys.action_value)
        following = [("next", key) for key in (*observed, keys.reward, keys.done, keys.terminated)]
        return [*observed, keys.action, keys.sample_log_prob, *following]

    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write `advantage` and `value_target`.

        Args:
            tensordict: the data, of batch size [*B, T].
            params: parameters for the value network, if it is functional.
            target_params: parameters for the next step's values; those of `params` if not given.
            time_dim: the time axis of the tensordict, in place of the estimator's.
        """
        result = self._estimate(tensordict, params, target_params if target_params is not None else params, time_dim)
        advantage = result.advantages.unsqueeze(-1)
        if self.average_adv:
            advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-5)
        tensordict.set(self.tensor_keys.advantage, advantage)
        tensordict.set(self.tensor_keys.value_target, result.targets.unsqueeze(-1))
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: torch.Tensor | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The targets alone, of the shape of the reward. `next_value` stands in for E', of that shape too."""
        return self._estimate(tensordict, target_params, target_params, time_dim, next_value).targets.unsqueeze(-1)

    def _estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        next_params: TensorDictBase | None,
        time_dim: int | None,
        next_value: torch.Tensor | None = None,
    ) -> rlt.Retrace:
        keys = self.tensor_keys
        if tensordict.batch_dims < 1:
            raise ValueError(f"Retrace: the tensordict needs a time axis, got batch_size {list(tensordict.batch_size)}")
        reward = tensordict.get(("next", keys.reward))
        if reward.shape != (*tensordict.batch_size, 1):
            raise ValueError(
                f"Retrace: {('next', keys.reward)} has shape {list(reward.shape)}, but batch_size and an axis of one, "
                f"{[*tensordict.batch_size, 1]}, is needed"
            )
        axis = self._get_time_dim(time_dim, tensordict)
        batch = tensordict.batch_size
        done = tensordict.get(("next", keys.done))
        terminated = tensordict.get(("next", keys.terminated), default=done)
        for name, number in list(self.named_buffers(recurse=False)):
            if number.device != reward.device:
                setattr(self, name, number.to(reward.device))
        gamma = self.gamma
        steps = tensordict.get(keys.steps_to_next_obs, None)
        if steps is not None:
            gamma = gamma ** self._per_step(keys.steps_to_next_obs, steps, batch)

        skip = contextlib.nullcontext() if self.skip_existing is None else skipping(self.skip_existing)
        with torch.set_grad_enabled(self.differentiable), skip:
            q = self._action_values(tensordict, params)
            index = self._indices(tensordict.get(keys.action), q).unsqueeze(-1)
            # Not by its log_prob(): that broadcasts, without an error, an action of the encoding that it does not know.
            log_pi = self._policy(tensordict, q).logits.gather(-1, index).squeeze(-1)
            following = tensordict.get("next")
            if next_value is None:
                next_q = self._action_values(following, next_params)
                expectation = {"next_q_values": next_q, "next_policy_probs": self._policy(following, next_q).probs}
            else:
                expectation = {"expected_next_q": self._per_step("next_value", next_value, batch)}
            return rlt.retrace(
                reward.squeeze(-1),
                q.gather(-1, index).squeeze(-1),
                self._per_step(("next", keys.terminated), terminated, batch),
                truncated=None if terminated is done else self._per_step(("next", keys.done), done, batch),
                log_rhos=log_pi - self._behaviour(tensordict),
                gamma=gamma,
                lambda_=self.lmbda,
                c_bar=self.c_thresh,
                rho_bar=self.rho_thresh,
                time_dim=axis,
                differentiable=self.differentiable,
                **expectation,
            )

    def _action_values(self, data: TensorDictBase, params: TensorDictBase | None) -> torch.Tensor:
        key = self.tensor_keys.action_value
        if self.value_network is None:
            values = data.get(key, None)
            if values is None:
                raise ValueError(f"Retrace: value_network is None, so {key!r} must be in the data and in its 'next'")
        else:
            network = self.value_network
            holding = (
                utils.hold_out_net(network)
                if params is None
                else params.detach().to_module(network, preserve_module_state=False)
            )
            with holding:
                values = network(data.select(*network.in_keys, key, strict=False)).get(key)
        if values.shape[:-1] != data.batch_size:
            raise ValueError(
                f"Retrace: {key!r} has shape {list(values.shape)}, but batch_size and an axis of actions, "
                f"[{', '.join(map(str, data.batch_size))}, n_actions], is needed"
            )
        return values

    def _policy(self, data: TensorDictBase, q: torch.Tensor) -> Any:
        """The policy's distribution, which has `logits` (log-probabilities) and `probs` of the shape of q."""
        with utils.hold_out_net(self.actor_network):
            policy = self.actor_network.get_dist(data.select(*self.actor_network.in_keys, strict=False))
        wanted = "a Categorical or OneHotCategorical over the actions of the critic"
        if not isinstance(policy, (torch.distributions.Categorical, torch.distributions.OneHotCategorical)):
            raise TypeError(
                f"Retrace: actor_network gives a {type(policy).__name__}, but {wanted} is needed; VTrace takes others"
            )
        if getattr(policy, "_sparse_mask", False):  # its probabilities are in the order of the indices
            raise ValueError(
                f"Retrace: actor_network gives a {type(policy).__name__} of indices, but {wanted} is needed; pass it a "
                "bool mask in place of indices"
            )
        if policy.probs.shape != q.shape:
            raise ValueError(
                f"Retrace: actor_network gives probabilities of shape {list(policy.probs.shape)}, but one per action "
                f"value, {list(q.shape)}, is needed"
            )
        return policy

    def _behaviour(self, tensordict: TensorDictBase) -> torch.Tensor:
        key = self.tensor_keys.sample_log_prob
        log_prob = tensordict.get(key, None)
        if log_prob is None:
            raise ValueError(
                f"Retrace: {key!r}, log μ(a|s) of the behaviour, is missing: collect with "
                "return_log_prob=True, or name it with set_keys(sample_log_prob=...)"
            )
        return self._per_step(key, log_prob, tensordict.batch_size)

    @staticmethod
    def _per_step(name: Any, x: torch.Tensor, batch: torch.Size) -> torch.Tensor:
        """One number a step, without the axis of one that may follow."""
        if x.shape not in (batch, (*batch, 1)):
            raise ValueError(
                f"Retrace: {name!r} has shape {list(x.shape)}, but one number per step, of shape {[*batch, 1]} or "
                f"{list(batch)}, is needed"
            )
        return x.reshape(batch)

    @staticmethod
    def _indices(action: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if action.shape == q.shape:
            # Not as integers: a reparametrized sample has 0.9999999 for a one.
            return (action.byte() if action.dtype is torch.bool else action).argmax(-1)
        if action.shape == (*q.shape[:-1], 1):
            action = action.squeeze(-1)
        if action.shape != q.shape[:-1] or action.is_floating_point():
            raise ValueError(
                f"Retrace: action has shape {list(action.shape)} and dtype {action.dtype}; indices of shape "
                f"{list(q.shape[:-1])}, or one-hot rows of shape {list(q.shape)}, are needed"
            )
        return action.long()
