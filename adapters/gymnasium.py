"""gymnasium: what `VectorEnv.step` returns, turned into the boundary arguments of rl_triton's operations.

Since gymnasium 1.0 a vector environment says in `metadata["autoreset_mode"]` what it does where an episode ends, and
each mode puts the final observation elsewhere:

    NEXT_STEP   step t returns the final observation. The next step ignores its action and resets: that row is no
                transition, also where it is the first of the next window. The value of the final observation is the
                value of that row, so nothing needs to be evaluated again.
    SAME_STEP   step t returns the new episode's first observation, and the final one in infos["final_obs"].
    DISABLED    step t returns the final observation; the caller then resets with `options={"reset_mask": done}`.

    recorder = Recorder(envs.metadata["autoreset_mode"])
    for t in range(T):
        values[t] = critic(obs)
        obs, reward, terminated, truncated, infos = envs.step(policy(obs))
        recorder.step(obs, reward, terminated, truncated, infos)
    window = recorder.window(values, critic(obs), critic)
    advantages, returns = rl_triton.gae(window.rewards, values, **window.boundary, gamma=gamma, lambda_=lambda_)

numpy arrays and torch tensors both work, and gymnasium itself is not needed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Recorder", "Window"]

_MODES = ("NEXT_STEP", "SAME_STEP", "DISABLED")
_SPELLINGS = {mode.replace("_", "").lower(): mode for mode in _MODES}  # gymnasium's own values are "NextStep", ...


class Window(NamedTuple):
    """T steps of N environments, time first, on the device of the values."""

    rewards: torch.Tensor
    """[T, N]."""
    terminated: torch.Tensor
    """[T, N] bool: s'_t is terminal."""
    truncated: torch.Tensor | None
    """[T, N] bool: the episode was cut after step t. None where that happened nowhere (as far as the host knows)."""
    bootstrap_values: torch.Tensor | None
    """[T, N]: V of the final observation where an episode was cut; elsewhere nothing that counts."""
    last_values: torch.Tensor
    """[N]: V of the observation after the last step."""
    valid: torch.Tensor | None
    """[T, N] bool under NEXT_STEP: the row is a transition. Results are 0 elsewhere; leave such rows out of the loss.
    None in the other modes, where every row is one."""

    @property
    def boundary(self) -> dict[str, Any]:
        """The keyword arguments of `gae`, `td_lambda_returns`, `discounted_returns`, `n_step_returns` and `vtrace`.

        (`retrace` bootstraps from its own expectation: it takes all but `bootstrap_values` and `last_values`.)
        """
        return dict(
            terminated=self.terminated,
            truncated=self.truncated,
            bootstrap_values=self.bootstrap_values,
            last_values=self.last_values,
            valid=self.valid,
            time_dim=0,
        )


class Recorder:
    """Collects what `VectorEnv.step` returns, one window after the other.

    Args:
        autoreset_mode: `envs.metadata["autoreset_mode"]`, or its name: "NEXT_STEP", "SAME_STEP" or "DISABLED".

    Raises:
        ValueError: another mode.
    """

    def __init__(self, autoreset_mode: enum.Enum | str) -> None:
        given = autoreset_mode.value if isinstance(autoreset_mode, enum.Enum) else autoreset_mode
        mode = _SPELLINGS.get(str(given).replace("_", "").lower())
        if mode is None:
            raise ValueError(
                f"Recorder: autoreset_mode must be one of {', '.join(_MODES)} (envs.metadata['autoreset_mode']), got "
                f"{autoreset_mode!r}"
            )
        self.mode = mode
        self._ended: Any = None
        """Whether the last step before this window ended an episode; None after a reset."""
        self._clear()

    def _clear(self) -> None:
        self._rewards: list[Any] = []
        self._terminated: list[Any] = []
        self._truncated: list[Any] = []
        self._finals: list[_Finals] = []

    def __len__(self) -> int:
        """The steps of the window so far."""
        return len(self._rewards)

    def reset(self) -> None:
        """To be called when all environments were reset by hand, between windows: no reset row is due any more.

        Raises:
            ValueError: steps of an unfinished window are there; how their episodes ended is not known.
        """
        if self._rewards:
            raise ValueError(
                f"Recorder.reset: {len(self)} steps were recorded since the last window; take window(...) before "
                "resetting the environments"
            )
        self._ended = None

    def step(
        self, obs: Any, rewards: Any, terminated: Any, truncated: Any, infos: dict[str, Any] | None = None
    ) -> None:
        """Record one step: the arguments are what `VectorEnv.step` returned, in its order.

        Final observations are copied, those of truncated environments only. Flags on a GPU are not waited for: there,
        every step's final observations are copied, which takes T x N observations of memory.

        Args:
            obs: array, tensor, or a dict or tuple of them, with a leading axis of N.
            rewards, terminated, truncated: [N], all numpy or all torch.
            infos: needed under SAME_STEP, for its "final_obs".

        Raises:
            ValueError: shapes that do not fit, or a final observation that is missing.
            TypeError: neither numpy nor torch, or some of each.
        """
        named = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        kind: Any = torch.Tensor if isinstance(rewards, torch.Tensor) else np.ndarray
        for name, x in named.items():
            if not isinstance(x, kind):
                raise TypeError(
                    f"Recorder.step: rewards, terminated and truncated must be all numpy arrays or all torch tensors; "
                    f"{name} is {type(x).__name__}, rewards {type(rewards).__name__}"
                )
            expected = self._rewards[0].shape if self._rewards else rewards.shape
            if x.ndim != 1 or x.shape != expected:
                raise ValueError(
                    f"Recorder.step: {name} must have one entry for each environment, {list(expected[:1])}, got "
                    f"{list(x.shape)}"
                )
        if self._ended is not None and (self._ended.shape != rewards.shape or not isinstance(self._ended, kind)):
            raise ValueError(
                f"Recorder.step: rewards is {type(rewards).__name__} of shape {list(rewards.shape)}, and was "
                f"{type(self._ended).__name__} of shape {list(self._ended.shape)} in the window before; environments "
                "that change need a Recorder of their own"
            )
        terminated, truncated = terminated != 0, truncated != 0
        if self.mode != "NEXT_STEP":
            self._keep_finals(obs, truncated & ~terminated, infos)
        self._rewards.append(rewards.copy() if kind is np.ndarray else rewards.clone())
        self._terminated.append(terminated)
        self._truncated.append(truncated)

    def _keep_finals(self, obs: Any, cut: Any, infos: dict[str, Any] | None) -> None:
        t = len(self)
        source = obs
        if self.mode == "SAME_STEP":
            infos = infos or {}
            source = infos.get("final_obs", infos.get("final_observation"))
        if _on_host(cut):
            environments = np.nonzero(np.asarray(cut))[0]
            if len(environments) == 0:
                return
            if source is None:
                raise ValueError(_missing(t, environments))
            self._finals.append(_Finals(t, environments, _rows(source, environments, t)))
        elif source is not None:
            self._finals.append(_Finals(t, None, _map(lambda x: x.clone(), source)))

    def window(
        self,
        values: torch.Tensor,
        last_values: torch.Tensor,
        value_of: Callable[[Any], torch.Tensor] | None = None,
    ) -> Window:
        """End the window: its rewards and boundary, ready for an operation. The next step begins a new one.

        Args:
            values: [T, N], V of the observation that each step began with, a reset row's included.
            last_values: [N], [1, N] or [N, 1]: V of the observation that the last step returned (or of the one after
                the reset, in mode DISABLED; where an episode ended it is not read).
            value_of: V of a batch of K final observations, [K] or [K, 1]; called once, without gradients, and not at
                all where no episode was cut, or under NEXT_STEP. The batch is what `obs` is, as tensors on the device
                of `values`; floating-point arrays come in torch's default dtype. (A recurrent critic needs its state
                at those steps, which is not recorded.)

        Raises:
            ValueError: no steps, shapes that do not fit, or a truncated episode without `value_of`.
            TypeError: `values` or `last_values` is no tensor.
        """
        if not self._rewards:
            raise ValueError("Recorder.window: no step was recorded since the last window")
        shape = (len(self), self._rewards[0].shape[0])
        for name, x in (("values", values), ("last_values", last_values)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"Recorder.window: {name} must be a torch.Tensor, got {type(x).__name__}")
        if values.shape != shape:
            raise ValueError(
                f"Recorder.window: values must have the shape of the window, {list(shape)}, got {list(values.shape)}"
            )
        if last_values.shape not in ((shape[1],), (1, shape[1]), (shape[1], 1)):
            raise ValueError(
                f"Recorder.window: last_values must have one entry for each of {shape[1]} environments, got "
                f"{list(last_values.shape)}"
            )
        values, last_values = values.detach(), last_values.detach().reshape(-1)
        rewards = _stacked(self._rewards, values.device)
        if isinstance(self._rewards[0], np.ndarray):
            rewards = rewards.to(values.dtype)  # gymnasium's are float64 or integers, whatever the networks compute in
        terminated = _stacked(self._terminated, values.device)
        truncated: torch.Tensor | None = _stacked(self._truncated, values.device)
        valid = bootstrap = None
        if self.mode == "NEXT_STEP":
            valid = self._transitions().to(values.device)
            if self._any_cut():
                bootstrap = torch.cat([values[1:], last_values.to(values.dtype)[None]])
        else:
            bootstrap = self._values_of_finals(values, value_of)
        if bootstrap is None:
            truncated = None
        self._ended = self._terminated[-1] | self._truncated[-1]
        self._clear()
        return Window(rewards, terminated, truncated, bootstrap, last_values, valid)

    def _any_cut(self) -> bool:
        """Whether an episode was truncated, as far as the host can say without waiting for a device."""
        if not _on_host(self._terminated[0]):
            return True
        return any(bool((s & ~e).any()) for e, s in zip(self._terminated, self._truncated, strict=True))

    def _transitions(self) -> torch.Tensor:
        """False on the rows behind a step that ended an episode."""
        ended = [e | s for e, s in zip(self._terminated, self._truncated, strict=True)]
        first = ended[0] & False if self._ended is None else self._ended
        return ~_stacked([first, *ended[:-1]], None)

    def _values_of_finals(self, values: torch.Tensor, value_of: Callable[[Any], torch.Tensor] | None) -> Any:
        if _on_host(self._terminated[0]):
            if not self._finals:
                return None
            steps = np.concatenate([np.full(len(final.environments), final.t) for final in self._finals])
            environments = np.concatenate([final.environments for final in self._finals])
            at = torch.from_numpy(steps).to(values.device), torch.from_numpy(environments).to(values.device)
            rows = [final.observations for final in self._finals]
            batch = _zipped(lambda *parts: _tensor(parts, values.device), rows)
        else:
            cut = torch.stack(self._truncated) & ~torch.stack(self._terminated)
            at = tuple(cut.nonzero().t())  # the one place that waits for the device
            if len(at[0]) == 0:
                return None
            kept = {final.t: place for place, final in enumerate(self._finals)}
            if len(kept) < len(self):  # steps without final observations must be steps without cuts
                for t, environment in cut.nonzero().tolist():
                    if t not in kept:
                        raise ValueError(_missing(t, [environment]))
            places = torch.tensor([kept.get(t, 0) for t in range(len(self))], device=cut.device)[at[0]]
            every = [final.observations for final in self._finals]
            batch = _zipped(lambda *parts: torch.stack(parts)[places, at[1]].to(values.device), every)
            at = at[0].to(values.device), at[1].to(values.device)
        count = len(at[0])
        if value_of is None:
            raise ValueError(
                f"Recorder.window: {count} episodes were truncated; pass value_of, which returns V of a batch of their "
                "final observations"
            )
        with torch.no_grad():
            final_values = value_of(batch)
        if not isinstance(final_values, torch.Tensor) or final_values.shape not in ((count,), (count, 1)):
            got = list(final_values.shape) if isinstance(final_values, torch.Tensor) else type(final_values).__name__
            raise ValueError(f"Recorder.window: value_of must return [{count}] or [{count}, 1], one a row, got {got}")
        bootstrap = torch.zeros_like(values)
        bootstrap[at] = final_values.reshape(-1).to(values)
        return bootstrap


class _Finals(NamedTuple):
    """The final observations of one step."""

    t: int
    environments: Any
    """Which environments they are of; None: all, and some of them count."""
    observations: Any


def _missing(t: int, environments: Any) -> str:
    return (
        f"Recorder: environment {environments[0]} was truncated in step {t} of the window, and its final observation "
        "is missing: under SAME_STEP, pass the infos of VectorEnv.step, which hold it as 'final_obs'"
    )


def _on_host(x: Any) -> bool:
    return isinstance(x, np.ndarray) or x.device.type == "cpu"


def _stacked(rows: list[Any], device: torch.device | None) -> torch.Tensor:
    stacked = torch.from_numpy(np.stack(rows)) if isinstance(rows[0], np.ndarray) else torch.stack(rows)
    return stacked.to(device)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Observations are arrays, or dicts and tuples of observations."""
    if isinstance(tree, dict):
        return {key: _map(function, x) for key, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_map(function, x) for x in tree)
    return function(tree)


def _zipped(function: Callable[..., Any], trees: list[Any]) -> Any:
    """function(x, y, ...) for the arrays that stand in the same place of each tree."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _zipped(function, [tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple):
        return tuple(_zipped(function, list(parts)) for parts in zip(*trees, strict=True))
    return function(*trees)


def _rows(source: Any, environments: np.ndarray, t: int) -> Any:
    """Copies of some environments' observations: of a batch, or of an object array with an observation each."""
    if isinstance(source, np.ndarray) and source.dtype == object:
        single = [source[i] for i in environments]
        missing = [int(i) for i, x in zip(environments, single, strict=True) if x is None]
        if missing:
            raise ValueError(_missing(t, missing))
        return _zipped(lambda *parts: np.stack([np.asarray(x) for x in parts]), single)

    def take(x: Any) -> Any:
        return x[torch.from_numpy(environments)] if isinstance(x, torch.Tensor) else x[environments]

    return _map(take, source)


def _tensor(parts: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts).to(device)
    x = torch.from_numpy(np.concatenate(parts))
    return x.to(device, torch.get_default_dtype() if x.is_floating_point() else x.dtype)
