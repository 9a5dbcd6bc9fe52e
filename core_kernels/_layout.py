"""Strides: every tensor of a call as an operand over the same few batch axes, without a copy.

A call's tensors share one shape. Its time axis is walked; the other axes are rows. Batch axes that lie behind one
another in memory in *every* tensor are merged, so that an ordinary [N, T] or [T, N] call has one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Operand(NamedTuple):
    tensor: torch.Tensor
    time_stride: int
    """In elements; 0 for a tensor that has one entry per row."""
    row_strides: tuple[int, ...]
    """In elements, innermost axis first."""


class Layout(NamedTuple):
    sizes: tuple[int, ...]
    """Lengths of the merged batch axes, innermost first; never empty."""
    n_rows: int
    n_steps: int
    operands: tuple[Operand | None, ...]


def collapse(shape: torch.Size, time_dim: int, tensors: tuple[torch.Tensor | None, ...]) -> Layout:
    """Describe `tensors`, each of `shape` or of `shape` without its time axis, by as few batch axes as they allow."""
    batch_axes = [d for d in range(len(shape)) if d != time_dim and shape[d] != 1]
    present = [x for x in tensors if x is not None]
    strides = []
    for x in present:
        stride = x.stride()
        if x.dim() < len(shape):
            stride = (*stride[:time_dim], 0, *stride[time_dim:])
        strides.append(stride)

    sizes: list[int] = []
    columns: list[tuple[int, ...]] = []  # per merged axis, the stride of each tensor
    for d in reversed(batch_axes):
        column = tuple(stride[d] for stride in strides)
        if sizes and all(outer == inner * sizes[-1] for outer, inner in zip(column, columns[-1], strict=True)):
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
            columns.append(column)
    if not sizes:
        sizes.append(1)
        columns.append((0,) * len(present))

    described = iter(
        Operand(x, stride[time_dim], row_strides)
        for x, stride, row_strides in zip(present, strides, zip(*columns, strict=True), strict=True)
    )
    n_rows = 1
    for size in sizes:
        n_rows *= size
    operands = tuple(None if x is None else next(described) for x in tensors)
    return Layout(tuple(sizes), n_rows, shape[time_dim], operands)
