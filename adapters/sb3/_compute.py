"""One call of `RolloutBuffer.compute_returns_and_advantage`, done by the library, or the reason why it is not."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

import rl_triton as rlt
from rl_triton.adapters.sb3._kept import addresses_of, kind_of
from rl_triton.adapters.sb3._screen import CLEAN, FLAGS, screen

SHORT = 2
"""Rollouts of fewer steps are left to Stable-Baselines3 if they are also small: its loop costs about 4 us a step beside
another 4 us, our call 12 us however short, and leaving it to that loop some 3 us. 0 serves all."""
SMALL = 65536
"""Elements, steps times environments, from which on a short rollout is served all the same."""

FACTORS = "gamma, gae_lambda or their product is not finite in float32"
FINITE = "rewards, values or last_values that are not finite"
FLAGS_ONLY = "flags other than 0 and 1"
SHARED = "advantages share memory with another array"
TOO_SHORT = "a rollout so short that Stable-Baselines3's loop is faster"

_ARRAYS = ("rewards", "values", "episode_starts", "advantages")
_CPU = torch.device("cpu")
_FLOAT32 = np.dtype(np.float32)
_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS = (float, int)
_NARROW = (np.float32, np.float16)  # of which 1.0 - dones is not float64
_REFUSALS = (TypeError, ValueError, torch.OutOfMemoryError)
_staging_lock = threading.Lock()


class Body(NamedTuple):
    """How the installed `compute_returns_and_advantage` rounds."""

    carries_float64: bool
    """Up to Stable-Baselines3 2.3: `1.0 - dones` of bool flags is float64, and so is the carry from there on."""


FLOAT32 = Body(carries_float64=False)
FLOAT64 = Body(carries_float64=True)


def serve(buffer: Any, last_values: Any, dones: Any, device: torch.device, body: Body) -> str | None:
    """Fill `buffer.advantages` in place and bind `buffer.returns`; or return why Stable-Baselines3 should do it."""
    if type(buffer.gamma) not in _NUMBERS or type(buffer.gae_lambda) not in _NUMBERS:
        return "gamma or gae_lambda is not a Python number"
    if not (is_finite(buffer.gamma) and is_finite(buffer.gae_lambda) and is_finite(buffer.gamma * buffer.gae_lambda)):
        return FACTORS
    if type(buffer.rewards) is torch.Tensor:
        return _serve_tensors(buffer, last_values, dones, body)
    n_steps, n_envs = shape = buffer.buffer_size, buffer.n_envs
    if n_steps < SHORT and n_steps * n_envs < SMALL and device.type == "cpu":
        return TOO_SHORT
    plain = True
    for name in _ARRAYS:
        x = getattr(buffer, name)
        if type(x) is not np.ndarray:
            return f"{name} is not a numpy array"
        if x.dtype != _FLOAT32:
            return f"{name} is not float32"
        if x.shape != shape:
            return f"{name} has not the shape (n_steps, n_envs)"
        if not x.flags.carray:  # C-contiguous, aligned and writeable
            plain = False
            if not x.flags.writeable:
                return f"{name} is read-only"
    reason = _check_edge(last_values, dones, n_envs)
    if reason is not None:
        return reason
    if type(dones) is not np.ndarray:
        return "dones is not a numpy array with one entry for each environment"
    wide = body.carries_float64 and dones.dtype.type not in _NARROW
    if dones.dtype != np.bool_:
        if not _is_binary(dones):
            return FLAGS_ONLY
        dones = dones != 0
    on_cpu = device.type == "cpu" or torch.cuda._is_in_bad_fork()  # CUDA does not survive a fork
    edge = last_values.numpy() if last_values.device == _CPU else last_values.cpu().numpy()
    edge = edge.reshape(-1)
    given, advantages = (buffer.rewards, buffer.values, buffer.episode_starts, edge, dones), buffer.advantages
    returns = np.empty_like(advantages)
    addresses = None
    if plain and dones.flags.carray and edge.flags.carray:
        addresses = addresses_of(*given, advantages, returns)
        if addresses is None:
            return SHARED
    elif any(np.may_share_memory(advantages, x) for x in given):
        return SHARED
    try:
        if not on_cpu:
            _compute_on(device, buffer, edge, dones, returns)
        elif wide:
            _compute_float64(buffer, edge, dones, returns)
        else:
            _compute(buffer, edge, dones, returns, addresses)
    except _REFUSALS as error:
        return f"rl_triton refused the input: {error}"
    reason = _unclean(buffer.episode_starts, edge, returns)
    if reason is None:
        buffer.returns = returns
    return reason


def _check_edge(last_values: Any, dones: Any, n_envs: int) -> str | None:
    if type(last_values) is not torch.Tensor or last_values.dtype != torch.float32:
        return "last_values is not a float32 tensor"
    if last_values.requires_grad:
        return "last_values requires grad"
    if last_values.numel() != n_envs:
        return "last_values has not one entry for each environment"
    if type(dones) not in (np.ndarray, torch.Tensor) or dones.shape != (n_envs,):
        return "dones is not a numpy array with one entry for each environment"
    if type(dones) is np.ndarray and (dones.dtype.kind not in "biuf" or dones.itemsize > 8):
        return "dones has a dtype that torch does not have"
    return None


def is_finite(factor: float) -> bool:
    """Whether a factor is, in float32. Stable-Baselines3 multiplies factors by its masks, and inf * 0 is NaN; ours
    selects."""
    return abs(factor) <= _LARGEST


def _is_binary(flags: Any) -> bool:
    return bool(((flags == 0) | (flags == 1)).all())


def _unclean(starts: np.ndarray, last_values: np.ndarray, results: np.ndarray) -> str | None:
    """Stable-Baselines3 multiplies by its masks: fractions of a flag count, and NaN spreads over an episode's end,
    which is what its users look for."""
    found = screen(starts, last_values, results)
    return None if found == CLEAN else FLAGS_ONLY if found == FLAGS else FINITE


def _is_describable(x: np.ndarray) -> bool:
    """Whether torch has strides for it: it knows no negative ones, and none that split an element."""
    return all(stride >= 0 and stride % x.itemsize == 0 for stride in x.strides)


def _tensor(x: np.ndarray) -> torch.Tensor:
    """The array's memory where torch can describe it and does not warn that it may not write there, else a copy."""
    return torch.from_numpy(x if _is_describable(x) and x.flags.writeable else x.copy())


def _gae(buffer: Any, *arrays: torch.Tensor, function: Any = rlt.gae, **options: Any) -> Any:
    rewards, values, starts, last_values, last_done = arrays
    return function(
        rewards,
        values,
        starts,
        last_values=last_values,
        last_done=last_done,
        flags_at="start",
        gamma=buffer.gamma,
        lambda_=options.pop("lambda_", buffer.gae_lambda),
        time_dim=0,
        **options,
    )


def _compute(
    buffer: Any, last_values: np.ndarray, dones: np.ndarray, returns: np.ndarray, addresses: tuple[int, ...] | None
) -> None:
    """In place on the host, with the bits of the float32 body."""
    n_steps, n_envs = returns.shape
    kind = kind_of(n_steps, n_envs, buffer.gamma, buffer.gae_lambda) if addresses else None
    if addresses and kind is not None and kind.loop is not None:
        kind.loop((*addresses, 0))
        return
    advantages = buffer.advantages if _is_describable(buffer.advantages) else np.empty_like(returns)
    arrays = buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones, advantages, returns
    tensors = list(map(_tensor, arrays))
    call = functools.partial(_gae, buffer, *tensors[:5], out=tuple(tensors[5:]))
    if kind is None or kind.tried:
        call()
    else:
        kind.keep(functools.partial(call, function=inspect.unwrap(rlt.gae)), tensors)
    if advantages is not buffer.advantages:
        buffer.advantages[...] = advantages


def _compute_float64(buffer: Any, last_values: np.ndarray, dones: np.ndarray, returns: np.ndarray) -> None:
    """With the bits of the body that carries float64: the differences δ and the decay are float32 as before, but for
    the last step's δ, and what is carried over them is float64."""
    given = map(_tensor, (buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones))
    deltas = _gae(buffer, *given, lambda_=0.0).advantages
    alpha = deltas.double()
    bootstrap = np.where(dones, np.float64(0), buffer.gamma * last_values)  # the product rounds to float32
    alpha[-1] = torch.from_numpy(buffer.rewards[-1] + bootstrap - buffer.values[-1])
    beta = np.zeros(returns.shape, np.float64)
    beta[:-1][buffer.episode_starts[1:] == 0] = np.float32(buffer.gamma * buffer.gae_lambda)
    buffer.advantages[...] = rlt.affine_scan(alpha, torch.from_numpy(beta), time_dim=0).numpy()
    np.add(buffer.advantages, buffer.values, out=returns)


@functools.lru_cache(maxsize=8)
def _staging(n_rows: int, n_envs: int, pinned: bool) -> torch.Tensor:
    """Page-locked memory, which a device copies from and to at full speed; kept, since locking pages takes long."""
    return torch.empty(n_rows, n_envs, pin_memory=pinned)


def _compute_on(
    device: torch.device, buffer: Any, last_values: np.ndarray, dones: np.ndarray, returns: np.ndarray
) -> None:
    """On a device, with one copy there and one back."""
    n_steps, n_envs = returns.shape
    rows = [n_steps, n_steps, n_steps, 1, 1]
    pinned = device.type == "cuda"
    with _staging_lock:
        staged = _staging(sum(rows), n_envs, pinned)
        given = (buffer.rewards, buffer.values, buffer.episode_starts, last_values, dones)
        for place, x in zip(staged.split(rows), given, strict=True):
            np.copyto(place.numpy(), x)
        rewards, values, starts, edge, done = staged.to(device, non_blocking=True).split(rows)
        results = torch.empty(2, n_steps, n_envs, device=device)
        _gae(buffer, rewards, values, starts, edge[0], done[0], out=tuple(results))
        back = _staging(2 * n_steps, n_envs, pinned)
        back.copy_(results.view_as(back))  # waits: the host reads it next
        buffer.advantages[...], returns[...] = back.numpy().reshape(2, n_steps, n_envs)


def _serve_tensors(buffer: Any, last_values: Any, dones: Any, body: Body) -> str | None:
    """A buffer whose arrays are tensors: on their device, without a copy. On the host the data are looked at as those
    of a numpy buffer are; on another device they are not, since Stable-Baselines3 could not compute there anyway."""
    device, shape = buffer.rewards.device, (buffer.buffer_size, buffer.n_envs)
    if device.type == "cpu" and body.carries_float64:
        return "tensors on the host, of which this Stable-Baselines3 carries some in float64"
    for name in _ARRAYS:
        x = getattr(buffer, name)
        if type(x) is not torch.Tensor or x.device != device:
            return f"{name} is not a tensor on the device of rewards"
        if x.dtype != torch.float32:
            return f"{name} is not float32"
        if x.shape != shape:
            return f"{name} has not the shape (n_steps, n_envs)"
        if x.requires_grad:
            return f"{name} requires grad"
    reason = _check_edge(last_values, dones, buffer.n_envs)
    if reason is not None:
        return reason
    if device.type == "cpu" and not _is_binary(dones):
        return FLAGS_ONLY
    if type(dones) is np.ndarray:
        dones = torch.from_numpy(dones != 0)
    edge = last_values.to(device).reshape(-1)
    returns = torch.empty_like(buffer.advantages)
    try:
        _gae(
            buffer,
            buffer.rewards,
            buffer.values,
            buffer.episode_starts,
            edge,
            dones.to(device),
            out=(buffer.advantages, returns),
        )
    except _REFUSALS as error:
        return f"rl_triton refused the input: {error}"
    if device.type == "cpu":
        reason = _unclean(buffer.episode_starts.numpy(), edge.numpy(), returns.numpy())
    if reason is None:
        buffer.returns = returns
    return reason
