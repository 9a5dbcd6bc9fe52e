"""Sums that run forward in time: eligibility traces and episodic prefix sums."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton import _checks, _run
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._triton import constant, jit, tl
from rl_triton.boundaries import Resets, starts
from rl_triton.estimators import discounted as _discounted
from rl_triton.estimators import gae as _gae

KINDS = ("accumulating", "replacing")
_ACCUMULATING, _REPLACING = map(constant, range(2))


@jit
def _trace_coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    decay = factors[2]
    if VARIANT == _REPLACING:
        decay = tl.where(x[0] != 0, 0.0, decay)
    return x[0], decay


def _accumulating(x, v_next, cut, factors):
    return x[0], factors[2]


def _replacing(x, v_next, cut, factors):
    decay = factors[2]
    return x[0], decay - decay if x[0] != 0 else decay


@jit
def _sum_coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    return x[0], factors[0]


def _sum_coefficients_scalar(x, v_next, cut, factors):
    return x[0], factors[0]


def _forward(name, coefficients, variant=(), code=0):
    return Algorithm(
        name,
        coefficients=coefficients,
        outputs=Forms(_discounted._outputs, _discounted._outputs_scalar),
        beyond=Forms(_gae._beyond, _gae._beyond_scalar),
        reverse=False,
        variant=variant,
        code=code,
    )


_TRACES = {
    kind: _forward("eligibility_traces", Forms(_trace_coefficients, scalar), (kind,), code)
    for code, (kind, scalar) in enumerate(zip(KINDS, (_accumulating, _replacing), strict=True))
}
_CUMSUM = _forward("episodic_cumsum", Forms(_sum_coefficients, _sum_coefficients_scalar))


@planned
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
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> Any:
    """Eligibility traces (Sutton & Barto 2018, eq. 12.5; replacing: Singh & Sutton 1996, section 2).

        accumulating:  z[t] = x[t] + γ λ (not done[t-1]) z[t-1]
        replacing:     z[t] = x[t] where x[t] is not 0, else γ λ (not done[t-1]) z[t-1]

    z before the window = `initial`. With flags_at="start", not done[t] in place of not done[t-1]: a flag belongs to the
    step that it ends, or to the step that it starts.

    Args:
        x: gradients or features, the shape of `done`, or with a feature axis appended; any strides; float16, bfloat16,
            float32, float64; integers count as the default float dtype.
        done: the episode ended with step t, by termination or truncation; bool, any integer or float dtype.
        initial: z before the window, one per row (`x` without its time axis); None: 0.
        gamma, lambda_: γ and λ: floats, 0-d tensors, or tensors with as many axes as `done`, each of size 1 or equal.
        kind: "accumulating" or "replacing" (for binary features).
        valid: 0 where the row is no transition: it is skipped, its result is 0, its flag counts.
        flags_at: "end" or "start".
        time_dim: the time axis of `done`.
        return_final: also return z after the last step, for the window that follows, in the dtype of the arithmetic; 0
            where the last step is done ("end" flags).
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        z, of the shape and dtype of `x`; with `return_final`, the pair (z, final). It carries no autograd graph
        unless `differentiable`.

    Raises:
        ValueError: a shape, device or value that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "eligibility_traces"
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be 'accumulating' or 'replacing', got {kind!r}")
    axis, boundary, features = _check(op, x, done, valid, flags_at, time_dim)
    factors: dict[str, Any] = {}
    for name, factor in (("gamma", gamma), ("lambda_", lambda_)):
        factor = _checks.factor(op, name, factor, "done", done)
        factors[name] = factor.unsqueeze(-1).expand(x.shape) if features and not isinstance(factor, float) else factor
    floats = all(isinstance(factor, float) for factor in factors.values())
    factors["gamma * lambda_"] = factors["gamma"] * factors["lambda_"] if floats else None
    return _scan_forward(_TRACES[kind], axis, x, factors, boundary, initial, return_final, out, differentiable)


@planned
def episodic_cumsum(
    x: torch.Tensor,
    done: torch.Tensor,
    *,
    initial: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    flags_at: str = "end",
    time_dim: int = -1,
    return_final: bool = False,
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> Any:
    """Prefix sum that starts anew with every episode: episode returns and lengths so far (Blelloch 1990, section 1.5).

        "end" flags:    C[t] = x[t] + (not done[t-1]) C[t-1]
        "start" flags:  C[t] = x[t] + (not done[t]) C[t-1]

    C before the window = `initial`.

    Args:
        x: the summands, the shape of `done`, or with a feature axis appended; any strides; float16, bfloat16, float32,
            float64; integers count as the default float dtype.
        done: the episode ended with step t ("end"), or starts with it ("start"); bool, any integer or float dtype.
        initial: C before the window, one per row (`x` without its time axis); None: 0.
        valid: 0 where the row is no transition: it is skipped, its result is 0, its flag counts.
        flags_at: "end" or "start".
        time_dim: the time axis of `done`.
        return_final: also return C after the last step, for the window that follows, in the dtype of the arithmetic; 0
            where the last step is done ("end" flags).
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        C, of the shape and dtype of `x`; with `return_final`, the pair (C, final). It carries no autograd graph
        unless `differentiable`.

    Raises:
        ValueError: a shape, device or value that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    axis, boundary, _ = _check("episodic_cumsum", x, done, valid, flags_at, time_dim)
    return _scan_forward(_CUMSUM, axis, x, {"one": 1.0}, boundary, initial, return_final, out, differentiable)


def _check(op, x, done, valid, flags_at, time_dim):
    """(time axis, boundary over the shape of x, whether x has a feature axis)."""
    _checks.real(op, "x", x)
    _checks.flags(op, "done", done)
    axis = _checks.time_axis(op, "done", done, time_dim)
    features = x.dim() == done.dim() + 1
    if features:
        _checks.with_features(op, "x", x, "done", done)
    else:
        _checks.like(op, "x", x, "done", done, axis)
    if valid is not None:
        _checks.like(op, "valid", _checks.flags(op, "valid", valid), "done", done, axis)

    def over_x(flags):
        return flags.unsqueeze(-1).expand(x.shape) if features and flags is not None else flags

    return axis, Resets(None, over_x(done), over_x(valid), starts(op, flags_at)), features


def _scan_forward(algorithm, axis, x, factors, boundary, initial, return_final, out, differentiable):
    outputs, (final, _) = _run.estimate(
        algorithm,
        axis,
        like=x,
        inputs={"x": x},
        factors=factors,
        boundary=boundary,
        carry=(_run.check_carry(algorithm.name, "initial", initial, "x", x, axis), None),
        carry_name="initial",
        return_carry=return_final,
        out=out,
        differentiable=differentiable,
        promoting=(x,),
    )
    if final is not None and not boundary.start and x.numel():
        final.masked_fill_(boundary.done.select(axis, -1) != 0, 0.0)
    return (outputs[0], final) if return_final else outputs[0]
