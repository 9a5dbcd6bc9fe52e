"""TorchRL's value functionals, computed by rl_triton: the same names, arguments and results.

TorchRL stores [*B, T, *F] with the time axis at -2 or at `time_dim`, V of every step's successor in
`next_state_value`, and two flags: `done` cuts the recurrence, `terminated` takes the successor's value away. In the
library's words: `terminated=terminated, truncated=done, next_values=next_state_value`. Nothing is transposed or
copied, nothing waits for the device, and a γ or λ on the device is read there.

Each function here raises `NotServedError` where TorchRL's own should run: for what rl_triton does not compute, and for
what TorchRL refuses, whose errors are its own.

One rule differs. `terminated` without `done`, which no environment of TorchRL emits, cuts the recurrence here; in
TorchRL it cuts in `td1_return_estimate` alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import MemoryMappedTensor

import rl_triton as rlt
from rl_triton.adapters._functions import TRACEABLE, NotServedError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Factor = Any  # float or tensor


# ------------------------------------------------------------------------------------------------------ the arguments


def _check_context() -> None:
    """What runs in a transform or a mode sees other tensors than the memory behind them."""
    if torch.compiler.is_compiling():
        return
    if not TRACEABLE:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotServedError("inside a functorch transform (vmap, grad, jvp)")
        if torch._C._len_torch_dispatch_stack():
            raise NotServedError("under a dispatch mode")
        if torch._C._get_tracing_state() is not None:
            raise NotServedError("traced by torch.jit")
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotServedError("inside forward-mode differentiation")


def _plain(name: str, x: Any) -> torch.Tensor:
    if type(x) in _PLAIN:
        return x
    if type(x) is MemoryMappedTensor:
        return x.as_subclass(torch.Tensor)
    raise NotServedError(f"{name} is a {type(x).__name__}")


def _float_dtype(x: _Factor) -> torch.dtype | None:
    """The dtype that a factor gives to its product with an integer tensor; None where that stays an integer."""
    if isinstance(x, torch.Tensor):
        return x.dtype if x.dtype.is_floating_point else None
    return torch.get_default_dtype() if isinstance(x, float) else None


def _promoted(*dtypes: torch.dtype | None) -> torch.dtype:
    return functools.reduce(torch.promote_types, (dtype for dtype in dtypes if dtype is not None))


def _many(x: _Factor) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() != 1


class _Call:
    """The tensors of one call, checked, and the options that every operation of the library shares."""

    def __init__(
        self,
        time_dim: Any,
        reward: Any,
        done: Any,
        terminated: Any,
        **floats: Any,
    ) -> None:
        _check_context()
        self.reward = _plain("reward", reward)
        self.done = _plain("done", done)
        self.terminated = self.done if terminated is None or terminated is done else _plain("terminated", terminated)
        self.floats = {name: _plain(name, x) for name, x in floats.items()}
        shape = self.shape = self.reward.shape
        if any(x.shape != shape for x in (self.done, self.terminated, *self.floats.values())):
            raise NotServedError("tensors of different shapes")
        if not shape.numel():
            raise NotServedError("no steps or no rows")
        if self.done.dtype is not torch.bool or self.terminated.dtype is not torch.bool:
            raise NotServedError("flags that are not bool")
        if any(not x.dtype.is_floating_point for x in self.floats.values()):
            raise NotServedError("values that are no floating-point numbers")
        self.time_dim = time_dim
        self.axis = self._axis(len(shape))
        self.differentiable = False
        if torch.is_grad_enabled():
            self.differentiable = any(x.requires_grad for x in (self.reward, *self.floats.values()))

    def _axis(self, n_axes: int) -> int:
        """The time axis of a tensor, counted from behind, as TorchRL finds it."""
        if type(self.time_dim) is not int:
            raise NotServedError("time_dim is not an int")
        axis = self.time_dim - n_axes if self.time_dim >= 0 else self.time_dim
        if not -n_axes <= axis < 0:
            raise NotServedError("time_dim is no axis of the tensors")
        if n_axes == 1 and self.shape.numel() == 1:
            raise NotServedError("a single number")  # TorchRL does not take its axis for time
        return axis

    def factor(self, name: str, x: _Factor) -> float | torch.Tensor:
        """γ, λ or a bar: a float, or a tensor that is 0-d or has all axes of the reward, in its layout."""
        if isinstance(x, (float, int)) and not isinstance(x, bool):
            return float(x)
        x = _plain(name, x)
        if x.dtype is torch.bool or x.dtype.is_complex:
            raise NotServedError(f"{name} is no real number")
        if x.device != self.reward.device:
            if x.dim() or x.device.type != "cpu" or x.requires_grad:
                raise NotServedError(f"{name} is on another device")
            return float(x)  # in the host's memory already
        if not x.dtype.is_floating_point:
            x = x.to(torch.get_default_dtype())
        self.differentiable |= x.requires_grad and torch.is_grad_enabled()
        if x.dim() == 0:
            return x
        if x.dim() > len(self.shape):
            raise NotServedError(f"{name} has more axes than the reward")
        if x.numel() == 1:
            return x.reshape(())
        return self._per_step(name, x)

    def _per_step(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A view of x in the shape of the reward. TorchRL brings each tensor's own time axis to -2 and broadcasts."""
        if x.shape == self.shape:
            return x
        like = self.reward
        if self.time_dim != -2:
            x = x.unsqueeze(-1) if x.dim() == 1 and self._axis(1) == -1 else x.transpose(self._axis(x.dim()), -2)
            like = like.unsqueeze(-1) if like.dim() == 1 else like.transpose(self.axis, -2)
        try:
            x = x.expand(like.shape)
        except RuntimeError:
            raise NotServedError(f"{name} does not broadcast to the reward") from None
        if self.time_dim != -2:
            x = x.squeeze(-1) if self.reward.dim() == 1 else x.transpose(self.axis, -2)
        return x

    def run(self, op: Callable[..., Any], dtype: torch.dtype, *values: torch.Tensor | None, **options: Any) -> Any:
        """`op` on the reward, `values` and the flags, in `dtype` where its own result would have a narrower one."""
        reward = self.reward if self.reward.dtype.is_floating_point else self.reward.to(dtype)
        own = reward.dtype
        for x in (*values, options.get("next_values")):
            if x is not None and x.dtype is not own:
                own = torch.promote_types(own, x.dtype)
        if own is not dtype and (wide := torch.promote_types(own, dtype)) != own:
            reward = reward.to(wide)
        try:
            return op(
                reward, *values, self.terminated, time_dim=self.axis, differentiable=self.differentiable, **options
            )
        except (TypeError, ValueError) as error:
            raise NotServedError(f"rl_triton refused the input: {error}") from error

    @property
    def boundaries(self) -> dict[str, torch.Tensor]:
        options = {"next_values": self.floats["next_state_value"]}
        if self.terminated is not self.done:
            options["truncated"] = self.done
        return options

    def returned(self, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if result.dtype is not dtype:
            result = result.to(dtype)
        # A quirk of TorchRL: from [T] with time_dim=0 it returns [T, 1].
        return result.unsqueeze(-1) if result.dim() == 1 and self.time_dim == 0 else result


def _rolling(rolling_gamma: Any) -> None:
    """rolling_gamma=False takes the γ of each step for all that follows it, a scan of its own for every step."""
    if rolling_gamma is not None and not rolling_gamma:
        raise NotServedError("rolling_gamma=False")


# ------------------------------------------------------------------------------------------ generalized advantages


def generalized_advantage_estimate(
    gamma: _Factor,
    lmbda: _Factor,
    state_value: torch.Tensor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage, value target); the advantage has the dtype of the next values."""
    call = _Call(time_dim, reward, done, terminated, state_value=state_value, next_state_value=next_state_value)
    dtype = call.floats["next_state_value"].dtype
    return _gae(call, gamma, lmbda, dtype, _promoted(dtype, call.floats["state_value"].dtype))


def vec_generalized_advantage_estimate(
    gamma: _Factor,
    lmbda: _Factor,
    state_value: torch.Tensor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage, value target), of the promoted dtype of all."""
    call = _Call(time_dim, reward, done, terminated, state_value=state_value, next_state_value=next_state_value)
    if _many(gamma) or _many(lmbda):
        factors = [x.dtype for x in (gamma, lmbda) if _many(x)]
    else:
        factors = [_float_dtype(gamma)]
    dtype = _promoted(call.reward.dtype, *(x.dtype for x in call.floats.values()), *factors)
    return _gae(call, gamma, lmbda, dtype, dtype)


def _gae(
    call: _Call, gamma: _Factor, lmbda: _Factor, dtype: torch.dtype, target_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    factors = {"gamma": call.factor("gamma", gamma), "lambda_": call.factor("lmbda", lmbda)}
    result = call.run(rlt.gae, dtype, call.floats["state_value"], **call.boundaries, **factors)
    return call.returned(result.advantages, dtype), call.returned(result.returns, target_dtype)


# ------------------------------------------------------------------------------------------------------------ returns


def td_lambda_return_estimate(
    gamma: _Factor,
    lmbda: _Factor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> torch.Tensor:
    """TD(λ) returns, of the dtype of the next values."""
    call = _Call(time_dim, reward, done, terminated, next_state_value=next_state_value)
    _rolling(rolling_gamma)
    return _td_lambda(call, gamma, lmbda, call.floats["next_state_value"].dtype)


def vec_td_lambda_return_estimate(
    gamma: _Factor,
    lmbda: _Factor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> torch.Tensor:
    """TD(λ) returns, of the promoted dtype of all."""
    call = _Call(time_dim, reward, done, terminated, next_state_value=next_state_value)
    per_step = _many(gamma) or _many(lmbda)
    if per_step:  # with single numbers TorchRL does not look at it
        _rolling(rolling_gamma)
    factors = [torch.get_default_dtype()] if per_step else []
    dtype = _promoted(
        call.reward.dtype,
        call.floats["next_state_value"].dtype,
        *factors,
        _float_dtype(gamma),
        _float_dtype(lmbda),
    )
    return _td_lambda(call, gamma, lmbda, dtype)


def _td_lambda(call: _Call, gamma: _Factor, lmbda: _Factor, dtype: torch.dtype) -> torch.Tensor:
    if type(lmbda) in (int, float) and lmbda == 1:
        return _td1(call, gamma, dtype)
    factors = {"gamma": call.factor("gamma", gamma), "lambda_": call.factor("lmbda", lmbda)}
    return call.returned(call.run(rlt.td_lambda_returns, dtype, None, **call.boundaries, **factors), dtype)


def td1_return_estimate(
    gamma: _Factor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    rolling_gamma: bool | None = None,
    *,
    time_dim: int = -2,
) -> torch.Tensor:
    """TD(1) returns, of the dtype of the next values."""
    call = _Call(time_dim, reward, done, terminated, next_state_value=next_state_value)
    _rolling(rolling_gamma)
    return _td1(call, gamma, call.floats["next_state_value"].dtype)


def vec_td1_return_estimate(
    gamma: _Factor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    rolling_gamma: bool | None = None,
    time_dim: int = -2,
) -> torch.Tensor:
    """TD(1) returns, of the promoted dtype of all."""
    return vec_td_lambda_return_estimate(
        gamma, 1, next_state_value, reward, done, terminated, rolling_gamma, time_dim=time_dim
    )


def _td1(call: _Call, gamma: _Factor, dtype: torch.dtype) -> torch.Tensor:
    factor = call.factor("gamma", gamma)
    return call.returned(call.run(rlt.discounted_returns, dtype, gamma=factor, **call.boundaries), dtype)


def reward2go(reward: torch.Tensor, done: torch.Tensor, gamma: _Factor, *, time_dim: int = -2) -> torch.Tensor:
    """Discounted sums of rewards up to the end of the trajectory or of the window, without a bootstrap."""
    call = _Call(time_dim, reward, done, None)
    if not call.reward.dtype.is_floating_point:
        raise NotServedError("rewards that are no floating-point numbers")
    if _many(gamma):
        raise NotServedError("gamma is not a single number")
    dtype = call.reward.dtype
    factor = call.factor("gamma", gamma)
    return call.returned(call.run(rlt.discounted_returns, dtype, gamma=factor, last_values=None), dtype)


# ------------------------------------------------------------------------------------------------------------ V-trace


def _vtrace(
    gamma: _Factor,
    log_pi: torch.Tensor,
    log_mu: torch.Tensor,
    state_value: torch.Tensor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    rho_thresh: _Factor = 1.0,
    c_thresh: _Factor = 1.0,
    *by_position: Any,
    time_dim: int = -2,
) -> tuple[_Call, torch.dtype, rlt.VTrace, dict[str, Any]]:
    if by_position:
        raise NotServedError("time_dim by position")  # TorchRL then takes it for something else
    call = _Call(
        time_dim,
        reward,
        done,
        terminated,
        state_value=state_value,
        next_state_value=next_state_value,
        log_pi=log_pi,
        log_mu=log_mu,
    )
    bars = [x.dtype for x in (rho_thresh, c_thresh) if _many(x)]
    dtype = _promoted(call.reward.dtype, *(x.dtype for x in call.floats.values()), _float_dtype(gamma), *bars)
    factors = {
        "gamma": call.factor("gamma", gamma),
        "rho_bar": call.factor("rho_thresh", rho_thresh),
        "c_bar": call.factor("c_thresh", c_thresh),
    }
    value, _, target, behavior = call.floats.values()
    options = {"target_log_probs": target, "behavior_log_probs": behavior, **factors}
    return call, dtype, call.run(rlt.vtrace, dtype, value, **call.boundaries, **options), factors


def _signature_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(decorated: Callable[..., Any]) -> Callable[..., Any]:
        decorated.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return decorated

    return decorate


@_signature_of(_vtrace)
def vtrace_advantage_estimate(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantage, V-trace target), of the promoted dtype of all."""
    call, dtype, result, _ = _vtrace(*args, **kwargs)
    return call.returned(result.advantages, dtype), call.returned(result.targets, dtype)


@_signature_of(_vtrace)
def vtrace_across_truncations(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace as TorchRL computed it before 0.14: where a trajectory is truncated inside the window, its last advantage
    looks at the target of the next row, which is another trajectory's. The targets are right."""
    call, dtype, result, factors = _vtrace(*args, **kwargs)
    value, next_value, log_pi, log_mu = call.floats.values()
    late = call.shape[call.axis] - 1
    following = torch.cat(
        [result.targets.narrow(call.axis, 1, late), next_value.narrow(call.axis, late, 1).to(dtype)], call.axis
    )
    one_step = call.run(rlt.gae, dtype, value, next_values=following, gamma=factors["gamma"], lambda_=0.0)
    ratio, bar = (log_pi - log_mu).exp(), factors["rho_bar"]
    advantages = torch.where(ratio > bar, bar, ratio) * one_step.advantages
    return call.returned(advantages, dtype), call.returned(result.targets, dtype)


NAMES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        generalized_advantage_estimate,
        vec_generalized_advantage_estimate,
        td_lambda_return_estimate,
        vec_td_lambda_return_estimate,
        td1_return_estimate,
        vec_td1_return_estimate,
        vtrace_advantage_estimate,
        reward2go,
    )
}
"""What stands in for each of TorchRL's functions. Its td1 and td_lambda advantages call the returns by name."""
