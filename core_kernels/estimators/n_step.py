"""n-step returns."""

from __future__ import annotations

import torch

from rl_triton import _checks, _run
from rl_triton._algorithm import Algorithm
from rl_triton._plan import planned
from rl_triton.boundaries import check_successors
from rl_triton.estimators.discounted import _DISCOUNTED


def _named(algorithm: Algorithm) -> Algorithm:
    return Algorithm(
        "n_step_returns",
        coefficients=algorithm.coefficients,
        outputs=algorithm.outputs,
        beyond=algorithm.beyond,
    )


# A window as long as the rollout is the discounted return, and is scanned; a shorter one is no recurrence.
_N_STEP = _named(_DISCOUNTED)


@planned
def n_step_returns(
    rewards: torch.Tensor,
    terminated: torch.Tensor,
    *,
    n: int,
    values: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    bootstrap_values: torch.Tensor | None = None,
    last_values: torch.Tensor | _checks.Required | None = _checks.REQUIRED,
    next_values: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    time_dim: int = -1,
    flags_at: str = "end",
    last_done: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> torch.Tensor:
    """n-step returns (Sutton & Barto 2018, eq. 7.1), with the shorter exponent where an episode or the window ends.

        G[t] = r[t] + γ r[t+1] + ... + γ^(m-1) r[t+m-1] + γ^m v,     γ per step: the product of the steps' γ

    where m = n, or less: the first step t+m-1 that is cut, or the window's last. v is the value of what the m steps
    lead to: v'[t+m-1] where that step is cut (0 if terminated; bootstrap_values or next_values if truncated),
    last_values at the window's edge, else V(s[t+n]) = values[t+n], or next_values[t+n-1] if given.

    Args:
        rewards: r[t], any shape with a time axis of T steps, any strides; float16, bfloat16, float32, float64;
            integers count as the default float dtype.
        terminated: s'_t is terminal. Shape of `rewards`; bool, any integer or float dtype, nonzero is true.
        n: the number of transitions, 1 or more. The work is n operations a step; from n = T on it is one scan.
        values: V(s_t), the shape of `rewards`; or
        next_values: V(s'_t) for every step, in place of `values`, `bootstrap_values` and `last_values`.
        truncated: the episode was cut after step t though s'_t is not terminal. Needs `bootstrap_values` or
            `next_values`. Where both flags are set, the step terminated.
        bootstrap_values: V(s'_t), read only where truncated and not terminated.
        last_values: V of the observation after the last step, one per row (`rewards` without its time axis). No silent
            default: None says zero.
        valid: 0 where the row is no transition: it is skipped and not counted; everything on it but its flags is
            ignored, its result is 0.
        gamma: γ, a float, a 0-d tensor, or a tensor with as many axes as `rewards`, each of size 1 or equal.
        time_dim: the time axis; SB3 and CleanRL store [T, N], so 0.
        flags_at: "end", or "start" where `terminated[t]` says that row t starts an episode; then `last_done` is
            required and `truncated` is not available.
        last_done: with flags_at="start", whether the last step ended an episode, one per row.
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        G, of the shape of `rewards` and the promoted dtype of rewards, values, bootstrap, last and next values. It
        carries no autograd graph unless `differentiable`. A window has no state of one step, so windows are chained by
        overlapping them.

    Raises:
        ValueError: a shape, device or combination of arguments that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "n_step_returns"
    _checks.real(op, "rewards", rewards)
    axis = _checks.time_axis(op, "rewards", rewards, time_dim)
    if type(n) is not int:
        raise TypeError(f"{op}: n must be an int, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"{op}: n must be 1 or more, got {n}")
    if values is not None:
        _checks.like(op, "values", _checks.real(op, "values", values), "rewards", rewards, axis)
    elif next_values is None:
        raise ValueError(f"{op}: pass V(s_t) in values, or V of every step's successor in next_values")
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
    outputs, _ = _run.estimate(
        _N_STEP,
        axis,
        like=rewards,
        inputs={"rewards": rewards},
        factors={"gamma": _checks.factor(op, "gamma", gamma, "rewards", rewards)},
        boundary=boundary,
        carry=(None, None),
        out=out,
        differentiable=differentiable,
        promoting=(rewards, values),
        also_read={"values": values},
        window=n if n < rewards.shape[axis] else None,
    )
    return outputs[0]
