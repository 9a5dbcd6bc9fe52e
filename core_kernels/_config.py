"""How the work of a call is cut up: chosen from its shape by a pure function."""

from __future__ import annotations

import contextlib
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

    def __post_init__(self) -> None:
        for name in ("rows", "chunks", "steps", "num_warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"LaunchConfig: {name} must be a power of two, got {size}")
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


def forced() -> LaunchConfig | None:
    """The configuration of the `configured` block that the call is in."""
    return _forced.get()


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def choose(n_rows: int, n_steps: int, rows_adjacent: bool) -> LaunchConfig:
    """A pure function of the problem's shape, from measurements on an H200 (docs/notes/scan.md). `rows_adjacent`:
    neighbours in memory are neighbouring rows ([T, N] layout), so a warp is as wide as its rows; else it is as wide as
    its steps, over several rows where these are short."""
    if rows_adjacent:
        if n_rows >= 24576:
            rows, chunks, steps = 32, 1, 8
        elif n_rows >= 8192:
            rows, chunks, steps = 32, 4, 8
        elif n_rows >= 2048 and n_steps > 128:
            rows, chunks, steps = 32, 8, 16
        else:
            rows, chunks, steps = 16, 16, 8
        steps = min(steps, _power_of_two_at_least(n_steps))
        chunks = min(chunks, _power_of_two_at_least(-(-n_steps // steps)))
        warps = max(1, rows * chunks // 32)
        return LaunchConfig(rows, chunks, steps, axis=0, num_warps=warps, prefetch=n_steps > chunks * steps)
    steps = min(8, _power_of_two_at_least(n_steps))
    chunks = _power_of_two_at_least(-(-n_steps // steps))
    if n_rows < 512 and chunks > 128:
        return LaunchConfig(1, 128, steps, num_warps=4, prefetch=True)
    chunks = min(chunks, 32)
    return LaunchConfig(32 // chunks, chunks, steps, num_warps=1, prefetch=n_steps > chunks * steps)
