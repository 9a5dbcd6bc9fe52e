"""The affine scan that every estimator is an instance of, for recurrences of one's own."""

from __future__ import annotations

import torch

from rl_triton import _checks, _run
from rl_triton._algorithm import Algorithm, Forms
from rl_triton._plan import planned
from rl_triton._triton import jit, tl
from rl_triton.boundaries import Unbounded


@jit
def _coefficients(x, v_next, cut, factors, VARIANT: tl.constexpr):
    return x[0], factors[0]


def _coefficients_scalar(x, v_next, cut, factors):
    return x[0], factors[0]


@jit
def _outputs(x, state, ahead, factors, VARIANT: tl.constexpr):
    return (state,)


def _outputs_scalar(x, state, ahead, factors):
    return (state,)


@jit
def _beyond(v):
    return tl.zeros_like(v)


def _beyond_scalar(v, zero):
    return zero


def _algorithm(reverse):
    return Algorithm(
        "affine_scan",
        coefficients=Forms(_coefficients, _coefficients_scalar),
        outputs=Forms(_outputs, _outputs_scalar),
        beyond=Forms(_beyond, _beyond_scalar),
        reverse=reverse,
    )


_BACKWARD, _FORWARD = _algorithm(True), _algorithm(False)


@planned
def affine_scan(
    alpha: torch.Tensor,
    beta: float | torch.Tensor,
    *,
    initial: torch.Tensor | None = None,
    reverse: bool = True,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    differentiable: bool = False,
) -> torch.Tensor:
    """First-order affine recurrence along the time axis.

        reverse=True:   y[t] = α[t] + β[t] y[t+1],   y[T]  = initial (None: 0)
        reverse=False:  y[t] = α[t] + β[t] y[t-1],   y[-1] = initial (None: 0)

    The associative form composes the maps of neighbouring steps (Blelloch 1990, "Prefix sums and their applications",
    section 1.4). A β of zero selects: what lies beyond it, NaN and inf too, is not read.

    Args:
        alpha: α[t], any shape with a time axis, any strides; float16, bfloat16, float32, float64 or integers.
        beta: β[t], a float, a 0-d tensor, or a tensor with as many axes as `alpha`, each of size 1 or equal.
        initial: the state beyond the edge where the scan begins, one per row (`alpha` without its time axis).
        reverse: scan backward in time.
        time_dim: the time axis.
        out: a tensor to write to; may not share memory with an input.
        differentiable: results carry the graph of the formula above, for every input; excludes `out`.

    Returns:
        y, of the shape of `alpha` and the promoted dtype of alpha, beta and initial (a float beta does not count);
        16-bit results are computed in float32. It carries no autograd graph unless
        `differentiable`.

    Raises:
        ValueError: a shape or device that does not fit; the message says what to pass.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "affine_scan"
    _checks.real(op, "alpha", alpha)
    axis = _checks.time_axis(op, "alpha", alpha, time_dim)
    beta = _checks.factor(op, "beta", beta, "alpha", alpha)
    outputs, _ = _run.estimate(
        _BACKWARD if reverse else _FORWARD,
        axis,
        like=alpha,
        inputs={"alpha": alpha},
        factors={"beta": beta},
        boundary=Unbounded(),
        carry=(_run.check_carry(op, "initial", initial, "alpha", alpha, axis), None),
        carry_name="initial",
        out=out,
        differentiable=differentiable,
        promoting=(alpha, beta if isinstance(beta, torch.Tensor) else None, initial),
    )
    return outputs[0]
