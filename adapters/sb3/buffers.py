"""Rollout buffers for `rollout_buffer_class=`, for those who would rather name a class than patch.

| class | arrays | observations |
|---|---|---|
| `ScanRolloutBuffer`, `ScanDictRolloutBuffer` | numpy, as Stable-Baselines3's own | Box and the like; Dict |
| `TensorRolloutBuffer`, `TensorDictRolloutBuffer` | tensors on the model's device | Box and the like; Dict |
| `ExtraHeads` | a mixin for any of them: more value heads, one batched call | |

`rl_triton.adapters.sb3.contrib_buffers` holds those with action masks and with LSTM states.

A saved model names its buffer class. To load it where rl_triton is not installed, pass
`custom_objects={"rollout_buffer_class": RolloutBuffer}`, or save with `exclude=["rollout_buffer_class"]`.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete

import rl_triton as rlt
from rl_triton.adapters._patching import Entry
from rl_triton.adapters.sb3._behaviour import rollout_buffer_class
from rl_triton.adapters.sb3._compute import FLOAT32, is_finite, serve
from rl_triton.adapters.sb3._resident import Resident, as_tensor, edge, factor, store

rollout_buffer_class()  # says what to install

from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer  # noqa: E402
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples  # noqa: E402

_CPU = torch.device("cpu")


class Scan:
    """Mixin: `rl_triton.gae` on numpy arrays, without a patch.

    Float32 results have the bits of Stable-Baselines3 2.4 and later. What is not served goes to `super()`; both are
    counted in `rl_triton.adapters.status()`.
    """

    _entry = Entry(f"{__name__}.Scan.compute_returns_and_advantage")

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        reason = serve(self, last_values, dones, _CPU, FLOAT32)
        self._entry.count(reason)
        if reason is not None:
            super().compute_returns_and_advantage(last_values, dones)  # type: ignore[misc]


class ScanRolloutBuffer(Scan, RolloutBuffer):
    """`RolloutBuffer` that computes with `rl_triton.gae`."""


class ScanDictRolloutBuffer(Scan, DictRolloutBuffer):
    """`DictRolloutBuffer` that computes with `rl_triton.gae`."""


# ---------------------------------------------------------------------------------------- on the device of the model


class TensorStorage(Resident):
    """Mixin: everything that a rollout holds lives in tensors on `self.device`, in `self.tensors`, by name.

    Observations go to the device once, when they are stored, instead of once a minibatch and epoch; values and
    log-probabilities do not leave it. Shapes are those of Stable-Baselines3: [n_steps, n_envs, ...], and from the first
    `get()` on [n_envs * n_steps, ...].

    As an attribute, `buffer.rewards` for instance, a field is a read-only numpy array (a copy, unless the device is the
    host), which is what Stable-Baselines3's logging reads. Assign a new array or tensor, which takes the field's dtype,
    or write to `buffer.tensors["rewards"]`. Assign to `buffer.device` to move them all.

    Unlike a numpy buffer it serves every call on its own: NaN and inf do not reach beyond an episode's end, flags
    that are not 0 count as 1, and gamma and gae_lambda may be tensors that broadcast to [n_steps, n_envs]. Numbers that
    are not finite are refused there.
    """

    _SCALARS = ("rewards", "values", "episode_starts", "advantages", "returns", "log_probs")
    _FIELDS: tuple[str, ...] = ("observations", "actions", *_SCALARS)
    _FLATTENED: tuple[str, ...] = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    _entry = Entry(f"{__name__}.TensorStorage.compute_returns_and_advantage")

    tensors: dict[str, Any]
    # Of the class of Stable-Baselines3 that this is mixed into:
    buffer_size: int
    n_envs: int
    pos: int
    full: bool
    generator_ready: bool
    observation_space: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._FIELDS:
            self.tensors[name] = self._placed(value, self.tensors.get(name))
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._FIELDS and "tensors" in self.__dict__:
            field = self.tensors[name]
            return field if self._resetting else _on_host(field)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _placed(self, x: Any, before: Any = None) -> Any:
        """x on the device, in the dtype of what it takes the place of."""
        if isinstance(x, Mapping):  # reset() fills an empty one after it has assigned it
            return {key: self._placed(part, before and before[key]) for key, part in x.items()} if x else x
        if self._resetting:  # of equal entries: nothing to copy
            return torch.full(x.shape, x.flat[0].item(), dtype=_dtype(x), device=self.device)
        return as_tensor(x, before.dtype).to(self.device, before.dtype)

    _resetting = False

    def reset(self) -> None:
        super().__setattr__("tensors", {})
        super().__setattr__("_resetting", True)
        super().reset()  # type: ignore[misc]
        observations = self.tensors["observations"]
        if isinstance(observations, dict):
            self.tensors["observations"] = self._placed(observations)
        super().__setattr__("_resetting", False)

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        given = {
            "observations": obs,
            "actions": action,
            "rewards": reward,
            "episode_starts": episode_start,
            "values": as_tensor(value).reshape(-1),
            "log_probs": log_prob,
        }
        for name, x in given.items():
            self._store(name, x, reshape=name == "actions")
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True

    def _store(self, name: str, x: Any, *, reshape: bool = False) -> None:
        """Write to the current step of a field."""
        field, space, what = self.tensors[name], self.observation_space, f"{type(self).__name__}.add: {name}"
        if isinstance(field, dict):
            for key, part in field.items():
                store(f"{what}[{key!r}]", part[self.pos], x[key], reshape=isinstance(space[key], Discrete))
        else:
            reshape = reshape or (name == "observations" and isinstance(space, Discrete))
            store(what, field[self.pos], x, reshape=reshape)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        """Advantages and returns on the device, with nothing copied but the flags of the last step."""
        tensors = self.tensors
        tensors["advantages"], tensors["returns"] = self._gae(tensors["rewards"], tensors["values"], last_values, dones)
        self._entry.count(None)

    def _gae(self, rewards: torch.Tensor, values: torch.Tensor, last_values: Any, dones: Any) -> Any:
        op, n_envs, device = f"{type(self).__name__}.compute_returns_and_advantage", self.n_envs, self.device
        return rlt.gae(
            rewards,
            values,
            self.tensors["episode_starts"],
            last_values=edge(f"{op}: last_values", last_values, n_envs, torch.float32, device),
            last_done=edge(f"{op}: dones", dones, n_envs, torch.bool, device),
            flags_at="start",
            gamma=factor(self, "gamma"),
            lambda_=factor(self, "gae_lambda"),
            time_dim=0,
        )

    def recompute(self, values: torch.Tensor, last_values: torch.Tensor, dones: Any) -> None:
        """Advantages and returns with other values of the stored states, [n_steps, n_envs]; for
        `rl_triton.adapters.sb3.recompute_advantages`."""
        results = self._gae(self.tensors["rewards"], values, last_values, dones)
        for name, x in zip(("advantages", "returns"), results, strict=True):
            self.tensors[name] = self._flat(x) if self.generator_ready else x

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Minibatches in the random order that Stable-Baselines3 would use."""
        indices = np.random.permutation(self._check_full())
        self._flatten()
        for chosen in torch.from_numpy(indices).to(self.device).split(batch_size or len(indices)):
            yield self._get_samples(chosen)

    def _check_full(self) -> int:
        if not self.full:
            raise RuntimeError(f"{type(self).__name__}: the rollout is not complete: {self.pos} of {self.buffer_size}")
        return self.buffer_size * self.n_envs

    def _flatten(self) -> None:
        if not self.generator_ready:
            for name in self._FLATTENED:
                self.tensors[name] = self._flat(self.tensors[name])
            self.generator_ready = True

    def _flat(self, x: Any) -> Any:
        """[n_steps, n_envs, ...] as [n_envs * n_steps, ...]; scalars get a last axis of one."""
        if isinstance(x, dict):
            return {key: self._flat(part) for key, part in x.items()}
        return x.transpose(0, 1).reshape(self.buffer_size * self.n_envs, *(x.shape[2:] or (1,)))

    def _get_samples(self, chosen: torch.Tensor, env: Any = None) -> Any:
        observations = self.tensors["observations"]
        if isinstance(observations, dict):
            samples, picked = DictRolloutBufferSamples, {key: x[chosen] for key, x in observations.items()}
        else:
            samples, picked = RolloutBufferSamples, observations[chosen]
        return samples(picked, self.tensors["actions"][chosen].float(), *self._scalars(chosen))

    def _scalars(self, chosen: torch.Tensor) -> list[torch.Tensor]:
        names = ("values", "log_probs", "advantages", "returns")
        return [self.tensors[name][chosen].flatten() for name in names]


class TensorRolloutBuffer(TensorStorage, RolloutBuffer):
    """`RolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


class TensorDictRolloutBuffer(TensorStorage, DictRolloutBuffer):
    """`DictRolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


def _dtype(x: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, x.dtype)).dtype


def _on_host(x: Any) -> Any:
    if isinstance(x, dict):
        return MappingProxyType({key: _on_host(part) for key, part in x.items()})
    copy = x.cpu().numpy()
    if x.device.type == "cpu":
        copy = copy.view()
    copy.flags.writeable = False
    return copy


# ------------------------------------------------------------------------------------------------- more value heads


class ExtraHeads:
    """Mixin: value heads besides the reward's, for costs, entropy, intrinsic rewards or several objectives.

        class CostBuffer(ExtraHeads, ScanRolloutBuffer): ...

        PPO(..., rollout_buffer_class=CostBuffer,
            rollout_buffer_kwargs={"heads": ("cost", "curiosity"), "head_gammas": (0.999, 0.99)})

    Each step, before the collector's `add` (a callback's `_on_step` is such a moment), pass what belongs to it to
    `add_heads`. At the rollout's end call `compute_heads` with the heads' values of the last observations; then each
    minibatch of `get()` has three more fields, [batch, heads]: `head_values`, `head_advantages`, `head_returns`.
    All heads are one call of `rl_triton.gae` with a leading axis:

        δ_h[t] = r_h[t] + γ_h V_h[t+1] - V_h[t],   A_h[t] = δ_h[t] + γ_h λ_h A_h[t+1],   returns_h = A_h + V_h

    with both sums stopped at an episode's end. A time limit ends an episode for the heads; who wants to bootstrap
    there adds γ_h V_h(final observation) to r_h, as the collector does for the reward.

    Args (besides those of the buffer):
        heads: their names.
        head_gammas, head_lambdas: γ and λ of each; by default the buffer's own at the time of the call.
    """

    tensors: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        heads: Sequence[str] = (),
        head_gammas: Sequence[float] | None = None,
        head_lambdas: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(heads, str):
            raise TypeError(f"ExtraHeads: heads must be a sequence of names, got {heads!r}; pass ({heads!r},)")
        if not heads or len(set(heads)) < len(heads):
            raise ValueError(f"ExtraHeads: heads must be names, each once, got {tuple(heads)!r}")
        for name, factors in (("head_gammas", head_gammas), ("head_lambdas", head_lambdas)):
            if factors is not None and len(factors) != len(heads):
                raise ValueError(f"ExtraHeads: {name} must have one entry a head ({len(heads)}), got {len(factors)}")
            if factors is not None and not all(is_finite(float(x)) for x in factors):
                raise ValueError(f"ExtraHeads: {name} must be finite in float32, got {factors}")
        self.heads = tuple(heads)
        self.head_gammas, self.head_lambdas = head_gammas, head_lambdas
        super().__init__(*args, **kwargs)
        if hasattr(self, "hidden_state_shape"):
            raise TypeError(
                "ExtraHeads: a recurrent buffer pads its minibatches to sequences, which the heads' are not"
            )

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        resident = isinstance(self, TensorStorage)
        shape = (len(self.heads), self.buffer_size, self.n_envs)  # type: ignore[attr-defined]
        made = functools.partial(torch.zeros, shape, device=self.device if resident else _CPU)  # type: ignore[attr-defined]
        self.head_rewards, self.head_values, self.head_advantages, self.head_returns = made(), made(), made(), made()

    def add_heads(self, rewards: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """The heads' rewards and values of the current step, by name, each with one entry an environment."""
        for argument, given in (("rewards", rewards), ("values", values)):
            if set(given) != set(self.heads):
                raise ValueError(f"add_heads: {argument} must name {self.heads}, got {tuple(given)}")
        if self.full:  # type: ignore[attr-defined]
            raise RuntimeError(
                "add_heads: the rollout is complete; heads are stored before the step that they belong to"
            )
        kinds = (("rewards", rewards, self.head_rewards), ("values", values, self.head_values))
        for argument, given, field in kinds:
            for head, name in enumerate(self.heads):
                row = field[head, self.pos]  # type: ignore[attr-defined]
                store(f"add_heads: {argument}[{name!r}]", row, as_tensor(given[name], row.dtype).reshape(-1))

    def compute_heads(self, last_values: Mapping[str, Any], dones: Any) -> None:
        """Advantages and returns of all heads, from their values of the observations after the last step."""
        if set(last_values) != set(self.heads):
            raise ValueError(f"compute_heads: last_values must name {self.heads}, got {tuple(last_values)}")
        n_heads, n_envs, device = self.head_rewards.shape[0], self.head_rewards.shape[2], self.head_rewards.device
        last = [
            edge(f"compute_heads: last_values[{name!r}]", last_values[name], n_envs, torch.float32, device)
            for name in self.heads
        ]
        starts, done = as_tensor(self._starts()), edge("compute_heads: dones", dones, n_envs, torch.bool, device)
        self.head_advantages, self.head_returns = rlt.gae(
            self.head_rewards,
            self.head_values,
            starts.expand(n_heads, *starts.shape),
            last_values=torch.stack(last),
            last_done=done.expand(n_heads, *done.shape),
            flags_at="start",
            gamma=self._factors(self.head_gammas, "gamma"),
            lambda_=self._factors(self.head_lambdas, "gae_lambda"),
            time_dim=1,
        )

    def _starts(self) -> Any:
        return self.tensors["episode_starts"] if isinstance(self, TensorStorage) else self.episode_starts  # type: ignore[attr-defined]

    def _factors(self, factors: Sequence[float] | None, name: str) -> Any:
        if factors is not None:
            given = [float(x) for x in factors]  # or torch would make integers of integers
            return torch.tensor(given, dtype=torch.float32, device=self.head_rewards.device).reshape(-1, 1, 1)
        x = factor(self, name)  # a tensor, or an array, as it broadcasts to [n_steps, n_envs]
        return x if isinstance(x, (int, float)) else as_tensor(x).to(self.head_rewards.device)[(None,) * (3 - x.ndim)]

    def _get_samples(self, batch_inds: Any, *args: Any) -> Any:
        samples = super()._get_samples(batch_inds, *args)  # type: ignore[misc]
        n_heads = len(self.heads)
        chosen = torch.as_tensor(batch_inds, device=self.head_rewards.device)
        more = [
            x.transpose(1, 2).reshape(n_heads, -1)[:, chosen].T.to(self.device)  # type: ignore[attr-defined]
            for x in (self.head_values, self.head_advantages, self.head_returns)
        ]
        kind: Any = type(samples)
        return _with_heads(kind)(*samples, *more)


@functools.cache
def _with_heads(samples: Any) -> Any:
    fields = ("head_values", "head_advantages", "head_returns")
    name = f"{samples.__name__}WithHeads"
    # pickle finds no class that is made here, so a sample names the one that it is made of
    members = {"__slots__": (), "__reduce__": lambda self: (_sample_with_heads, (samples, *self))}
    return type(name, (namedtuple(name, (*samples._fields, *fields)),), members)


def _sample_with_heads(samples: Any, *fields: Any) -> Any:
    return _with_heads(samples)(*fields)
