"""TD(λ) returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_triton import _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._tile import scaled
from rl_triton._triton import constant, jit, tl
from rl_triton.boundaries import check_successors
from rl_triton.estimators import discounted

# Variants: "floats" has the weight of v' as a factor of its own (see `_weight`); "tensors" forms it in the kernel.
_FLOATS, _TENSORS = map(constant, range(2))


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    gamma, lambda_, decay = factors[0], factors[1], factors[2]
    if VARIANT == _FLOATS:
        weight = factors[3]
    else:
        weight = gamma * (1.0 - lambda_)
    return x[0] + scaled(tl.where(cut, gamma, weight), v_next), decay


def _coefficients_of_floats(x, v_next, cut, factors):
    gamma, _, decay, weight = factors
    return x[0] + _scalar.scaled(gamma if cut else weight, v_next), decay


def _coefficients_of_tensors(x, v_next, cut, factors):
    gamma, lambda_, decay = factors
    weight = gamma * (_scalar.one(lambda_) - lambda_)
    return x[0] + _scalar.scaled(gamma if cut else weight, v_next), decay


_TD_LAMBDA = {
    variant: Algorithm(
        "td_lambda_returns",
        coefficients=Forms(_coefficients, scalar),
        outputs=Forms(discounted._outputs, discounted._outputs_scalar),
        beyond=Forms(discounted._beyond, discounted._beyond_scalar),
        variant=(variant,),
        code=code,
    )
    for code, (variant, scalar) in enumerate(
        (("floats", _coefficients_of_floats), ("tensors", _coefficients_of_tensors))
    )
}


def _weight(gamma: float, lambda_: float, arithmetic: torch.dtype) -> float:
    """The weight of v', γ (1-λ), but so that it takes up the rounding of γλ: constant values and no reward have the
    fixed point γ (1-λ) V / (1 - γλ) in exact arithmetic, and keep it with the rounded γλ. Otherwise values far from
    zero drift by that rounding, summed over the horizon."""
    decay = gamma * lambda_
    exact = gamma * (1.0 - lambda_)
    if arithmetic == torch.float64 or not abs(decay) < 1.0:
        return exact
    rounded = float(np.float32(decay))
    return exact * (1.0 - rounded) / (1.0 - decay)


@planned
def td_lambda_returns(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
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
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> Any:
    """λ-returns (Sutton & Barto 2018, eq. 12.18 with state values), the critic's target of TD(λ).

        G[t] = r[t] + γ (cut[t] ? v'[t] : (1-λ) v'[t] + λ G[t+1]),
        G beyond the window's edge = v' of the edge (or `carry`)

    with cut[t] = terminated[t] or truncated[t], and v'[t], the value of the true successor s'_t: 0 if terminated,
    else next_values[t] if given, else bootstrap_values[t] if truncated, else values[t+1], or last_values at the edge.
    Equal to advantages + values of `gae`. A factor of zero reads nothing.

    Args:
        rewards: r[t], any shape with a time axis of T steps, any strides; float16, bfloat16, float32, float64;
            integers count as the default float dtype.
        values: V(s_t), the shape of `rewards`; may be None where `next_values` is given.
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
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode; then `last_done` is
            required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        carry: G one step past the window, one per row: what a later window returned. `last_values` must still hold
            the value there.
        return_carry: also return G at the first row, for the window before this one, in the dtype of the arithmetic.
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        G, of the shape of `rewards` and the promoted dtype of rewards, values, bootstrap, last and next values. With
        `return_carry`, the pair (G, carry). It carries no autograd graph unless `differentiable`.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "td_lambda_returns"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    if values is not None:
        _checks.like(op, "values", _checks.real(op, "values", values), "rewards", rewards, axis)
    elif next_values is None:
        raise ValueError(f"{op}: values is None; pass V(s_t) in values, or V of every step's successor in next_values")
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
    factors: dict[str, Any] = {"gamma": gamma, "lambda_": lambda_, "gamma * lambda_": None}
    promoting = (rewards, values)
    variant = "tensors"
    if isinstance(gamma, float) and isinstance(lambda_, float):
        arithmetic = _run.arithmetic_of(_run.result_dtype(promoting, boundary))
        factors |= {"gamma * lambda_": gamma * lambda_, "weight": _weight(gamma, lambda_, arithmetic)}
        variant = "floats"
    outputs, (final, _) = _run.estimate(
        _TD_LAMBDA[variant],
        axis,
        like=rewards,
        inputs={"rewards": rewards},
        factors=factors,
        boundary=boundary,
        carry=(_run.check_carry(op, "carry", carry, "rewards", rewards, axis), None),
        return_carry=return_carry,
        out=out,
        differentiable=differentiable,
        promoting=promoting,
        also_read={"values": values},
    )
    return (outputs[0], final) if return_carry else outputs[0]
