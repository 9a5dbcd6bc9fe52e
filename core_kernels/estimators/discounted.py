"""Discounted returns."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton import _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._tile import scaled
from rl_triton._triton import jit, tl
from rl_triton.boundaries import check_successors


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    reward, gamma = x[0], factors[0]
    return tl.where(cut, reward + scaled(gamma, v_next), reward), gamma


def _coefficients_scalar(x, v_next, cut, factors):
    reward, gamma = x[0], factors[0]
    return (reward + _scalar.scaled(gamma, v_next) if cut else reward), gamma


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    return (state,)


def _outputs_scalar(x, state, ahead, factors):
    return (state,)


@jit
def _beyond(v):
    return v


def _beyond_scalar(v, zero):
    return v


_DISCOUNTED = Algorithm(
    "discounted_returns",
    coefficients=Forms(_coefficients, _coefficients_scalar),
    outputs=Forms(_outputs, _outputs_scalar),
    beyond=Forms(_beyond, _beyond_scalar),
)


@planned
def discounted_returns(
    rewards: torch.Tensor,
    terminated: torch.Tensor,
    *,
    truncated: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
    last_values: torch.Tensor | _checks.Required | None = _checks.REQUIRED,
    next_values: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    time_dim: int = -1,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> Any:
    """Discounted returns (Sutton & Barto 2018, eq. 3.8-3.9), bootstrapped where an episode was cut.

        G[t] = r[t] + γ (cut[t] ? v'[t] : G[t+1]),   G beyond the window's edge = v' of the edge (or `carry`)

    with cut[t] = terminated[t] or truncated[t], and v'[t]: 0 if terminated, else next_values[t] if given, else
    bootstrap_values[t] if truncated, and last_values at the edge. γ = 0 stops the recurrence as a cut does.

    Args:
        rewards: r[t], any shape with a time axis of T steps, any strides; float16, bfloat16, float32, float64;
            integers count as the default float dtype.
        terminated: s'_t is terminal. Shape of `rewards`; bool, any integer or float dtype, nonzero is true.
        truncated: the episode was cut after step t though s'_t is not terminal. Needs `bootstrap_values` or
            `next_values`. Where both flags are set, the step terminated.
        bootstrap_values: V(s'_t), read only where truncated and not terminated.
        last_values: V of the observation after the last step, one per row (`rewards` without its time axis); read only
            where the row's last valid step is not cut. No silent default: None says zero.
        next_values: V(s'_t) for every step, in place of `bootstrap_values` and `last_values`.
        valid: 0 where the row is no transition (padding, a reset row, a dead agent, a tool token). Such rows are
            skipped: everything on them but their flags is ignored, their results are 0, t+1 is the next valid row.
        gamma: γ, a float, a 0-d tensor, or a tensor with as many axes as `rewards`, each of size 1 or equal.
        time_dim: the time axis; SB3 and CleanRL store [T, N], so 0.
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode; then `last_done` is
            required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        carry: G one step past the window, one per row: what a later window returned; in place of the edge's value.
        return_carry: also return G at the first row, for the window before this one, in the dtype of the arithmetic.
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        G, of the shape of `rewards` and the promoted dtype of rewards, bootstrap, last and next values. With
        `return_carry`, the pair (G, carry). It carries no autograd graph unless `differentiable`.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "discounted_returns"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    boundary = check_successors(
        op,
        rewards,
        axis,
        terminated,
        values=None,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        last_values=last_values,
        next_values=next_values,
        valid=valid,
        flags_at=flags_at,
        last_done=last_done,
    )
    outputs, (final, _) = _run.estimate(
        _DISCOUNTED,
        axis,
        like=rewards,
        inputs={"rewards": rewards},
        factors={"gamma": _checks.factor(op, "gamma", gamma, "rewards", rewards)},
        boundary=boundary,
        carry=(_run.check_carry(op, "carry", carry, "rewards", rewards, axis), None),
        return_carry=return_carry,
        out=out,
        differentiable=differentiable,
        promoting=(rewards,),
    )
    return (outputs[0], final) if return_carry else outputs[0]
