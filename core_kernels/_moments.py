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

_TILE, _WARPS = 4096, 8
_MAX_PARTS = 512  # about as many programs as an H200 runs at once
_FIELDS = constant(6)  # of a part: count, mean, squares, smallest, largest, whether any is NaN


@jit
def _load(x, valid, i, stop, MASKED: tl.constexpr):
    """The elements, 0 for those that do not count, and which ones do."""
    inside = i < stop
    value = tl.load(x + i, mask=inside, other=0.0)
    if x.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)  # 16-bit floats do not convert to float64 at once
    value = value.to(tl.float64)
    if MASKED:
        inside &= tl.load(valid + i, mask=inside, other=0) != 0
    return tl.where(inside, value, 0.0), inside


@jit
def moments_kernel(x, valid, parts, n, share, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Count, mean, sum of squared deviations, smallest, largest, any NaN: of each program's share of the elements."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * share
    stop = tl.minimum(start + share, n)
    lane = tl.arange(0, TILE)
    value, inside = _load(x, valid, start + lane, stop, MASKED)
    shift = tl.sum(value) / tl.maximum(tl.sum(inside.to(tl.int32)), 1).to(tl.float64)
    count = tl.zeros([TILE], tl.int32)
    odd = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    smallest = tl.full([TILE], float("inf"), tl.float64)
    largest = tl.full([TILE], float("-inf"), tl.float64)
    for at in range(start, stop, TILE):
        value, inside = _load(x, valid, at + lane, stop, MASKED)
        deviation = tl.where(inside, value - shift, 0.0)
        count += inside.to(tl.int32)
        total += deviation
        squares += deviation * deviation
        odd |= (value != value).to(tl.int32)
        smallest = tl.minimum(smallest, tl.where(inside, value, float("inf")))
        largest = tl.maximum(largest, tl.where(inside, value, float("-inf")))
    kept = tl.sum(count.to(tl.int64)).to(tl.float64)
    moved = tl.sum(total) / tl.maximum(kept, 1.0)
    part = parts + program * _FIELDS
    tl.store(part, kept)
    tl.store(part + 1, shift + moved)
    tl.store(part + 2, tl.sum(squares) - moved * moved * kept)
    tl.store(part + 3, tl.min(smallest))
    tl.store(part + 4, tl.max(largest))
    tl.store(part + 5, tl.max(odd).to(tl.float64))


@jit
def normalize_kernel(
    x, valid, parts, y, n, share, n_parts, eps_high, eps_middle, eps_low,
    UNBIASED: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
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
    lane = tl.arange(0, TILE)
    spreads = tl.zeros([TILE], tl.float64) + spread > 0
    for at in range(start, stop, TILE):
        i = at + lane
        value, inside = _load(x, valid, i, stop, MASKED)
        normalized = tl.where(inside & spreads, (value - mean) * scale, 0.0)
        if y.dtype.element_ty != tl.float64:
            normalized = normalized.to(tl.float32)
        tl.store(y + i, normalized.to(y.dtype.element_ty), mask=i < stop)


def normalize(x: torch.Tensor, valid: torch.Tensor | None, unbiased: bool, eps: float) -> torch.Tensor:
    """normalize_advantages of elements that fill their memory, in one order in both tensors."""
    n = x.numel()
    n_parts = min(_MAX_PARTS, triton.cdiv(n, _TILE))
    share = triton.cdiv(triton.cdiv(n, n_parts), _TILE) * _TILE
    y = torch.empty_like(x)
    parts = torch.empty(n_parts, _FIELDS.value, dtype=torch.float64, device=x.device)
    masked = valid is not None
    shared = {"x": x, "valid": valid if masked else x, "parts": parts, "n": n, "share": share, "MASKED": masked}
    shared["TILE"] = _TILE
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
