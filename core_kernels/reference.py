"""Plain loops, written from the papers, in any float precision: what the fast paths are measured against.

Same arguments as the public functions, plus `dtype`, the precision of the loop (float64 by default). They share no
code with the kernels: the boundary rules are resolved first, one row at a time, by looking for the next valid row and
the first flag before it; the recurrence then follows the paper's own equation.
"""

from __future__ import annotations

import math
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
    return x.movedim(time_dim, 0).flatten(1).numpy() if x.dim() > 1 else x[:, None].numpy()


def _per_row(x: torch.Tensor | None, n: int, dtype: Any) -> np.ndarray:
    if x is None:
        return np.zeros(n, dtype)
    x = x.detach().cpu()
    x = x != 0 if dtype is bool else x.to({np.float32: torch.float32, np.float64: torch.float64}[dtype])
    return x.reshape(-1).numpy()


def _factor(x: Any, like: torch.Tensor, time_dim: int, dtype: Any) -> Any:
    """[T, N] of `dtype`; a plain number is broadcast."""
    if isinstance(x, torch.Tensor):
        return _time_first(x.expand(like.shape), time_dim, dtype)
    rows = [size for d, size in enumerate(like.shape) if d != time_dim]
    return np.broadcast_to(np.asarray(x, dtype), (like.shape[time_dim], math.prod(rows)))


def _product(a: Any, b: Any, like: torch.Tensor, time_dim: int, dtype: Any) -> np.ndarray:
    """a b, multiplied before it is rounded to the precision of the loop."""
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return _factor(float(a) * float(b), like, time_dim, dtype)
    return (_factor(a, like, time_dim, np.float64) * _factor(b, like, time_dim, np.float64)).astype(dtype)


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
    if valid is None:  # every next row is the next valid row, so all rows at once
        flagged = ends | cuts
        window.following[:] = np.arange(1, n_steps + 1)[:, None]
        window.cut[:] = flagged
        window.v_next[:] = np.concatenate([own[1:], last[None]])[:n_steps] if successor is None else successor
        window.v_next[flagged] = np.where(ends, dtype(0), beyond)[flagged]
        if closed and n_steps:
            window.cut[-1] = True
        return window
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


def _number(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) else float(x)


def _backward(window: _Window, first: np.ndarray, beyond: np.ndarray, before: Any) -> np.ndarray:
    """[N]: what an earlier window sees: a quantity at the first valid step, or `before` where a flag stands first."""
    columns = np.arange(first.shape[1])
    with_edge = np.concatenate([first, beyond[None]])
    at = np.concatenate([window.valid, np.ones((1, len(columns)), bool)]).argmax(axis=0)  # T where no step is valid
    return np.where(window.ended_before, before, with_edge[at, columns])


def _rows(x: np.ndarray, like: torch.Tensor, time_dim: int) -> torch.Tensor:
    batch = [size for d, size in enumerate(like.shape) if d != time_dim]
    return torch.from_numpy(x).reshape(batch).to(like.device)


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
    g = _factor(gamma, rewards, time_dim, number)
    decay = _product(gamma, lambda_, rewards, time_dim, number)
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
    advantages = advantages[:-1]
    at_start = _backward(window, advantages, beyond, number(0))
    with np.errstate(all="ignore"):
        returns = np.where(window.valid, advantages + value, number(0))
    result = tuple(_shaped(x, rewards, time_dim) for x in (advantages, returns))
    return (result, _rows(at_start, rewards, time_dim)) if return_carry else result


def discounted_returns(
    rewards: torch.Tensor,
    terminated: torch.Tensor,
    *,
    gamma: float | torch.Tensor = 0.99,
    time_dim: int = -1,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    dtype: torch.dtype = torch.float64,
    **boundary: Any,
) -> Any:
    """Sutton & Barto 2018, eq. 3.9: G[t] = r[t] + γ G[t+1], with v' in place of G[t+1] where the episode is cut."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    window = _resolve(rewards, time_dim, number, terminated, values=None, closed=carry is None, **boundary)
    reward, g = _time_first(rewards, time_dim, number), _factor(gamma, rewards, time_dim, number)
    n_steps, n_rows = reward.shape
    columns = np.arange(n_rows)
    last = boundary.get("last_values")
    beyond = _per_row(carry if carry is not None else last, n_rows, number)
    returns = np.concatenate([np.zeros_like(reward), beyond[None]])
    with np.errstate(all="ignore"):
        for t in reversed(range(n_steps)):
            later = np.where(window.cut[t], window.v_next[t], returns[window.following[t], columns])
            returns[t] = np.where(window.valid[t], reward[t] + _times(g[t], later), number(0))
    result = _shaped(returns[:-1], rewards, time_dim)
    at_start = _backward(window, returns[:-1], beyond, window.value_before)
    return (result, _rows(at_start, rewards, time_dim)) if return_carry else result


def td_lambda_returns(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
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
    """Sutton & Barto 2018, eq. 12.18: G[t] = r[t] + γ ((1-λ) v'[t] + λ G[t+1])."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    window = _resolve(rewards, time_dim, number, terminated, values=values, closed=carry is None, **boundary)
    reward, g = _time_first(rewards, time_dim, number), _factor(gamma, rewards, time_dim, number)
    l = _factor(lambda_, rewards, time_dim, number)
    rest = _factor(1 - _number(lambda_), rewards, time_dim, number)
    n_steps, n_rows = reward.shape
    columns = np.arange(n_rows)
    beyond = _per_row(carry if carry is not None else boundary.get("last_values"), n_rows, number)
    returns = np.concatenate([np.zeros_like(reward), beyond[None]])
    with np.errstate(all="ignore"):
        for t in reversed(range(n_steps)):
            v = window.v_next[t]
            mixed = _times(rest[t], v) + _times(l[t], returns[window.following[t], columns])
            later = np.where(window.cut[t], v, mixed)
            returns[t] = np.where(window.valid[t], reward[t] + _times(g[t], later), number(0))
    result = _shaped(returns[:-1], rewards, time_dim)
    at_start = _backward(window, returns[:-1], beyond, window.value_before)
    return (result, _rows(at_start, rewards, time_dim)) if return_carry else result


def n_step_returns(
    rewards: torch.Tensor,
    terminated: torch.Tensor,
    *,
    n: int,
    values: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    time_dim: int = -1,
    dtype: torch.dtype = torch.float64,
    **boundary: Any,
) -> torch.Tensor:
    """Sutton & Barto 2018, eq. 7.1, by the number of steps: G_m[t] = r[t] + γ G_{m-1}[t+1], with v' in place of
    G_{m-1}[t+1] where m = 1 or the episode is cut."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    window = _resolve(rewards, time_dim, number, terminated, values=values, **boundary)
    reward, g = _time_first(rewards, time_dim, number), _factor(gamma, rewards, time_dim, number)
    columns = np.arange(reward.shape[1])
    edge = np.zeros_like(reward[:1])  # never read: the last valid step is cut
    with np.errstate(all="ignore"):
        one_step = returns = np.where(window.valid, reward + _times(g, window.v_next), number(0))
        for _ in range(min(n, len(reward)) - 1):
            later = np.concatenate([returns, edge])[window.following, columns]
            returns = np.where(window.valid & ~window.cut, reward + _times(g, later), one_step)
    return _shaped(returns, rewards, time_dim)


def vtrace(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    log_rhos: Any = None,
    target_log_probs: Any = None,
    behavior_log_probs: Any = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 1.0,
    rho_bar: float | torch.Tensor = 1.0,
    c_bar: float | torch.Tensor = 1.0,
    pg_rho_bar: float | torch.Tensor | None = None,
    time_dim: int = -1,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    dtype: torch.dtype = torch.float64,
    **boundary: Any,
) -> Any:
    """Espeholt et al. 2018, remark 1: v[t] = V[t] + δ[t] + γ c[t] (v[t+1] - V[t+1])."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    window = _resolve(rewards, time_dim, number, terminated, values=values, closed=carry is None, **boundary)

    def step(x: torch.Tensor) -> np.ndarray:
        return _time_first(x, time_dim, number)

    def factor(x: Any) -> np.ndarray:
        return _factor(x, rewards, time_dim, number)

    reward, value, g, l = step(rewards), step(values), factor(gamma), factor(lambda_)
    bars = [factor(x) for x in (rho_bar, c_bar, rho_bar if pg_rho_bar is None else pg_rho_bar)]
    n_steps, n_rows = reward.shape
    columns = np.arange(n_rows)
    beyond = _per_row(carry, n_rows, number)
    correction = np.concatenate([np.zeros_like(reward), beyond[None]])  # v - V
    targets, advantages = np.zeros_like(reward), np.zeros_like(reward)
    with np.errstate(all="ignore"):
        log_ratio = step(log_rhos) if log_rhos is not None else step(target_log_probs) - step(behavior_log_probs)
        w = np.exp(log_ratio)
        rho, c, pg_rho = (np.where(w > bar, bar, w) for bar in bars)
        for t in reversed(range(n_steps)):
            following, v, cut = window.following[t], window.v_next[t], window.cut[t]
            later = correction[following, columns]
            delta = _times(rho[t], (reward[t] + _times(g[t], v)) - value[t])
            trace = _times(g[t], _times(l[t], c[t]))
            d = delta + _times(np.where(cut, number(0), trace), later)
            at_edge = following == n_steps
            target_next = np.where(at_edge, v, value[np.minimum(following, n_steps - 1), columns]) + later
            x_next = np.where(cut, v, target_next)
            advantage = _times(pg_rho[t], (reward[t] + _times(g[t], x_next)) - value[t])
            ok = window.valid[t]
            correction[t], targets[t] = np.where(ok, d, number(0)), np.where(ok, value[t] + d, number(0))
            advantages[t] = np.where(ok, advantage, number(0))
    result = tuple(_shaped(x, rewards, time_dim) for x in (targets, advantages))
    at_start = _backward(window, correction[:-1], beyond, number(0))
    return (result, _rows(at_start, rewards, time_dim)) if return_carry else result


def retrace(
    rewards: torch.Tensor,
    q_values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    expected_next_q: Any = None,
    next_q_values: Any = None,
    next_policy_probs: Any = None,
    log_rhos: Any = None,
    policy_probs: Any = None,
    behavior_probs: Any = None,
    actions: Any = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 1.0,
    c_bar: float | torch.Tensor = 1.0,
    rho_bar: float | torch.Tensor = 1.0,
    trace: str = "retrace",
    time_dim: int = -1,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    return_carry: bool = False,
    dtype: torch.dtype = torch.float64,
    **boundary: Any,
) -> Any:
    """Munos et al. 2016, eq. 3 unrolled from the end: Q[t] + δ[t] + γ c[t+1] (target[t+1] - Q[t+1])."""
    number = _NUMPY[dtype]
    time_dim %= rewards.dim()
    if expected_next_q is None:
        p, q = next_policy_probs.to(dtype), next_q_values.to(dtype)
        expected_next_q = torch.where(p == 0, 0.0, p * q).sum(dim=-1)
    window = _resolve(
        rewards,
        time_dim,
        number,
        terminated,
        values=None,
        next_values=expected_next_q,
        closed=carry is None,
        **boundary,
    )

    def step(x: torch.Tensor) -> np.ndarray:
        if x.dim() > rewards.dim():
            x = x.gather(-1, actions.long()[..., None])[..., 0]
        return _time_first(x, time_dim, number)

    def factor(x: Any) -> np.ndarray:
        return _factor(x, rewards, time_dim, number)

    reward, q, g, l = step(rewards), step(q_values), factor(gamma), factor(lambda_)
    n_steps, n_rows = reward.shape
    columns = np.arange(n_rows)
    c_beyond, target_beyond = (_per_row(x, n_rows, number) for x in (carry or (None, None)))
    with np.errstate(all="ignore"):
        if log_rhos is not None:
            w = np.exp(step(log_rhos))
        elif behavior_probs is not None:
            w = step(policy_probs) / step(behavior_probs)
        else:
            w = np.ones_like(reward)
        rho, clipped = (np.where(w > factor(bar), factor(bar), w) for bar in (rho_bar, c_bar))
        if trace == "retrace":
            c = _times(l, clipped)
        elif trace == "tree_backup":
            c = _times(l, step(policy_probs))
        elif trace == "importance_sampling":
            c = w
        else:
            c = l + np.zeros_like(reward)
        # One more step beyond the edge: its c is 1 and its correction is what is carried, c D.
        corrections = np.concatenate([np.zeros_like(reward), c_beyond[None]])
        c = np.concatenate([c, np.ones_like(c_beyond)[None]])
        targets = np.concatenate([np.zeros_like(reward), target_beyond[None]])
        advantages = np.zeros_like(reward)
        for t in reversed(range(n_steps)):
            following, v, cut, ok = window.following[t], window.v_next[t], window.cut[t], window.valid[t]
            delta = (reward[t] + _times(g[t], v)) - q[t]
            traced = _times(g[t], _times(c[following, columns], corrections[following, columns]))
            d = np.where(cut, delta, delta + traced)
            x_next = np.where(cut, v, targets[following, columns])
            advantage = _times(rho[t], (reward[t] + _times(g[t], x_next)) - q[t])
            corrections[t], targets[t] = np.where(ok, d, number(0)), np.where(ok, q[t] + d, number(0))
            advantages[t] = np.where(ok, advantage, number(0))
        carried = _backward(window, _times(c[:-1], corrections[:-1]), c_beyond, number(0))
        target = _backward(window, targets[:-1], target_beyond, window.value_before)
    result = tuple(_shaped(x, rewards, time_dim) for x in (targets[:-1], advantages))
    return (result, tuple(_rows(x, rewards, time_dim) for x in (carried, target))) if return_carry else result


def _forward(
    x: torch.Tensor,
    done: torch.Tensor,
    decay: Any,
    replacing: bool,
    initial: torch.Tensor | None,
    valid: torch.Tensor | None,
    flags_at: str,
    time_dim: int,
    return_final: bool,
    dtype: torch.dtype,
) -> Any:
    number = _NUMPY[dtype]
    time_dim %= done.dim()

    def over_x(flags: torch.Tensor) -> torch.Tensor:
        return flags if flags.dim() == x.dim() else flags.unsqueeze(-1).expand(x.shape)

    y = _time_first(x, time_dim, number)
    flags = _time_first(over_x(done), time_dim, bool)
    ok = _time_first(over_x(valid), time_dim, bool) if valid is not None else np.ones_like(flags)
    z = _per_row(initial, y.shape[1], number).copy()
    result = np.zeros_like(y)
    with np.errstate(all="ignore"):
        for t in range(y.shape[0]):
            if flags_at == "start":
                z = np.where(flags[t], number(0), z)
            moved = y[t] + _times(decay[t], z)
            if replacing:
                moved = np.where(y[t] != 0, y[t], _times(decay[t], z))
            z = np.where(ok[t], moved, z)
            result[t] = np.where(ok[t], z, number(0))
            if flags_at == "end":
                z = np.where(flags[t], number(0), z)
    shaped = _shaped(result, x, time_dim)
    return (shaped, _rows(z, x, time_dim)) if return_final else shaped


def eligibility_traces(
    x: torch.Tensor,
    done: torch.Tensor,
    *,
    initial: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 0.95,
    kind: str = "accumulating",
    valid: torch.Tensor | None = None,
    flags_at: str = "end",
    time_dim: int = -1,
    return_final: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Sutton & Barto 2018, eq. 12.5: z[t] = γ λ z[t-1] + x[t]; a new episode starts from 0."""
    number = _NUMPY[dtype]
    time_dim %= done.dim()

    def over_x(f: Any) -> Any:
        if not isinstance(f, torch.Tensor):
            return f
        f = f.expand(done.shape)
        return f.unsqueeze(-1).expand(x.shape) if x.dim() > done.dim() else f

    decay = _product(over_x(gamma), over_x(lambda_), x, time_dim, number)
    return _forward(x, done, decay, kind == "replacing", initial, valid, flags_at, time_dim, return_final, dtype)


def episodic_cumsum(
    x: torch.Tensor,
    done: torch.Tensor,
    *,
    initial: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    flags_at: str = "end",
    time_dim: int = -1,
    return_final: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """C[t] = x[t] + C[t-1]; a new episode starts from 0."""
    ones = _factor(1.0, x, time_dim % done.dim(), _NUMPY[dtype])
    return _forward(x, done, ones, False, initial, valid, flags_at, time_dim, return_final, dtype)


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
