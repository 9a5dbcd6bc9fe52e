"""Plain loops, written from the papers, in any float precision: what the fast paths are measured against.

Same arguments as the public functions, plus `dtype`, the precision of the loop (float64 by default). They share no
code with the kernels: the boundary rules are resolved first, one row at a time, by looking for the next valid row and
the first flag before it; the recurrence then follows the paper's own equation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


class _Window(NamedTuple):
    """Boundaries of T steps of N rows, resolved. Arrays are [T, N]."""

    valid: np.ndarray
    cut: np.ndarray
    v_next: np.ndarray
    following: np.ndarray
    """Index of the next valid row; T where there is none."""
    ended_before: np.ndarray
    """[N]: a flag stands before the row's first valid step."""
    value_before: np.ndarray
    """[N]: the value beyond that flag."""


def _time_first(x: torch.Tensor, time_dim: int, dtype: Any) -> np.ndarray:
    x = x.detach().cpu()
    if dtype is bool:
        x = x != 0
    else:
        x = x.to({np.float32: torch.float32, np.float64: torch.float64}[dtype])
    return x.movedim(time_dim, 0).reshape(x.shape[time_dim], -1).numpy()


def _per_row(x: torch.Tensor | None, n: int, dtype: Any) -> np.ndarray:
    if x is None:
        return np.zeros(n, dtype)
    x = x.detach().cpu()
    x = x != 0 if dtype is bool else x.to({np.float32: torch.float32, np.float64: torch.float64}[dtype])
    return x.reshape(-1).numpy()


def _factor(x: Any, like: torch.Tensor, time_dim: int, dtype: Any) -> Any:
    """[T, N] of `dtype`; a plain number is broadcast."""
    steps = like.shape[time_dim]
    if isinstance(x, torch.Tensor):
        return _time_first(x.expand(like.shape), time_dim, dtype)
    return np.broadcast_to(np.asarray(x, dtype), (steps, like.numel() // max(steps, 1)))


def _times(factor: np.ndarray, x: np.ndarray) -> np.ndarray:
    """factor * x, reading x only where the factor is not zero."""
    return np.where(factor == 0, np.zeros_like(x), factor * x)


def _resolve(
    like: torch.Tensor,
    time_dim: int,
    dtype: Any,
    terminated: torch.Tensor,
    *,
    values: torch.Tensor | None,
    truncated: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
    last_values: torch.Tensor | None = None,
    next_values: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    closed: bool = True,
) -> _Window:
    n_steps = like.shape[time_dim]
    ends = _time_first(terminated, time_dim, bool)
    n_rows = ends.shape[1]
    if flags_at == "start":
        ends = np.concatenate([ends[1:], _per_row(last_done, n_rows, bool)[None]])[:n_steps]
    cuts = _time_first(truncated, time_dim, bool) & ~ends if truncated is not None else np.zeros_like(ends)
    boot = bootstrap_values if next_values is None else next_values
    beyond = _time_first(boot, time_dim, dtype) if boot is not None else np.zeros(ends.shape, dtype)
    own = _time_first(values, time_dim, dtype) if values is not None else np.zeros(ends.shape, dtype)
    successor = _time_first(next_values, time_dim, dtype) if next_values is not None else None
    last = _per_row(last_values, n_rows, dtype)
    ok = _time_first(valid, time_dim, bool) if valid is not None else np.ones_like(ends)

    window = _Window(
        ok,
        np.zeros_like(ends),
        np.zeros(ends.shape, dtype),
        np.full(ends.shape, n_steps),
        np.zeros(n_rows, bool),
        np.zeros(n_rows, dtype),
    )
    for n in range(n_rows):
        steps = np.flatnonzero(ok[:, n])
        flagged = np.flatnonzero(ends[:, n] | cuts[:, n])
        bounds = [*steps.tolist(), n_steps]
        first_flags = np.searchsorted(flagged, steps)
        for k, t in enumerate(steps.tolist()):
            until = bounds[k + 1]
            window.following[t, n] = until
            f = flagged[first_flags[k]] if first_flags[k] < len(flagged) else n_steps
            if f < until:
                window.cut[t, n] = True
                window.v_next[t, n] = 0 if ends[f, n] else beyond[f, n]
            else:
                at_edge = until == n_steps
                window.cut[t, n] = at_edge and closed
                if successor is not None:
                    window.v_next[t, n] = successor[t, n]
                else:
                    window.v_next[t, n] = last[n] if at_edge else own[until, n]
        if len(flagged) and flagged[0] < bounds[0]:
            f = flagged[0]
            window.ended_before[n] = True
            window.value_before[n] = 0 if ends[f, n] else beyond[f, n]
    return window


def _shaped(x: np.ndarray, like: torch.Tensor, time_dim: int) -> torch.Tensor:
    batch = [size for d, size in enumerate(like.shape) if d != time_dim]
    return torch.from_numpy(x).reshape(x.shape[0], *batch).movedim(0, time_dim).to(like.device)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 0.95,
    time_dim: int = -1,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    dtype: torch.dtype = torch.float64,
    **boundary: Any,
) -> Any:
    """Schulman et al. 2016, eq. 12 and 16 in recursive form: A[t] = δ[t] + γ λ A[t+1]."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    window = _resolve(rewards, time_dim, number, terminated, values=values, closed=carry is None, **boundary)
    reward, value = _time_first(rewards, time_dim, number), _time_first(values, time_dim, number)
    g, l = _factor(gamma, rewards, time_dim, number), _factor(lambda_, rewards, time_dim, number)
    decay = g * l
    if not isinstance(gamma, torch.Tensor) and not isinstance(lambda_, torch.Tensor):
        decay = _factor(float(gamma) * float(lambda_), rewards, time_dim, number)
    n_steps, n_rows = reward.shape
    columns = np.arange(n_rows)
    beyond = _per_row(carry, n_rows, number)
    advantages = np.concatenate([np.zeros_like(reward), beyond[None]])
    with np.errstate(all="ignore"):
        for t in reversed(range(n_steps)):
            delta = (reward[t] + _times(g[t], window.v_next[t])) - value[t]
            later = advantages[window.following[t], columns]
            step = delta + _times(np.where(window.cut[t], number(0), decay[t]), later)
            advantages[t] = np.where(window.valid[t], step, number(0))
    first = np.where(window.valid.any(axis=0), window.valid.argmax(axis=0), n_steps)
    at_start = np.where(window.ended_before, number(0), advantages[first, columns])
    advantages = advantages[:-1]
    with np.errstate(all="ignore"):
        returns = np.where(window.valid, advantages + value, number(0))
    result = tuple(_shaped(x, rewards, time_dim) for x in (advantages, returns))
    if return_carry:
        batch = [size for d, size in enumerate(rewards.shape) if d != time_dim]
        return result, torch.from_numpy(at_start).reshape(batch).to(rewards.device)
    return result


def affine_scan(
    alpha: torch.Tensor,
    beta: float | torch.Tensor,
    *,
    initial: torch.Tensor | None = None,
    reverse: bool = True,
    time_dim: int = -1,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """y[t] = α[t] + β[t] y[t±1]."""
    number = _NUMPY[dtype]
    time_dim %= alpha.dim()
    a = _time_first(alpha, time_dim, number)
    b = np.broadcast_to(_factor(beta, alpha, time_dim, number), a.shape)
    y = np.zeros_like(a)
    state = _per_row(initial, a.shape[1], number)
    steps = range(a.shape[0])
    with np.errstate(all="ignore"):
        for k, t in enumerate(reversed(steps) if reverse else steps):
            state = a[t] if k == 0 and initial is None else a[t] + _times(b[t], state)
            y[t] = state
    return _shaped(y, alpha, time_dim)
