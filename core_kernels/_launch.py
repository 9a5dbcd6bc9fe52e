"""From a validated problem to a kernel launch: configuration, arguments, grid."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from rl_triton import _scan, _window, boundaries
from rl_triton._algorithm import Expectation, Problem, Taken
from rl_triton._layout import Operand, describe
from rl_triton._triton import interpreted, tl, triton


@dataclass(frozen=True)
class LaunchConfig:
    """Shape of the work of one program: `rows` x `time` is the tile that is scanned at once, both powers of two."""

    rows: int
    time: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name in ("rows", "time", "num_warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"LaunchConfig: {name} must be a power of two, got {size}")


_forced: ContextVar[LaunchConfig | None] = ContextVar("rl_triton_launch_config", default=None)


@contextlib.contextmanager
def configured(config: LaunchConfig) -> Iterator[None]:
    """Launch with `config` inside the block, whatever the shape. For tests and for tuning."""
    token = _forced.set(config)
    try:
        yield
    finally:
        _forced.reset(token)


def _power_of_two_at_least(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def choose(n_rows: int, n_steps: int, rows_adjacent: bool) -> LaunchConfig:
    """A pure function of the problem's shape. Rows are packed into one tile when they are short; a long row is walked
    in tiles, larger ones when few rows are there to fill the device. `rows_adjacent`: neighbours in memory are
    neighbouring rows ([T, N] layout), so a tile must be wide in rows for its loads to coalesce."""
    if rows_adjacent:
        time = min(_power_of_two_at_least(n_steps), 32)
        rows = min(_power_of_two_at_least(n_rows), 32)
        return LaunchConfig(rows, time, num_warps=4)
    if n_rows < 512 and n_steps > 1024:
        return LaunchConfig(1, 1024, num_warps=4)
    time = min(_power_of_two_at_least(n_steps), 128)
    rows = min(_power_of_two_at_least(n_rows), max(1, 512 // time))
    return LaunchConfig(rows, time, num_warps=1)


@functools.lru_cache(maxsize=4096)
def _float_parts(x: float) -> tuple[float, float, float]:
    """x as a sum of three float32: the kernel's Python floats are float32, and float64 arithmetic needs all of x."""

    def nearest(y: float) -> float:
        try:
            return struct.unpack("f", struct.pack("f", y))[0]
        except OverflowError:  # beyond float32's range: it cannot be split
            return float("inf") if y > 0 else float("-inf")

    high = nearest(x)
    if x != x or abs(high) == float("inf"):
        return high, 0.0, 0.0
    middle = nearest(x - high)
    return high, middle, nearest(x - high - middle)


def _argument(source: Any) -> Any:
    """An operand as the kernel reads it: one flat tuple, since Triton 3.6 forgets constants (strides of 1) in the inner
    tuples of a tuple, unless a constant of its own follows them."""
    if source is None:
        return None
    if isinstance(source, Operand):
        return source.tensor, source.time_stride, *source.row_strides
    first, second = source
    joined = (*_argument(first), first.action_stride, *_argument(second))
    if isinstance(source, Taken):
        return joined
    return (*joined, second.action_stride, first.tensor.shape[-1])


def _kind(source: Any) -> int:
    kinds: dict[type, Any] = {Taken: _scan.TAKEN, Expectation: _scan.EXPECTATION}
    return kinds.get(type(source), _scan.PLAIN).value


def run(problem: Problem) -> None:
    """Launch the scan on the current stream of the tensors' device. Fills `problem.outputs` and `problem.final`."""
    algorithm, bounds = problem.algorithm, problem.boundary
    layout = describe(
        problem.shape,
        problem.time_dim,
        (problem.inputs, problem.factors, tuple(bounds), problem.initial, problem.outputs, problem.final),
    )
    inputs, factors, boundary, initial, outputs, final = (tuple(map(_argument, group)) for group in layout.groups)
    factors = tuple(
        (operand, _float_parts(f) if isinstance(f, float) else None)
        for operand, f in zip(factors, problem.factors, strict=True)
    )
    first = layout.groups[4][0]
    config = _forced.get() or choose(
        layout.n_rows, layout.n_steps, rows_adjacent=first.row_strides[0] == 1 and first.time_stride != 1
    )
    boundary = (*boundary, None)  # a constant at the end, for the same reason as in `_argument`
    extent = (layout.sizes, layout.n_rows, layout.n_steps)
    constants = {
        "START": bounds.start,
        "DIMS": len(layout.sizes),
        "DTYPE": tl.float64 if problem.dtype == torch.float64 else tl.float32,
        "ROWS": config.rows,
        "TIME": config.time,
        "num_warps": config.num_warps,
        # Contraction would make the bits depend on the launch configuration and on the Triton version.
        "enable_fp_fusion": False,
    }
    blocks = triton.cdiv(layout.n_rows, config.rows)
    device = problem.outputs[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if problem.window is not None:
            blocks *= triton.cdiv(layout.n_steps, config.time)
            _window.window_kernel[(blocks,)](inputs, factors, boundary, outputs, *extent, problem.window, **constants)
            return
        _scan.scan_kernel[(blocks,)](
            inputs,
            factors,
            boundary,
            initial,
            outputs,
            final,
            *extent,
            COEFFICIENTS=algorithm.coefficients.kernel,
            TARGET=None if algorithm.target is None else algorithm.target.kernel,
            OUTPUTS=algorithm.outputs.kernel,
            BEYOND=algorithm.beyond.kernel,
            BOUNDARY=_BOUNDARY_KERNELS[type(bounds)],
            VARIANT=algorithm.variant,
            LOOKAHEAD=algorithm.lookahead,
            REVERSE=algorithm.reverse,
            HAS_GAPS=bounds.valid is not None,
            INPUT_KINDS=tuple(map(_kind, problem.inputs)),
            NEXT_KIND=_kind(getattr(bounds, "next_values", None)),
            N_INPUTS=len(inputs),
            N_FACTORS=len(factors),
            N_OUTPUTS=len(outputs),
            **constants,
        )


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, and so on CPU tensors too."""
    return interpreted(_scan.scan_kernel)


_BOUNDARY_KERNELS = {
    boundaries.Resets: boundaries.resets,
    boundaries.Successors: boundaries.successors,
    boundaries.Unbounded: boundaries.unbounded,
}
