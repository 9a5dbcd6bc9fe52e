"""The kernels of `normalize_advantages` over all axes: moments of parts, then every element.

Each program of the first kernel reduces its part of the elements to moments in float64, about the mean of its first
tile, so that a mean far from zero costs nothing. Each program of the second pools all parts (Chan, Golub & LeVeque
1983, eq. 1.5) in the same order, so that all have the same bits, and writes its part of the results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_triton import _plan
from rl_triton._direct import DirectKernel
from rl_triton._launch import float_parts, on
from rl_triton._triton import constant, interpreted, jit, tl, triton

_DEEP, _WIDE, _WARPS = 4, 1024, 8  # a tile: each thread holds 4 runs of 4 neighbours
_MAX_PARTS = 512  # about as many programs as an H200 runs at once
_FIELDS = constant(6)  # of a part: count, mean, squares, smallest, largest, whether any is NaN


@jit
def _load(x, valid, at, stop, MASKED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr):
    """[DEEP, WIDE] elements from `at`, 0 for those that do not count, where they lie, and which ones count."""
    # Runs of 4 for every dtype: left to choose, Triton gives the bytes of a mask runs of 16, and moves data to match.
    i = tl.max_contiguous(at + tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None, :], [1, 4])
    inside = i < stop
    value = tl.load(x + i, mask=inside, other=0.0)
    if x.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    if MASKED:
        inside &= tl.load(valid + i, mask=inside, other=0) != 0
    return tl.where(inside, value, 0.0), i, inside


@jit
def moments_kernel(
    x, valid, parts, n, share, MASKED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Count, mean, sum of squared deviations, smallest, largest, any NaN: of each program's share of the elements."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * share
    stop = tl.minimum(start + share, n)
    value, _, inside = _load(x, valid, start, stop, MASKED, DEEP, WIDE)
    shift = tl.sum(value.to(tl.float64)) / tl.maximum(tl.sum(inside.to(tl.int32)), 1).to(tl.float64)
    shift = shift.to(value.dtype)  # any number near the mean will do
    count = tl.zeros([WIDE], tl.int32)
    odd = tl.zeros([WIDE], tl.int32)
    total = tl.zeros([WIDE], tl.float64)
    squares = tl.zeros([WIDE], tl.float64)
    smallest = tl.full([WIDE], float("inf"), value.dtype)
    largest = tl.full([WIDE], float("-inf"), value.dtype)
    for at in range(start, stop, DEEP * WIDE):
        value, _, inside = _load(x, valid, at, stop, MASKED, DEEP, WIDE)
        deviation = tl.where(inside, value - shift, 0.0).to(tl.float64)
        count += tl.sum(inside.to(tl.int32), 0)
        odd += tl.sum((value != value).to(tl.int32), 0)
        total += tl.sum(deviation, 0)
        squares += tl.sum(deviation * deviation, 0)
        low = tl.where(inside, value, float("inf"))
        high = tl.where(inside, value, float("-inf"))
        smallest = tl.minimum(smallest, tl.min(low, 0))
        largest = tl.maximum(largest, tl.max(high, 0))
    kept = tl.sum(count.to(tl.int64)).to(tl.float64)
    moved = tl.sum(total) / tl.maximum(kept, 1.0)
    part = parts + program * _FIELDS
    tl.store(part, kept)
    tl.store(part + 1, shift.to(tl.float64) + moved)
    tl.store(part + 2, tl.sum(squares) - moved * moved * kept)
    tl.store(part + 3, tl.min(smallest).to(tl.float64))
    tl.store(part + 4, tl.max(largest).to(tl.float64))
    tl.store(part + 5, tl.max(odd).to(tl.float64))


@jit
def normalize_kernel(
    x, valid, parts, y, n, share, n_parts, eps_high, eps_middle, eps_low,
    UNBIASED: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(x - mean) / (std + eps) of each valid element, 0 of the others and where there is no spread."""
    number = tl.arange(0, PARTS)
    there = number < n_parts
    part = parts + number * _FIELDS
    count = tl.load(part, mask=there, other=0.0)
    own_mean = tl.load(part + 1, mask=there, other=0.0)
    own_squares = tl.load(part + 2, mask=there, other=0.0)
    kept = tl.sum(count)
    mean = tl.sum(count * own_mean) / tl.maximum(kept, 1.0)
    apart = own_mean - mean
    squares = tl.sum(own_squares + tl.where(count > 0, count * apart * apart, 0.0))
    smallest = tl.min(tl.load(part + 3, mask=there, other=float("inf")))
    largest = tl.max(tl.load(part + 4, mask=there, other=float("-inf")))
    odd = tl.max(tl.load(part + 5, mask=there, other=0.0))
    if UNBIASED:
        variance = squares / (kept - 1.0)
    else:
        variance = squares / kept
    zero = kept * 0.0  # so that the parts of eps, float32 each, add up in float64
    eps = zero + eps_high + eps_middle + eps_low
    scale = 1.0 / (tl.sqrt(tl.where(variance < 0, 0.0, variance)) + eps)
    spread = tl.maximum(largest - smallest, odd)  # NaN counts as spread, so that it stays visible

    start = tl.program_id(0).to(tl.int64) * share
    stop = tl.minimum(start + share, n)
    spreads = tl.zeros([DEEP, WIDE], tl.float64) + spread > 0
    for at in range(start, stop, DEEP * WIDE):
        value, i, inside = _load(x, valid, at, stop, MASKED, DEEP, WIDE)
        normalized = tl.where(inside & spreads, (value.to(tl.float64) - mean) * scale, 0.0)
        if y.dtype.element_ty != tl.float64:
            normalized = normalized.to(tl.float32)  # float64 does not convert to 16-bit floats at once
        tl.store(y + i, normalized.to(y.dtype.element_ty), mask=i < stop)


def normalize(x: torch.Tensor, valid: torch.Tensor | None, unbiased: bool, eps: float) -> torch.Tensor:
    """normalize_advantages of elements that fill their memory, in one order in both tensors."""
    n = x.numel()
    tiles = triton.cdiv(n, _DEEP * _WIDE)
    n_parts = min(_MAX_PARTS, tiles)
    share = triton.cdiv(tiles, n_parts) * _DEEP * _WIDE
    y = torch.empty_like(x)
    parts = torch.empty(n_parts, _FIELDS.value, dtype=torch.float64, device=x.device)
    masked = valid is not None
    shared = {"x": x, "valid": valid if masked else x, "parts": parts, "n": n, "share": share, "MASKED": masked}
    shared |= {"DEEP": _DEEP, "WIDE": _WIDE}
    high, middle, low = float_parts(eps)
    second = {"y": y, "n_parts": n_parts, "eps_high": high, "eps_middle": middle, "eps_low": low}
    second |= {"UNBIASED": unbiased, "PARTS": triton.next_power_of_2(n_parts)}
    prepared: list[Any] = []
    with on(x.device):
        for kernel, arguments in ((moments_kernel, shared), (normalize_kernel, shared | second)):
            launched = kernel[(n_parts,)](**arguments, num_warps=_WARPS, enable_fp_fusion=False)
            prepared.append(functools.partial(DirectKernel, launched, arguments, n_parts, x.device))
    if not interpreted(moments_kernel):
        _plan.record(_plan.Launch((y,), (parts,), tuple(prepared)))
    return y
