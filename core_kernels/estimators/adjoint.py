"""Transposes, which are gradients: of the linear estimators and of the affine scan, one scan in the other direction."""

from __future__ import annotations

import torch

from rl_triton import _backend, _checks, _run, _scalar
from rl_triton._algorithm import Algorithm, Forms, Problem
from rl_triton._plan import planned
from rl_triton._tile import scaled
from rl_triton._triton import jit, tl
from rl_triton.boundaries import EDGE, ENDED, VALID, Predecessors, Unbounded
from rl_triton.estimators import gae as _gae
from rl_triton.estimators import td_lambda as _td_lambda

_AT_EDGE, _FOLLOWED, _TERMINATED = 0, 1, 2  # EDGE, VALID and ENDED, for the scalar form


@jit
def _coefficients(x, after, cut, factors, VARIANT: tl.constexpr):
    return x[0] + x[1], factors[1]


def _coefficients_scalar(x, after, cut, factors):
    return x[0] + x[1], factors[1]


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    gamma, decay, own, following, edge = factors
    after, _, cut, state_before, _ = ahead
    of_value = tl.where(cut, 0.0, scaled(own, state_before)) - x[0]
    of_last = scaled(gamma, state)
    beyond = tl.where(after == EDGE, scaled(edge, state), of_last)
    beyond = tl.where(after == VALID, scaled(following, state), beyond)
    return state, of_value, tl.where(after == ENDED, 0.0, beyond), tl.where(after == EDGE, of_last, 0.0)


def _outputs_scalar(x, state, ahead, factors):
    gamma, _, own, following, edge = factors
    after, _, cut, state_before, _ = ahead
    zero = gamma - gamma  # finite
    of_value = (zero if cut else _scalar.scaled(own, state_before)) - x[0]
    of_last = _scalar.scaled(gamma, state)
    beyond = _scalar.where(after == _AT_EDGE, _scalar.scaled(edge, state), of_last)
    beyond = _scalar.where(after == _FOLLOWED, _scalar.scaled(following, state), beyond)
    beyond = _scalar.where(after == _TERMINATED, zero, beyond)
    return state, of_value, beyond, _scalar.where(after == _AT_EDGE, of_last, zero)


_ADJOINT = Algorithm(
    "adjoint",
    coefficients=Forms(_coefficients, _coefficients_scalar),
    outputs=Forms(_outputs, _outputs_scalar),
    beyond=Forms(_gae._beyond, _gae._beyond_scalar),
    lookahead=1,
    reverse=False,
)


@planned
def adjoint(
    terminated: torch.Tensor,
    of_advantages: torch.Tensor | None,
    of_returns: torch.Tensor | None,
    *,
    op: str,
    gamma: float,
    lambda_: float,
    has_next_values: bool,
    truncated: torch.Tensor | None = None,
    last_done: torch.Tensor | None = None,
    time_dim: int = -1,
    rewards: bool = True,
    values: bool = True,
    successors: bool = True,
    last_values: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `gae`, `td_lambda_returns` or `discounted_returns`, `op`, from those of its results.

    With float γ and λ and no gaps the three are linear maps: returns follow one recurrence (discounted returns with
    λ = 1), and advantages are returns minus values. Their transpose takes g[t], the gradient of all results that hold
    the state of step t, forward in time,

        μ[t] = g[t] + γ λ (not cut[t-1]) μ[t-1],       g = of_advantages + of_returns, what is None being 0

    and from there, with cut[t] = terminated[t] or truncated[t],

        rewards[t]           μ[t]
        values[t]            γ (1-λ) (not cut[t-1]) μ[t-1] - of_advantages[t]
        last_values          γ μ[T-1], where the last step is not cut
        bootstrap_values[t]  γ μ[t], where truncated and not terminated

    `has_next_values`: with next_values given the op reads V(s'_t) there, so

        values[t]            -γ λ (not cut[t-1]) μ[t-1] - of_advantages[t]
        next_values[t]       0 where terminated; γ μ[t] in `gae`, where truncated and at the edge; else γ (1-λ) μ[t]

    and `last_values` has none. The four bools say which are wanted; `successors` are bootstrap_values or next_values.
    A factor of zero reads nothing. γ and λ are finite.

    Returns:
        those that are wanted, in this order, in the promoted dtype of the gradients given.
    """
    axis = _checks.time_axis("adjoint", "terminated", terminated, time_dim)
    given = of_returns if of_advantages is None else of_advantages
    if given is None:
        raise ValueError("adjoint: of_advantages and of_returns are None; pass the gradient of one result at least")
    dtype = _checks.result_dtype((of_advantages, of_returns))
    arithmetic = _run.arithmetic_of(dtype)
    if op == "discounted_returns":
        lambda_ = 1.0
    decay, rest = gamma * lambda_, _td_lambda._weight(gamma, lambda_, arithmetic)
    factors = {
        "gamma": gamma,
        "decay": decay,
        "own": -decay if has_next_values else rest,
        "following": (gamma if op == "gae" else rest) if has_next_values else 0.0,
        "edge": gamma if has_next_values else 0.0,
    }
    shape, per_row = terminated.shape, (*terminated.shape[:axis], *terminated.shape[axis + 1 :])
    outputs = tuple(
        torch.empty(size, dtype=dtype, device=terminated.device) if wanted else None
        for size, wanted in zip((shape, shape, shape, per_row), (rewards, values, successors, last_values), strict=True)
    )
    problem = Problem(
        _ADJOINT,
        shape,
        axis,
        (of_advantages, of_returns),
        tuple(factors.values()),
        Predecessors(None, terminated, truncated, last_done),
        (None, None),
        outputs,
        (None, None),
        arithmetic,
    )
    if isinstance(given, _checks.STAND_INS):  # shapes, dtypes and devices are all that is asked for
        return problem.written
    if terminated.numel():
        _backend.run(problem)
    else:
        for y in problem.written:
            y.zero_()
    return problem.written


@jit
def _scan_coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    return x[0], x[1]


def _scan_coefficients_scalar(x, v_next, cut, factors):
    return x[0], x[1]


@jit
def _scan_outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    before = ahead[3]
    y = tl.where((x[1] == 0) & (x[2] - x[2] != 0), 0.0, x[2])
    return state, tl.where((before == 0) | (y == 0), 0.0, before * y)


def _scan_outputs_scalar(x, state, ahead, factors):
    before, zero = ahead[3], factors[0]
    y = _scalar.where((x[1] == 0) & (x[2] - x[2] != 0), zero, x[2])
    return state, _scalar.where((before == 0) | (y == 0), zero, before * y)


def _transposed(reverse: bool) -> Algorithm:
    return Algorithm(
        "transposed_scan",
        coefficients=Forms(_scan_coefficients, _scan_coefficients_scalar),
        outputs=Forms(_scan_outputs, _scan_outputs_scalar),
        beyond=Forms(_gae._beyond, _gae._beyond_scalar),
        lookahead=1,
        reverse=reverse,
    )


_BACKWARD, _FORWARD = _transposed(True), _transposed(False)


@planned
def transposed_scan(
    grad: torch.Tensor,
    beta: torch.Tensor,
    y: torch.Tensor,
    *,
    initial: torch.Tensor,
    reverse: bool,
    time_dim: int,
    out: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Gradients of `affine_scan`, y[t] = α[t] + β[t] y[t+1], from those of its result, g, but for its first step.

        μ[t] = g[t] + β[t-1] μ[t-1],   μ[0] = g[0],   ∂α[t] = μ[t],   ∂β[t-1] = μ[t-1] y[t]

    for t from 1; likewise from the last step on, where the scan runs forward. A zero selects as in `_autograd.py`. All
    tensors are of one dtype, float32 or float64, and of one step less than the scan.

    Args:
        grad, y: g[t] and y[t], without the first step.
        beta: β[t-1]: without the last step.
        initial: g[0], one per row.
        reverse: run backward in time, for a scan that runs forward.
        out: ∂α[t], and ∂β[t-1] (None: not wanted).
    """
    problem = Problem(
        _BACKWARD if reverse else _FORWARD,
        grad.shape,
        time_dim,
        (grad, beta, y),
        (0.0,),
        Unbounded(),
        (initial, None),
        out,
        (None, None),
        grad.dtype,
    )
    _backend.run(problem)
    return problem.written
