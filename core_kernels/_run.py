"""The path that every public function shares: dtypes, outputs, widening of 16-bit tensors on the CPU, the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rl_triton import _backend, _checks
from rl_triton._algorithm import Algorithm, Problem

# Boundary tensors that hold values, and so take part in the promotion of dtypes.
_VALUED = ("last_values", "bootstrap_values", "next_values")


def estimate(
    algorithm: Algorithm,
    time_dim: int,
    *,
    inputs: Mapping[str, torch.Tensor],
    factors: Mapping[str, float | torch.Tensor | None],
    boundary: Any,
    carry: Any,
    carry_name: str = "carry",
    return_carry: bool = False,
    out: Any = None,
    result: Callable[..., Any] | None = None,
    promoting: Iterable[Any] = (),
) -> Any:
    """Run a scan whose inputs, factors and boundary are checked: `result(*tensors)`, or the one tensor, and with
    `return_carry` the pair of that and the scanned state at the window's far edge."""
    op = algorithm.name
    first_name, first = next(iter(inputs.items()))
    if carry is not None:
        _checks.per_row(op, carry_name, _checks.real(op, carry_name, carry), first_name, first, time_dim)
    read = {**inputs, **boundary._asdict(), **factors, carry_name: carry}
    device = _checks.same_device(op, read.items())
    valued = (getattr(boundary, name, None) for name in _VALUED)
    dtype = _checks.result_dtype((*inputs.values(), *valued, *(x for x in promoting if isinstance(x, torch.Tensor))))
    names = getattr(result, "_fields", ("out",))
    outputs = _checks.outputs(op, out, names, first, dtype, read.items())

    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    rows = (*first.shape[:time_dim], *first.shape[time_dim + 1 :])
    final = torch.empty(rows, dtype=arithmetic, device=device) if return_carry else None
    if first.numel() == 0:
        if final is not None:  # no steps: what is scanned in comes out
            edge = boundary.last_values if boundary.last_values is not None else torch.zeros_like(final)
            final.copy_(carry if carry is not None else algorithm.beyond.scalar(edge, torch.zeros_like(final)))
    else:
        _backend.run(
            Problem(
                algorithm,
                first.shape,
                time_dim,
                tuple(inputs.values()),
                tuple(factors.values()),
                boundary,
                carry,
                outputs,
                final,
                arithmetic,
            )
        )
    value = outputs[0] if result is None else result(*outputs)
    return (value, final) if return_carry else value
