"""The kernels of `normalize_advantages` over all axes: moments of parts, then every element.

Each program of the first kernel reduces its tiles to moments in float64, about the mean of its first tile, so that a
mean far from zero costs nothing. Each program of the second pools all parts (Chan, Golub & LeVeque 1983, eq. 1.5) in
the same order, so that all have the same bits, and writes its tiles of the results. The programs take the tiles by
turns, forward in the first kernel and backward in the second, which so begins with what the cache still holds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_triton import _plan
from rl_triton._direct import DirectKernel
from rl_triton._launch import float_parts, on
from rl_triton._triton import constant, interpreted, jit, tl, triton

# How either kernel is cut up: a thread holds `deep` runs of 4 neighbours of a tile. No more than so many programs.
_DEEP, _WARPS = 4, 8
_FIRST_PROGRAMS, _SECOND_PROGRAMS = 512, 512
_FIELDS = constant(5)  # of a part: count, mean, squares, smallest, largest


@jit
def _load(
    x, valid, at, n, MASKED: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """DEEP times WIDE elements from `at`, and their flags, as they are stored; 0 beyond n, where nothing is read.
    WHOLE: the elements consist of whole tiles."""
    i = tl.arange(0, WIDE)
    values = ()
    flags = ()
    for d in tl.static_range(DEEP):
        here = i * 0 + at < n if WHOLE else i + d * WIDE < n - at
        values = values + (tl.load(x + at + d * WIDE + i, mask=here, other=0.0),)
        if MASKED:
            flags = flags + (tl.load(valid + at + d * WIDE + i, mask=here, other=0),)
    return values, flags


@jit
def _counted(
    values, flags, at, n, d: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The d-th WIDE elements of the tile at `at`, in the arithmetic dtype, and which of them count."""
    value = values[d]
    i = tl.arange(0, WIDE)
    # From flags, not from the mask of the load: what waits for its turn in registers had better not be booleans.
    if MASKED:
        inside = flags[d] != 0
    elif WHOLE:
        inside = i >= 0
    else:
        inside = i + d * WIDE < n - at
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    return value, inside


@jit
def _near_mean(
    values, flags, at, n, MASKED: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """About the mean of a tile's elements that count: each is divided first, so that their sum does not overflow."""
    value, inside = _counted(values, flags, at, n, 0, MASKED, WHOLE, WIDE)
    small = tl.where(inside, value, 0.0) * (1.0 / (DEEP * WIDE))
    count = inside.to(tl.int32)
    for d in tl.static_range(1, DEEP):
        value, inside = _counted(values, flags, at, n, d, MASKED, WHOLE, WIDE)
        small += tl.where(inside, value, 0.0) * (1.0 / (DEEP * WIDE))
        count += inside.to(tl.int32)
    if MASKED:
        kept = tl.sum(count)
    else:
        kept = tl.minimum(n - at, DEEP * WIDE)
    return tl.sum(small) * (DEEP * WIDE / tl.maximum(kept, 1).to(small.dtype))


@jit
def _gathered(
    sums, values, flags, at, n, shift,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sums of `moments_kernel` after the tile at `at`."""
    count, total, squares, smallest, largest = sums
    for d in tl.static_range(DEEP):
        value, inside = _counted(values, flags, at, n, d, MASKED, WHOLE, WIDE)
        deviation = value - shift
        low = value
        high = value
        if MASKED or not WHOLE:
            deviation = tl.where(inside, deviation, 0.0)
            low = tl.where(inside, low, float("inf"))
            high = tl.where(inside, high, float("-inf"))
        if MASKED:
            count += inside.to(tl.int32)
        deviation = deviation.to(tl.float64)
        total += deviation
        squares = tl.fma(deviation, deviation, squares)
        smallest = tl.minimum(smallest, low, propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, high)
    return count, total, squares, smallest, largest


@jit
def moments_kernel(
    x, valid, parts, n, n_parts, stride,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, SINGLE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Count, mean, sum of squared deviations, smallest, largest: of each program's tiles. (Any NaN makes the smallest
    of all smallest and the largest of all largest: so it counts as spread, and stays visible.)

    SINGLE: a program has one tile.
    """
    program = tl.program_id(0)
    at = program.to(tl.int64) * (DEEP * WIDE)
    values, flags = _load(x, valid, at, n, MASKED, WHOLE, DEEP, WIDE)
    shift = _near_mean(values, flags, at, n, MASKED, WHOLE, DEEP, WIDE)  # any number near the mean will do
    count = tl.zeros([WIDE], tl.int32)
    zero = tl.zeros([WIDE], tl.float64)
    smallest = tl.full([WIDE], float("inf"), shift.dtype)
    largest = tl.full([WIDE], float("-inf"), shift.dtype)
    sums = count, zero, zero, smallest, largest
    if SINGLE:
        sums = _gathered(sums, values, flags, at, n, shift, MASKED, WHOLE, DEEP, WIDE)
    else:
        for start in range(at, n, stride):
            # The next tile is asked for before this one is worked on.
            values_ahead, flags_ahead = _load(x, valid, start + stride, n, MASKED, WHOLE, DEEP, WIDE)
            sums = _gathered(sums, values, flags, start, n, shift, MASKED, WHOLE, DEEP, WIDE)
            values, flags = values_ahead, flags_ahead
    count, total, squares, smallest, largest = sums
    if MASKED:
        kept = tl.sum(count.to(tl.int64))
    else:
        # Of all tiles, each n_parts-th; the last one of all may be cut short.
        tiles = (n - at + stride - 1) // stride
        last = at + (tiles - 1) * stride
        kept = (tiles - 1) * (DEEP * WIDE) + tl.minimum(n - last, DEEP * WIDE)
    kept = kept.to(tl.float64)
    moved = tl.sum(total) / tl.maximum(kept, 1.0)
    odd = tl.max((smallest != smallest).to(tl.int32)) != 0
    part = parts + program
    tl.store(part, kept)
    tl.store(part + n_parts, shift.to(tl.float64) + moved)
    tl.store(part + 2 * n_parts, tl.sum(squares) - moved * moved * kept)
    tl.store(part + 3 * n_parts, tl.where(odd, float("-inf"), tl.min(smallest).to(tl.float64)))
    tl.store(part + 4 * n_parts, tl.where(odd, float("inf"), tl.max(largest).to(tl.float64)))


@jit
def _pooled(parts, n_parts, eps_high, eps_middle, eps_low, UNBIASED: tl.constexpr, PARTS: tl.constexpr):
    """Of all parts together: the mean, 1 / (std + eps), and whether there is spread."""
    number = tl.arange(0, PARTS)
    there = number < n_parts
    part = parts + number
    count = tl.load(part, mask=there, other=0.0)
    own_mean = tl.load(part + n_parts, mask=there, other=0.0)
    own_squares = tl.load(part + 2 * n_parts, mask=there, other=0.0)
    smallest = tl.load(part + 3 * n_parts, mask=there, other=float("inf"))
    largest = tl.load(part + 4 * n_parts, mask=there, other=float("-inf"))
    kept = tl.sum(count)
    mean = tl.sum(count * own_mean) / tl.maximum(kept, 1.0)
    apart = own_mean - mean
    squares = tl.sum(own_squares + tl.where(count > 0, count * apart * apart, 0.0))
    if UNBIASED:
        variance = squares / (kept - 1.0)
    else:
        variance = squares / kept
    zero = kept * 0.0  # so that the parts of eps, float32 each, add up in float64
    eps = zero + eps_high + eps_middle + eps_low
    scale = 1.0 / (tl.sqrt(tl.where(variance < 0, 0.0, variance)) + eps)
    return mean, scale, tl.where(tl.max(largest) > tl.min(smallest), 1, 0)


@jit
def _write(
    y, values, flags, at, n, mean, scale, spreads,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The results of the tile at `at`, past the cache: nobody reads them again here."""
    i = tl.arange(0, WIDE)
    for d in tl.static_range(DEEP):
        value, inside = _counted(values, flags, at, n, d, MASKED, WHOLE, WIDE)
        normalized = (value.to(tl.float64) - mean) * scale
        if y.dtype.element_ty != tl.float64:
            normalized = normalized.to(tl.float32)  # float64 does not convert to 16-bit floats at once
        normalized = tl.where(inside & (i * 0 + spreads > 0), normalized, 0.0)
        here = i * 0 + at < n if WHOLE else i + d * WIDE < n - at
        tl.store(y + at + d * WIDE + i, normalized.to(y.dtype.element_ty), mask=here, cache_modifier=".cs")


@jit
def normalize_kernel(
    x, valid, parts, y, n, n_parts, n_programs, stride, eps_high, eps_middle, eps_low, UNBIASED: tl.constexpr,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, SINGLE: tl.constexpr, PARTS: tl.constexpr, DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """(x - mean) / (std + eps) of each valid element, 0 of the others and where there is no spread."""
    program = n_programs - 1 - tl.program_id(0)
    first = program.to(tl.int64) * (DEEP * WIDE)
    tiles = (n - first + stride - 1) // stride
    at = first + (tiles - 1) * stride
    # Asked for before the parts are pooled.
    values, flags = _load(x, valid, at, n, MASKED, WHOLE, DEEP, WIDE)
    mean, scale, spreads = _pooled(parts, n_parts, eps_high, eps_middle, eps_low, UNBIASED, PARTS)
    if SINGLE:
        _write(y, values, flags, at, n, mean, scale, spreads, MASKED, WHOLE, DEEP, WIDE)
    else:
        for _ in range(0, tiles):
            before = at - stride
            there = tl.where(before < 0, n, before)  # before the first tile nothing is read
            values_ahead, flags_ahead = _load(x, valid, there, n, MASKED, WHOLE, DEEP, WIDE)
            _write(y, values, flags, at, n, mean, scale, spreads, MASKED, WHOLE, DEEP, WIDE)
            values, flags = values_ahead, flags_ahead
            at = before


def normalize(x: torch.Tensor, valid: torch.Tensor | None, unbiased: bool, eps: float) -> torch.Tensor:
    """normalize_advantages of elements that fill their memory, in one order in both tensors."""
    n = x.numel()
    wide = 128 * _WARPS
    tiles = triton.cdiv(n, _DEEP * wide)
    n_parts, n_programs = min(_FIRST_PROGRAMS, tiles), min(_SECOND_PROGRAMS, tiles)
    y = torch.empty_like(x)
    parts = torch.empty(_FIELDS.value, n_parts, dtype=torch.float64, device=x.device)
    masked = valid is not None
    if valid is not None and valid.dtype == torch.bool:
        valid = valid.view(torch.uint8)  # so that flags stay bytes until they are asked
    shared = {"x": x, "valid": valid if masked else x, "parts": parts, "n": n, "n_parts": n_parts, "MASKED": masked}
    shared |= {"DEEP": _DEEP, "WIDE": wide, "WHOLE": n % (_DEEP * wide) == 0}
    first = shared | {"SINGLE": n_parts == tiles, "stride": n_parts * _DEEP * wide}
    high, middle, low = float_parts(eps)
    second = shared | {"y": y, "n_programs": n_programs, "eps_high": high, "eps_middle": middle, "eps_low": low}
    second |= {"UNBIASED": unbiased, "PARTS": triton.next_power_of_2(n_parts), "SINGLE": n_programs == tiles}
    second |= {"stride": n_programs * _DEEP * wide}
    prepared: list[Any] = []
    with on(x.device):
        for kernel, arguments, blocks in ((moments_kernel, first, n_parts), (normalize_kernel, second, n_programs)):
            launched = kernel[(blocks,)](**arguments, num_warps=_WARPS, enable_fp_fusion=False)
            prepared.append(functools.partial(DirectKernel, launched, arguments, blocks, x.device))
    if not interpreted(moments_kernel):
        _plan.record(_plan.Launch((y,), (parts,), tuple(prepared)))
    return y
