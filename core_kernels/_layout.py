"""Strides: every tensor of a call as an operand over the same few batch axes, without a copy.

A call's tensors share one shape. Its time axis is walked; the other axes are rows. Batch axes that lie behind one
another in memory in *every* tensor are merged, so that an ordinary [N, T] or [T, N] call has one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from rl_triton._algorithm import Expectation, Taken


class Operand(NamedTuple):
    tensor: torch.Tensor
    time_stride: int
    """In elements; 0 for a tensor that has one entry per row."""
    row_strides: tuple[int, ...]
    """In elements, innermost axis first."""
    action_stride: int
    """In elements; 0 for a tensor without an action axis."""


class Layout(NamedTuple):
    sizes: tuple[int, ...]
    """Lengths of the merged batch axes, innermost first; never empty."""
    n_rows: int
    n_steps: int
    groups: tuple[tuple[Any, ...], ...]
    """What was given, with an `Operand` in place of each tensor."""


def _each_tensor(source: Any, visit: Callable[[torch.Tensor], Any]) -> Any:
    """`visit` every tensor of a source and keep its structure."""
    if source is None:
        return None
    if isinstance(source, torch.Tensor):
        return visit(source)
    if isinstance(source, (Expectation, Taken)):
        return type(source)(*(visit(x) for x in source))
    return None


@functools.lru_cache(maxsize=4096)
def _collapsed(
    shape: torch.Size, time_dim: int, strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], int, tuple[tuple[int, tuple[int, ...], int], ...]]:
    """(sizes, number of rows, and of each tensor its time stride, row strides and action stride)."""
    n_axes = len(shape)
    strides = tuple(
        stride if len(stride) >= n_axes else (*stride[:time_dim], 0, *stride[time_dim:]) for stride in strides
    )
    sizes: list[int] = []
    columns: list[tuple[int, ...]] = []  # per merged axis, the stride of each tensor
    for d in range(n_axes - 1, -1, -1):
        if d == time_dim or shape[d] == 1:
            continue
        column = tuple(stride[d] for stride in strides)
        if sizes and all(outer == inner * sizes[-1] for outer, inner in zip(column, columns[-1], strict=True)):
            sizes[-1] *= shape[d]
        else:
            sizes.append(shape[d])
            columns.append(column)
    if not sizes:
        sizes.append(1)
        columns.append((0,) * len(strides))
    described = tuple(
        (stride[time_dim], row_strides, stride[n_axes] if len(stride) > n_axes else 0)
        for stride, row_strides in zip(strides, zip(*columns, strict=True), strict=True)
    )
    return tuple(sizes), math.prod(sizes), described


def describe(shape: torch.Size, time_dim: int, groups: Iterable[tuple[Any, ...]]) -> Layout:
    """Describe the tensors in `groups` (of `shape`, of `shape` without its time axis, or with an action axis appended)
    by as few batch axes as they allow. Whatever is no tensor becomes None."""
    groups = tuple(groups)
    strides: list[tuple[int, ...]] = []
    for group in groups:
        for source in group:
            _each_tensor(source, lambda x: strides.append(x.stride()))
    sizes, n_rows, described = _collapsed(shape, time_dim, tuple(strides))
    remaining = iter(described)

    def operand(x: torch.Tensor) -> Operand:
        return Operand(x, *next(remaining))

    operands = tuple(tuple([_each_tensor(source, operand) for source in group]) for group in groups)
    return Layout(sizes, n_rows, shape[time_dim], operands)
