"""Generalized advantage estimation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton import _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._tile import scaled
from rl_triton._triton import jit, tl
from rl_triton.boundaries import check_successors


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    reward, value = x
    gamma, lambda_, decay = factors
    return (reward + scaled(gamma, v_next)) - value, decay


def _coefficients_scalar(x, v_next, cut, factors):
    # SB3's order of operations, so that float32 results have its bits.
    reward, value = x
    gamma, _, decay = factors
    return (reward + _scalar.scaled(gamma, v_next)) - value, decay


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    return state, state + x[1]


def _outputs_scalar(x, state, ahead, factors):
    return state, state + x[1]


@jit
def _beyond(v):
    return tl.zeros_like(v)


def _beyond_scalar(v, zero):
    return zero


_GAE = Algorithm(
    "gae",
    coefficients=Forms(_coefficients, _coefficients_scalar),
    outputs=Forms(_outputs, _outputs_scalar),
    beyond=Forms(_beyond, _beyond_scalar),
)


class GAE(NamedTuple):
    """Result of `gae`."""

    advantages: torch.Tensor
    returns: torch.Tensor
    """advantages + values: the λ-return, the critic's target."""


@planned
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    truncated: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
    last_values: torch.Tensor | _checks.Required | None = _checks.REQUIRED,
    next_values: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 0.95,
    time_dim: int = -1,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    differentiable: bool = False,
) -> Any:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16).

        δ[t] = r[t] + γ v'[t] - V[t]
        A[t] = δ[t] + γ λ (not cut[t]) A[t+1],   A beyond the window's edge = 0 (or `carry`)
        returns[t] = A[t] + V[t]

    with cut[t] = terminated[t] or truncated[t], and v'[t], the value of the true successor s'_t: 0 if terminated,
    else next_values[t] if given, else bootstrap_values[t] if truncated, else values[t+1], or last_values at the edge.
    A factor of zero reads nothing: γ = 0 or λ = 0 stops the recurrence as a cut does.

    Args:
        rewards: r[t], any shape with a time axis of T steps ([N, T], [T, N], [T, N, 1], [T]), any strides. float16,
            bfloat16, float32, float64; integers count as the default float dtype.
        values: V(s_t), the shape of `rewards`.
        terminated: s'_t is terminal. Shape of `rewards`; bool, any integer or float dtype, nonzero is true.
        truncated: the episode was cut after step t though s'_t is not terminal. Needs `bootstrap_values` or
            `next_values`. Where both flags are set, the step terminated.
        bootstrap_values: V(s'_t), read only where truncated and not terminated.
        last_values: V of the observation after the last step, one per row (`rewards` without its time axis); read only
            where the row's last valid step is not cut. No silent default: None says zero.
        next_values: V(s'_t) for every step, in place of `bootstrap_values` and `last_values`.
        valid: 0 where the row is no transition (padding, a reset row, a dead agent, a tool token). Such rows are
            skipped: everything on them but their flags is ignored, their results are 0, t+1 is the next valid row.
        gamma, lambda_: γ and λ: floats, 0-d tensors, or tensors with as many axes as `rewards`, each of size 1 or
            equal.
        time_dim: the time axis; SB3 and CleanRL store [T, N], so 0.
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode (SB3's `episode_starts`,
            CleanRL's `dones`). Then `last_done` is required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        carry: A one step past the window, one per row: what a later window returned. `last_values` must still hold
            the value there.
        return_carry: also return the scanned quantity at the first row, for the window before this one, in the dtype
            of the arithmetic (float32; float64 if the result is).
        out: (advantages, returns) to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        GAE(advantages, returns), of the shape of `rewards` and the promoted dtype of rewards, values, bootstrap, last
        and next values; 16-bit results are computed in float32. With `return_carry`, the pair (GAE, carry). Results
        carry no autograd graph unless `differentiable`.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "gae"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    _checks.like(op, "values", _checks.real(op, "values", values), "rewards", rewards, axis)
    boundary = check_successors(
        op,
        rewards,
        axis,
        terminated,
        values=None if next_values is not None else values,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        last_values=last_values,
        next_values=next_values,
        valid=valid,
        flags_at=flags_at,
        last_done=last_done,
    )
    gamma = _checks.factor(op, "gamma", gamma, "rewards", rewards)
    lambda_ = _checks.factor(op, "lambda_", lambda_, "rewards", rewards)
    decay = gamma * lambda_ if isinstance(gamma, float) and isinstance(lambda_, float) else None
    outputs, (final, _) = _run.estimate(
        _GAE,
        axis,
        like=rewards,
        inputs={"rewards": rewards, "values": values},
        factors={"gamma": gamma, "lambda_": lambda_, "gamma * lambda_": decay},
        boundary=boundary,
        carry=(_run.check_carry(op, "carry", carry, "rewards", rewards, axis), None),
        return_carry=return_carry,
        out=out,
        differentiable=differentiable,
        names=GAE._fields,
        promoting=(rewards, values),
    )
    return _run.packed(GAE, outputs, final, return_carry)
