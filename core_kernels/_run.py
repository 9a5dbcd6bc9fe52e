"""The path that every public function shares: dtypes, outputs, the carried state, the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rl_triton import _backend, _checks, _linear
from rl_triton._algorithm import Algorithm, Expectation, Problem
from rl_triton.boundaries import Successors, check_data

# Boundary tensors that hold values, and so take part in the promotion of dtypes.
_VALUED = ("last_values", "bootstrap_values", "next_values")


def result_dtype(promoting: Iterable[torch.Tensor | None], boundary: Any) -> torch.dtype:
    """The dtype of the results: promotion over `promoting` and the values in the boundary."""
    valued = (getattr(boundary, name, None) for name in _VALUED)
    return _checks.result_dtype((*promoting, *(x.values if isinstance(x, Expectation) else x for x in valued)))


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    """What results of a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def estimate(
    algorithm: Algorithm,
    time_dim: int,
    *,
    like: torch.Tensor,
    inputs: Mapping[str, Any],
    factors: Mapping[str, float | torch.Tensor | None],
    boundary: Any,
    carry: tuple[torch.Tensor | None, torch.Tensor | None],
    carry_name: str = "carry",
    return_carry: bool = False,
    out: Any = None,
    differentiable: bool = False,
    names: tuple[str, ...] = ("out",),
    promoting: Iterable[torch.Tensor | None] = (),
    also_read: Mapping[str, torch.Tensor | None] | None = None,
    window: int | None = None,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Run a scan whose arguments are checked one by one; what concerns them together is checked here.

    like: the first per-step tensor, whose shape the results have; its name is the first of `inputs`. promoting: the
    tensors that decide the dtype of the results, beside the values in `boundary`. also_read: tensors that `inputs` and
    `boundary` hold inside an `Expectation` or a `Taken`, by the names that users know them by. names: the results.
    differentiable: where gradients are recorded at all, results carry their graph.

    Returns the results, and the scanned state and target at the window's far edge if `return_carry`.
    """
    op = algorithm.name
    read = {**inputs, **boundary._asdict(), **factors, **(also_read or {})}
    read |= {carry_name: carry[0]} if carry[1] is None else {f"{carry_name}[{i}]": x for i, x in enumerate(carry)}
    device = _checks.same_device(op, read.items())
    dtype = result_dtype(promoting, boundary)
    if differentiable:
        _checks.no_out(op, out)
    graph = differentiable and torch.is_grad_enabled()
    if graph and like.numel() and _linear.is_linear(algorithm, factors, boundary, carry, return_carry):
        values = (also_read or inputs).get("values")
        return _linear.estimate(op, time_dim, like, values, boundary, factors), (None, None)
    outputs = () if graph else _checks.outputs(op, out, names, like, dtype, read.items())
    traced = isinstance(like, _checks.STAND_INS)
    if _checks.READS_DATA and not traced and like.numel():
        _checks.data(op, inputs, factors, boundary)
        if isinstance(boundary, Successors):
            check_data(op, boundary, time_dim)

    arithmetic = arithmetic_of(dtype)
    if graph:
        from rl_triton import _differentiable

        return _differentiable.estimate(
            algorithm,
            time_dim,
            like=like,
            inputs=inputs,
            factors=factors,
            boundary=boundary,
            carry=carry,
            return_carry=return_carry,
            dtype=dtype,
            arithmetic=arithmetic,
            window=window,
        )
    final: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if return_carry:
        rows = (*like.shape[:time_dim], *like.shape[time_dim + 1 :])
        state = torch.empty(rows, dtype=arithmetic, device=device)
        final = (state, torch.empty_like(state) if algorithm.target is not None else None)
    if traced:  # shapes, dtypes and devices are all that is asked for
        return outputs, final
    if like.numel():
        _backend.run(
            Problem(
                algorithm,
                like.shape,
                time_dim,
                tuple(inputs.values()),
                tuple(factors.values()),
                boundary,
                carry,
                outputs,
                final,
                arithmetic,
                window,
            )
        )
    else:  # no steps: what is scanned in comes out
        _pass_on(algorithm, boundary, carry, final)
    return outputs, final


def _pass_on(algorithm: Algorithm, boundary: Any, carry: Any, final: Any) -> None:
    state, target = final
    if state is not None:
        zero = torch.zeros_like(state)
        edge = zero if boundary.last_values is None else boundary.last_values
        state.copy_(algorithm.beyond.scalar(edge, zero) if carry[0] is None else carry[0])
    if target is not None:
        target.zero_() if carry[1] is None else target.copy_(carry[1])


def check_carry(op: str, name: str, carry: Any, like_name: str, like: torch.Tensor, time_dim: int) -> Any:
    """A state scanned in, one entry per row, or None."""
    if carry is not None:
        _checks.per_row(op, name, _checks.real(op, name, carry), like_name, like, time_dim)
    return carry


def packed(result: Callable[..., Any], outputs: tuple[torch.Tensor, ...], final: Any, return_carry: bool) -> Any:
    """`result(*outputs)`, with the carry behind it if asked for."""
    return (result(*outputs), final) if return_carry else result(*outputs)
