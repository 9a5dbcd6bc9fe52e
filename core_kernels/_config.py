"""How the work of a call is cut up: chosen from its shape by a pure function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """Shape of the work of one program: `rows` rows, walked in tiles of `chunks` chunks of `steps` steps. `axis` is
    that of the chunks in a tile: 1 where a row's steps are neighbours in memory, 0 where a step's rows are. With
    `prefetch` a tile is loaded while the one before it is worked on."""

    rows: int
    chunks: int
    steps: int
    axis: int = 1
    num_warps: int = 4
    prefetch: bool = False
    parts: int = 1
    """Into how many parts the time axis is split at most, each a program of its own: for few rows and many steps."""

    def __post_init__(self) -> None:
        for name in ("rows", "chunks", "steps", "num_warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"LaunchConfig: {name} must be a power of two, got {size}")
        if self.rows * self.chunks < 32:  # Triton 3.6 fails on some of those
            raise ValueError(
                f"LaunchConfig: a tile has a chunk for each lane of a warp, got {self.rows} x {self.chunks}"
            )
        if self.axis == 1 and self.steps > 16:
            raise ValueError(f"LaunchConfig: a chunk along axis 1 has 16 steps at most, got {self.steps}")


_forced: ContextVar[LaunchConfig | None] = ContextVar("rl_triton_launch_config", default=None)


@contextlib.contextmanager
def configured(config: LaunchConfig) -> Iterator[None]:
    """Launch with `config` inside the block, whatever the shape. For tests and for tuning."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


forced = _forced.get
"""The configuration of the `configured` block that the call is in."""


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# Programs start with about as many warps as keep an H200 busy; with less than this, the time axis is split. Every part
# composes the maps of all parts before it, so more than one map a lane has to be worth it.
_FEW_WARPS, _ENOUGH_WARPS = 1024, 2048
_LANES, _MAX_PARTS = 32, 512


def weigh(lookahead: int, reads: int, tensors: int, plain: bool) -> int:
    """How much of a step a thread holds. 0 and 1: a `plain` scan (no window, no step left out) of at most four per-step
    tensors, so that 16 steps fit in 128 registers, 0 where only one that it reads holds numbers. Others: 2 and by how
    much the algorithm looks ahead."""
    if plain and lookahead == 0 and tensors <= 4:
        return 0 if reads <= 1 else 1
    return 2 + lookahead


@functools.cache
def choose(n_rows: int, n_steps: int, rows_adjacent: bool, weight: int = 2, splits: bool = True) -> LaunchConfig:
    """A pure function of the problem's shape, from measurements on an H200 (docs/notes/scan.md). `rows_adjacent`:
    neighbours in memory are neighbouring rows ([T, N] layout), so a warp is as wide as its rows; else it is as wide as
    its steps, over several rows where these are short. `weight`: of a step in registers, see `weigh`. `splits`: the
    time axis can be split over programs."""
    config = _by_rows(n_rows, n_steps, weight, splits) if rows_adjacent else _by_steps(n_steps, weight)
    if not splits:
        return config
    tiles = -(-n_steps // (config.chunks * config.steps))
    warps = -(-n_rows // config.rows) * config.num_warps
    parts = _FEW_WARPS // warps
    if parts > 1 and (config.axis == 1 or config.num_warps > 1):  # else one warp composes the maps of several rows
        parts = max(min(_ENOUGH_WARPS // warps, _LANES), parts)
    return dataclasses.replace(config, parts=max(1, min(parts, tiles // 2, _MAX_PARTS)))


@functools.cache
def choose_near(n_rows: int, n_steps: int, rows_adjacent: bool) -> LaunchConfig:
    """`choose` for windows of a few steps, where a tile is a program of its own."""
    if not rows_adjacent or n_rows < 2048:
        return choose(n_rows, n_steps, rows_adjacent)
    steps = min(8, _power_of_two_at_least(n_steps))
    chunks = min(2, _power_of_two_at_least(-(-n_steps // steps)))
    return LaunchConfig(64, chunks, steps, axis=0, num_warps=chunks)


# Elements of a program's tile (fewer where a step has less than four), and how many actions are read at once at most.
_EXPECTED, _MOST_ACTIONS = 4096, 128


@functools.cache
def choose_expected(actions: int, n_rows: int, n_steps: int, rows_adjacent: bool) -> tuple[int, int, int, int]:
    """(actions that are read at once, rows, steps, warps) of a program that reduces over actions. `actions`: how many
    neighbours there are."""
    block = min(_power_of_two_at_least(actions), _MOST_ACTIONS)
    size = max(32, _EXPECTED // max(block, 4))
    if rows_adjacent:
        rows = min(size, _power_of_two_at_least(n_rows))
        return block, rows, size // rows, 8
    time = min(size, _power_of_two_at_least(n_steps))
    return block, size // time, time, 8


# Rows of the problem at least, steps at most, and the tile (rows, chunks, steps) by the weight of a step, 0 to 4; the
# first line that fits is taken.
_ANY = 1 << 62
_TILES_BY_ROWS: tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...] = (
    (2048, 32, ((32, 1, 8), (32, 1, 8), (32, 1, 8), (32, 1, 8), (32, 2, 4))),
    (49152, 96, ((32, 1, 8), (32, 1, 8), (32, 1, 8), (32, 2, 8), (32, 2, 8))),
    (49152, _ANY, ((32, 1, 16), (32, 1, 8), (32, 1, 8), (32, 2, 8), (32, 2, 8))),
    (24576, 96, ((32, 2, 8), (32, 2, 8), (32, 2, 8), (32, 2, 8), (32, 2, 8))),
    (24576, _ANY, ((32, 2, 16), (32, 2, 8), (32, 2, 8), (32, 2, 8), (32, 2, 8))),
    (12288, 96, ((32, 2, 8), (32, 2, 8), (32, 2, 8), (32, 2, 16), (32, 2, 8))),
    (12288, _ANY, ((32, 4, 16), (32, 4, 16), (32, 4, 8), (32, 2, 16), (32, 2, 8))),
    (6144, 96, ((16, 8, 8), (16, 8, 8), (16, 8, 8), (32, 2, 16), (32, 2, 8))),
    (6144, _ANY, ((16, 8, 8), (16, 8, 8), (16, 8, 8), (32, 2, 16), (16, 8, 8))),
    (2048, 128, ((16, 8, 8), (16, 8, 8), (16, 8, 8), (16, 8, 8), (8, 16, 8))),
    (2048, _ANY, ((16, 8, 16), (16, 8, 16), (16, 8, 16), (16, 8, 16), (16, 8, 8))),
    (0, _ANY, ((8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8))),
)
# The same of fewer rows than 1024, where the time axis can be split: mostly into programs of one warp, which has nobody
# to wait for. From weight 2 on 16 steps would spill.
_SPLIT_ROWS = 1024
_TILES_SPLIT: tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...] = (
    (0, 1023, ((8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8))),
    (0, 2047, ((8, 4, 8), (8, 4, 8), (8, 4, 8), (8, 4, 8), (8, 4, 8))),
    (0, 32768, ((8, 4, 16), (8, 4, 16), (8, 4, 8), (8, 4, 8), (8, 4, 8))),
    (64, _ANY, ((8, 4, 16), (8, 4, 16), (8, 4, 8), (8, 4, 8), (8, 4, 8))),
    (0, _ANY, ((8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8), (8, 32, 8))),
)


def _by_rows(n_rows: int, n_steps: int, weight: int, splits: bool) -> LaunchConfig:
    table = _TILES_SPLIT if splits and n_rows < _SPLIT_ROWS else _TILES_BY_ROWS
    tiles = next(tiles for least, most, tiles in table if n_rows >= least and n_steps <= most)
    rows, chunks, steps = tiles[weight]
    steps = min(steps, _power_of_two_at_least(n_steps))
    chunks = min(chunks, _power_of_two_at_least(-(-n_steps // steps)))
    rows = max(rows, 32 // chunks)
    return LaunchConfig(rows, chunks, steps, axis=0, num_warps=rows * chunks // 32, prefetch=n_steps > chunks * steps)


def _by_steps(n_steps: int, weight: int) -> LaunchConfig:
    many = weight == 4 or (weight == 3 and n_steps >= 1024)
    steps = min(4 if many else 8, _power_of_two_at_least(n_steps))
    chunks = min(32, _power_of_two_at_least(-(-n_steps // steps)))
    return LaunchConfig(32 // chunks, chunks, steps, num_warps=1, prefetch=n_steps > chunks * steps)
