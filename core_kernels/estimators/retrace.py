"""Retrace(λ) and its relatives: off-policy targets for action values."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_triton import _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Expectation, Forms, Taken
from rl_triton._plan import planned
from rl_triton._tile import clipped, exponential, scaled
from rl_triton._triton import constant, jit, tl
from rl_triton.boundaries import check_successors
from rl_triton.estimators import gae as _gae

# A variant is (where the ratio comes from, which trace), coded as SOURCE + 3 TRACE. The inputs are (r, Q) and then, by
# the first: nothing; log w, and π for tree_backup; or π and μ. The scanned state is U[t] = c[t] D[t]: D[t] = δ[t] +
# γ U[t+1] then needs no coefficient of another step.
TRACES = ("retrace", "tree_backup", "importance_sampling", "q_lambda")
_RETRACE, _TREE_BACKUP, _IMPORTANCE_SAMPLING, _Q_LAMBDA = map(constant, range(4))
_SOURCES = ("none", "log_rhos", "probs")
_NONE, _LOG_RHOS, _PROBS = map(constant, range(3))


@jit
def _ratio(x, VARIANT: tl.constexpr):
    """w = π(a|s) / μ(a|s), 1 if no ratio was given."""
    if VARIANT % 3 == _LOG_RHOS:
        w = exponential(x[2])
    elif VARIANT % 3 == _PROBS:
        w = x[2] / x[3]
    else:
        w = tl.zeros_like(x[0]) + 1.0
    return w


@jit
def _trace(x, lambda_, c_bar, VARIANT: tl.constexpr):
    if VARIANT // 3 == _RETRACE:
        c = scaled(lambda_, clipped(_ratio(x, VARIANT), c_bar))
    elif VARIANT // 3 == _IMPORTANCE_SAMPLING:
        c = _ratio(x, VARIANT)
    elif VARIANT // 3 == _Q_LAMBDA:
        c = tl.zeros_like(x[0]) + lambda_
    elif VARIANT % 3 == _LOG_RHOS:
        c = scaled(lambda_, x[3])
    else:
        c = scaled(lambda_, x[2])
    return c


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    gamma, lambda_, c_bar, rho_bar = factors
    c = _trace(x, lambda_, c_bar, VARIANT)
    delta = (x[0] + scaled(gamma, v_next)) - x[1]
    return scaled(c, delta), scaled(gamma, c)


@jit
def _target(x, v_next, cut, state_next, factors, VARIANT: tl.constexpr):
    gamma = factors[0]
    delta = (x[0] + scaled(gamma, v_next)) - x[1]
    return x[1] + (delta + tl.where(cut, 0.0, scaled(gamma, state_next)))


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    gamma, lambda_, c_bar, rho_bar = factors
    v_next, v_follow, cut, state_next, target_next = ahead
    advantage = (x[0] + scaled(gamma, tl.where(cut, v_next, target_next))) - x[1]
    target = _target(x, v_next, cut, state_next, factors, VARIANT)
    return target, scaled(clipped(_ratio(x, VARIANT), rho_bar), advantage)


def _ratio_of_nothing(x):
    return type(x[0])(1)


def _ratio_of_log_rhos(x):
    return np.exp(x[2])


def _ratio_of_probs(x):
    return x[2] / x[3]


def _target_scalar(x, v_next, cut, state_next, factors):
    gamma = factors[0]
    delta = (x[0] + _scalar.scaled(gamma, v_next)) - x[1]
    return x[1] + (delta if cut else delta + _scalar.scaled(gamma, state_next))


def _scalar_trace(trace, ratio, policy):
    """c[t] as a function of the step's inputs, λ and the bar; `policy` is the position of π among the inputs."""

    def retrace(x, lambda_, c_bar):
        return _scalar.scaled(lambda_, _scalar.clipped(ratio(x), c_bar))

    def tree_backup(x, lambda_, c_bar):
        return _scalar.scaled(lambda_, x[policy])

    def importance_sampling(x, lambda_, c_bar):
        return ratio(x)

    def q_lambda(x, lambda_, c_bar):
        return lambda_

    return {
        "retrace": retrace,
        "tree_backup": tree_backup,
        "importance_sampling": importance_sampling,
        "q_lambda": q_lambda,
    }[trace]


def _algorithm(source, trace):
    ratio = {"none": _ratio_of_nothing, "log_rhos": _ratio_of_log_rhos, "probs": _ratio_of_probs}[source]
    c_of = _scalar_trace(trace, ratio, policy=3 if source == "log_rhos" else 2)

    def coefficients(x, v_next, cut, factors):
        gamma, lambda_, c_bar, _ = factors
        c = c_of(x, lambda_, c_bar)
        delta = (x[0] + _scalar.scaled(gamma, v_next)) - x[1]
        return _scalar.scaled(c, delta), _scalar.scaled(gamma, c)

    def outputs(x, state, ahead, factors):
        gamma, _, _, rho_bar = factors
        v_next, _, cut, state_next, target_next = ahead
        advantage = (x[0] + _scalar.scaled(gamma, v_next if cut else target_next)) - x[1]
        target = _target_scalar(x, v_next, cut, state_next, factors)
        return target, _scalar.scaled(_scalar.clipped(ratio(x), rho_bar), advantage)

    return Algorithm(
        "retrace",
        coefficients=Forms(_coefficients, coefficients),
        target=Forms(_target, _target_scalar),
        outputs=Forms(_outputs, outputs),
        beyond=Forms(_gae._beyond, _gae._beyond_scalar),
        lookahead=2,
        variant=(source, trace),
        code=_SOURCES.index(source) + 3 * TRACES.index(trace),
    )


_ALGORITHMS = {variant: _algorithm(*variant) for variant in itertools.product(_SOURCES, TRACES)}


class Retrace(NamedTuple):
    """Result of `retrace`."""

    targets: torch.Tensor
    """The critic's targets for Q(s_t, a_t)."""
    advantages: torch.Tensor
    """What a policy gradient is weighted with, the clipped ratio included."""


@planned
def retrace(
    rewards: torch.Tensor,
    q_values: torch.Tensor,
    terminated: torch.Tensor,
    *,
    expected_next_q: torch.Tensor | None = None,
    next_q_values: torch.Tensor | None = None,
    next_policy_probs: torch.Tensor | None = None,
    log_rhos: torch.Tensor | None = None,
    policy_probs: torch.Tensor | None = None,
    behavior_probs: torch.Tensor | None = None,
    actions: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float | torch.Tensor = 1.0,
    c_bar: float | torch.Tensor = 1.0,
    rho_bar: float | torch.Tensor = 1.0,
    trace: str = "retrace",
    time_dim: int = -1,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    return_carry: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    differentiable: bool = False,
) -> Any:
    """Retrace(λ) and relatives (Munos et al. 2016, arXiv 1606.02647, eq. 3-4; Harutyunyan et al. 2016, 1602.04951).

        E'[t] = Σ_a π(a|s'_t) Q(s'_t, a), over the next state's policy; 0 if terminated
        w[t]  = π(a_t|s_t) / μ(a_t|s_t);   ρ = min(rho_bar, w)
        D[t]  = r[t] + γ E'[t] - Q[t] + γ c[t+1] (not cut[t]) D[t+1]
        targets[t]    = Q[t] + D[t]
        advantages[t] = ρ[t] (r[t] + γ x'[t] - Q[t]),
                        x'[t] = E'[t] where cut or at the window's edge, else targets[t+1]

    with cut[t] = terminated[t] or truncated[t], and c[t] by `trace`:

        "retrace"              λ min(c_bar, w)
        "tree_backup"          λ π(a_t|s_t)
        "importance_sampling"  w
        "q_lambda"             λ                     (Q^π(λ))

    The expectation is its own bootstrap: a truncation and the window's edge need no other argument. A factor of zero
    reads nothing; a NaN ratio stays visible as NaN.

    Args:
        rewards: r[t], any shape with a time axis of T steps, any strides; float16, bfloat16, float32, float64;
            integers count as the default float dtype.
        q_values: Q(s_t, a_t) of the taken actions, the shape of `rewards`.
        terminated: s'_t is terminal. Shape of `rewards`; bool, any integer or float dtype, nonzero is true.
        expected_next_q: E'[t], the shape of `rewards`; or
        next_q_values, next_policy_probs: Q(s'_t, .) and π(.|s'_t), the shape of `rewards` with an action axis appended,
            reduced as they are loaded, or before, into scratch memory of the size of `rewards`, where one load does not
            take all actions. Actions of probability zero are not read.
        log_rhos: log w of the taken actions; or
        policy_probs, behavior_probs: π(a_t|s_t) and μ(a_t|s_t), or with an action axis appended and `actions`. No ratio
            given: w = 1. "tree_backup" needs `policy_probs`, and takes its ρ from `log_rhos` or `behavior_probs`.
        actions: the taken actions, any integer dtype, where probabilities have an action axis.
        truncated: the episode was cut after step t though s'_t is not terminal. Where both flags are set, the step
            terminated.
        valid: 0 where the row is no transition (padding, a reset row, a dead agent). Such rows are skipped: everything
            on them but their flags, and E' where they are truncated, is ignored, and their results are 0.
        gamma, lambda_: γ and λ: floats, 0-d tensors, or tensors with as many axes as `rewards`, each of size 1 or
            equal.
        c_bar, rho_bar: bars of the ratios, like `gamma`; float("inf") does not clip.
        time_dim: the time axis of `rewards`, counted without the action axis.
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode; then `last_done` is
            required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        carry: (c D, targets) one step past the window, one per row each: what a later window returned.
        return_carry: also return that pair at the first row, for the window before this one.
        out: (targets, advantages) to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`. Where a bar
            clips, the gradient is the bar's, not the ratio's.

    Returns:
        Retrace(targets, advantages), of the shape of `rewards` and the promoted dtype of rewards, q_values and the next
        q-values (probabilities and ratios do not count). With `return_carry`, the pair (Retrace, carry). Results carry
        no autograd graph unless `differentiable`.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "retrace"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    _checks.like(op, "q_values", _checks.real(op, "q_values", q_values), "rewards", rewards, axis)
    if trace not in TRACES:
        raise ValueError(f"{op}: trace must be one of {', '.join(map(repr, TRACES))}, got {trace!r}")
    expectation = _expectation(op, rewards, axis, expected_next_q, next_q_values, next_policy_probs)
    source, ratios = _ratios(op, rewards, axis, trace, log_rhos, policy_probs, behavior_probs, actions)
    boundary = check_successors(
        op,
        rewards,
        axis,
        terminated,
        values=None,
        truncated=truncated,
        bootstrap_values=None,
        last_values=None,
        next_values=expectation,
        valid=valid,
        flags_at=flags_at,
        last_done=last_done,
    )
    factors = {"gamma": gamma, "lambda_": lambda_, "c_bar": c_bar, "rho_bar": rho_bar}
    outputs, final = _run.estimate(
        _ALGORITHMS[source, trace],
        axis,
        like=rewards,
        inputs={"rewards": rewards, "q_values": q_values, **ratios},
        factors={name: _checks.factor(op, name, x, "rewards", rewards) for name, x in factors.items()},
        boundary=boundary,
        carry=_check_carry(op, carry, rewards, axis),
        return_carry=return_carry,
        out=out,
        differentiable=differentiable,
        names=Retrace._fields,
        promoting=(rewards, q_values),
        also_read={
            "next_q_values": next_q_values,
            "next_policy_probs": next_policy_probs,
            "policy_probs": policy_probs,
            "behavior_probs": behavior_probs,
            "actions": actions,
        },
    )
    return _run.packed(Retrace, outputs, final, return_carry)


def _expectation(op, rewards, axis, expected_next_q, next_q_values, next_policy_probs):
    """E_π[Q(s'_t, .)], given or still to be reduced."""
    if expected_next_q is not None:
        if next_q_values is not None or next_policy_probs is not None:
            raise ValueError(
                f"{op}: expected_next_q excludes next_q_values and next_policy_probs; pass one or the other"
            )
        _checks.like(
            op, "expected_next_q", _checks.real(op, "expected_next_q", expected_next_q), "rewards", rewards, axis
        )
        return expected_next_q
    if next_q_values is None or next_policy_probs is None:
        raise ValueError(
            f"{op}: the value of the successors is missing: pass expected_next_q, or both next_q_values and "
            "next_policy_probs (the policy of the next state)"
        )
    for name, x in (("next_q_values", next_q_values), ("next_policy_probs", next_policy_probs)):
        _checks.with_actions(op, name, _checks.real(op, name, x), "rewards", rewards)
    if next_q_values.shape != next_policy_probs.shape:
        raise ValueError(
            f"{op}: next_q_values has {next_q_values.shape[-1]} actions, but next_policy_probs has "
            f"{next_policy_probs.shape[-1]}; they must be equal"
        )
    return Expectation(next_q_values, next_policy_probs)


def _ratios(op, rewards, axis, trace, log_rhos, policy_probs, behavior_probs, actions):
    """Where the ratio comes from, and the inputs that it and the trace read."""

    def of_taken(name, probs):
        _checks.real(op, name, probs)
        if probs.dim() != rewards.dim() + 1:
            _checks.like(op, name, probs, "rewards", rewards, axis)
            return probs
        _checks.with_actions(op, name, probs, "rewards", rewards)
        if actions is None:
            raise ValueError(f"{op}: {name} has an action axis, so actions is needed: the taken actions, as integers")
        return Taken(probs, actions)

    if trace == "tree_backup" and policy_probs is None:
        raise ValueError(f"{op}: trace='tree_backup' needs policy_probs, the probabilities of the taken actions")
    if log_rhos is not None and behavior_probs is not None:
        raise ValueError(f"{op}: log_rhos and behavior_probs both give the ratio; pass one of them")
    if log_rhos is not None and policy_probs is not None and trace != "tree_backup":
        raise ValueError(f"{op}: log_rhos and policy_probs both give the ratio; pass one of them")
    if (policy_probs is None) != (behavior_probs is None) and trace != "tree_backup":
        missing = "behavior_probs" if behavior_probs is None else "policy_probs"
        raise ValueError(f"{op}: the ratio needs both policy_probs and behavior_probs; {missing} is missing")
    if actions is not None:
        _checks.like(op, "actions", _checks.integers(op, "actions", actions), "rewards", rewards, axis)

    ratios = {}
    if log_rhos is not None:
        _checks.like(op, "log_rhos", _checks.real(op, "log_rhos", log_rhos), "rewards", rewards, axis)
        ratios["log_rhos"] = log_rhos
    if policy_probs is not None:
        ratios["policy_probs"] = of_taken("policy_probs", policy_probs)
    if behavior_probs is not None:
        ratios["behavior_probs"] = of_taken("behavior_probs", behavior_probs)
    if actions is not None and not any(isinstance(x, Taken) for x in ratios.values()):
        raise ValueError(f"{op}: actions was given, but no probabilities with an action axis to pick them from")
    source = "log_rhos" if log_rhos is not None else "probs" if behavior_probs is not None else "none"
    return source, ratios


def _check_carry(op, carry, rewards, axis):
    if carry is None:
        return None, None
    if not isinstance(carry, tuple) or len(carry) != 2:
        raise TypeError(f"{op}: carry must be the pair (c D, targets) that a later window returned")
    first, second = (_run.check_carry(op, f"carry[{i}]", x, "rewards", rewards, axis) for i, x in enumerate(carry))
    if first is None or second is None:
        raise TypeError(f"{op}: carry must be the pair (c D, targets) that a later window returned, got a None in it")
    return first, second
