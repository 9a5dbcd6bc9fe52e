"""V-trace targets and policy-gradient advantages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rl_triton import _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._tile import clipped, exponential, scaled
from rl_triton._triton import constant, jit, tl
from rl_triton.boundaries import check_successors
from rl_triton.estimators import gae as _gae

# Variants: where the ratio comes from.
_LOG_RHOS, _LOG_PROBS = map(constant, range(2))


@jit
def _ratio(x, VARIANT: tl.constexpr):
    """w = π(a|s) / μ(a|s)."""
    if VARIANT == _LOG_RHOS:
        log_rho = x[2]
    else:
        log_rho = x[2] - x[3]
    return exponential(log_rho)


def _ratio_of_log_rhos(x):
    return np.exp(x[2])


def _ratio_of_log_probs(x):
    return np.exp(x[2] - x[3])


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    reward, value = x[0], x[1]
    gamma, lambda_, rho_bar, c_bar, pg_rho_bar = factors
    w = _ratio(x, VARIANT)
    delta = (reward + scaled(gamma, v_next)) - value
    c = scaled(lambda_, clipped(w, c_bar))
    return scaled(clipped(w, rho_bar), delta), scaled(gamma, c)


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    reward, value = x[0], x[1]
    gamma, lambda_, rho_bar, c_bar, pg_rho_bar = factors
    v_next, v_follow, cut, state_next, _ = ahead
    target_next = tl.where(cut, v_next, v_follow + state_next)
    advantage = (reward + scaled(gamma, target_next)) - value
    return value + state, scaled(clipped(_ratio(x, VARIANT), pg_rho_bar), advantage)


def _scalar_forms(ratio):
    def coefficients(x, v_next, cut, factors):
        gamma, lambda_, rho_bar, c_bar, _ = factors
        w = ratio(x)
        delta = (x[0] + _scalar.scaled(gamma, v_next)) - x[1]
        c = _scalar.scaled(lambda_, _scalar.clipped(w, c_bar))
        return _scalar.scaled(_scalar.clipped(w, rho_bar), delta), _scalar.scaled(gamma, c)

    def outputs(x, state, ahead, factors):
        gamma, _, _, _, pg_rho_bar = factors
        v_next, v_follow, cut, state_next, _ = ahead
        target_next = v_next if cut else v_follow + state_next
        advantage = (x[0] + _scalar.scaled(gamma, target_next)) - x[1]
        return x[1] + state, _scalar.scaled(_scalar.clipped(ratio(x), pg_rho_bar), advantage)

    return coefficients, outputs


def _algorithm(variant, code, ratio):
    coefficients, outputs = _scalar_forms(ratio)
    return Algorithm(
        "vtrace",
        coefficients=Forms(_coefficients, coefficients),
        outputs=Forms(_outputs, outputs),
        beyond=Forms(_gae._beyond, _gae._beyond_scalar),
        lookahead=1,
        variant=(variant,),
        code=code,
    )


_FROM_LOG_RHOS = _algorithm("log_rhos", 0, _ratio_of_log_rhos)
_FROM_LOG_PROBS = _algorithm("log_probs", 1, _ratio_of_log_probs)


class VTrace(NamedTuple):
    """Result of `vtrace`."""

    targets: torch.Tensor
    """The critic's targets, v_s in the paper."""
    advantages: torch.Tensor
    """What the policy gradient is weighted with, the clipped ratio included."""


@planned
def vtrace(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    log_rhos: torch.Tensor | None = None,
    target_log_probs: torch.Tensor | None = None,
    behavior_log_probs: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
    last_values: torch.Tensor | _checks.Required | None = _checks.REQUIRED,
    next_values: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 1.0,
    rho_bar: float | torch.Tensor = 1.0,
    c_bar: float | torch.Tensor = 1.0,
    pg_rho_bar: float | torch.Tensor | None = None,
    time_dim: int = -1,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    return_carry: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    differentiable: bool = False,
) -> Any:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, eq. 1 and section 4.2).

        w[t] = exp(log_rhos[t]) = π(a|s) / μ(a|s);   ρ = min(rho_bar, w);   c = λ min(c_bar, w)
        D[t] = ρ[t] (r[t] + γ v'[t] - V[t]) + γ c[t] (not cut[t]) D[t+1]
        targets[t]    = V[t] + D[t]
        advantages[t] = min(pg_rho_bar, w[t]) (r[t] + γ x'[t] - V[t]),
                        x'[t] = v'[t] where cut or at the window's edge, else targets[t+1]

    with cut[t] = terminated[t] or truncated[t], and v'[t], the value of the true successor s'_t: 0 if terminated,
    else next_values[t] if given, else bootstrap_values[t] if truncated, else values[t+1], or last_values at the edge.
    A ratio that overflows is clipped to its bar, a ratio of zero reads nothing, a NaN ratio stays visible as NaN.

    Args:
        rewards: r[t], any shape with a time axis of T steps, any strides; float16, bfloat16, float32, float64;
            integers count as the default float dtype.
        values: V(s_t), the shape of `rewards`.
        terminated: s'_t is terminal. Shape of `rewards`; bool, any integer or float dtype, nonzero is true.
        log_rhos: log π(a|s) - log μ(a|s) of the taken actions, the shape of `rewards`.
        target_log_probs, behavior_log_probs: log π(a|s) and log μ(a|s), in place of `log_rhos`.
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
        rho_bar, c_bar: bars of the ratios, like `gamma`; float("inf") does not clip.
        pg_rho_bar: the bar of the policy gradient's ratio; None: `rho_bar`.
        time_dim: the time axis; SB3 and CleanRL store [T, N], so 0.
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode; then `last_done` is
            required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        carry: D one step past the window, one per row: what a later window returned. `last_values` must still hold
            the value there; x' at the edge is then last_values + carry.
        return_carry: also return D at the first row, for the window before this one, in the dtype of the arithmetic.
        out: (targets, advantages) to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`. Where a bar
            clips, the gradient is the bar's, not the ratio's.

    Returns:
        VTrace(targets, advantages), of the shape of `rewards` and the promoted dtype of rewards, values, bootstrap,
        last and next values (ratios do not count). With `return_carry`, the pair (VTrace, carry). Results carry no
        autograd graph unless `differentiable`: they are constants of the losses, as in the paper.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "vtrace"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    _checks.like(op, "values", _checks.real(op, "values", values), "rewards", rewards, axis)
    inputs = {"rewards": rewards, "values": values}
    if log_rhos is not None:
        if target_log_probs is not None or behavior_log_probs is not None:
            raise ValueError(f"{op}: log_rhos excludes target_log_probs and behavior_log_probs; pass one or the other")
        ratios = {"log_rhos": log_rhos}
    elif target_log_probs is not None and behavior_log_probs is not None:
        ratios = {"target_log_probs": target_log_probs, "behavior_log_probs": behavior_log_probs}
    else:
        raise ValueError(
            f"{op}: the ratios of the policies are missing: pass log_rhos, or both target_log_probs and "
            "behavior_log_probs"
        )
    for name, x in ratios.items():
        _checks.like(op, name, _checks.real(op, name, x), "rewards", rewards, axis)
    boundary = check_successors(
        op,
        rewards,
        axis,
        terminated,
        values=values,
        truncated=truncated,
        bootstrap_values=bootstrap_values,
        last_values=last_values,
        next_values=next_values,
        valid=valid,
        flags_at=flags_at,
        last_done=last_done,
    )
    given = {"gamma": gamma, "lambda_": lambda_, "rho_bar": rho_bar, "c_bar": c_bar}
    given["pg_rho_bar"] = rho_bar if pg_rho_bar is None else pg_rho_bar
    outputs, (final, _) = _run.estimate(
        _FROM_LOG_RHOS if log_rhos is not None else _FROM_LOG_PROBS,
        axis,
        like=rewards,
        inputs=inputs | ratios,
        factors={name: _checks.factor(op, name, x, "rewards", rewards) for name, x in given.items()},
        boundary=boundary,
        carry=(_run.check_carry(op, "carry", carry, "rewards", rewards, axis), None),
        return_carry=return_carry,
        out=out,
        differentiable=differentiable,
        names=VTrace._fields,
        promoting=(rewards, values),
    )
    return _run.packed(VTrace, outputs, final, return_carry)
