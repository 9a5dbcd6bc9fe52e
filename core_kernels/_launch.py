"""From a validated problem to a kernel launch: configuration, arguments, grid."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from rl_triton import _config, _expected, _plan, _scan, _tile, _window, boundaries
from rl_triton._algorithm import Expectation, Problem, Taken
from rl_triton._direct import DirectKernel
from rl_triton._layout import Layout, Operand, describe
from rl_triton._triton import interpreted, tl, triton

_OVERHANG = 1 << 16  # more than a tile is long or wide


@functools.lru_cache(maxsize=4096)
def float_parts(x: float) -> tuple[float, float, float]:
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
    return joined if isinstance(source, Taken) else (*joined, second.action_stride)


def _group(operand: Operand) -> int:
    """How many neighbouring actions can be read at once: a power of two, at most 16 bytes."""
    x = operand.tensor
    if operand.action_stride != 1 or x.data_ptr() % 16:
        return 1
    return math.gcd(16 // x.element_size(), x.shape[-1], operand.time_stride, *operand.row_strides)


def _has_actions(bounds: Any) -> bool:
    """Whether the values of successors are reduced over an action axis as they are loaded."""
    return isinstance(getattr(bounds, "next_values", None), Expectation)


def _reach(layout: Layout) -> int:
    """An upper bound of every index and of every offset that is read. (Where a tile hangs over, offsets may wrap.)"""

    def of(source: Any) -> int:
        if isinstance(source, Operand):
            x = source.tensor
            return sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
        return sum(map(of, source)) if source is not None else 0

    return max(layout.n_rows + layout.n_steps + _OVERHANG, *(of(x) for group in layout.groups for x in group))


def _per_step(layout: Layout) -> tuple[int, int]:
    """Of how many tensors that hold numbers a step reads an element, and of how many tensors it reads or writes one."""
    *read, outputs, _, flags = layout.groups
    reads = [x for group in (*read, flags) for x in group if getattr(x, "time_stride", 1) != 0 and x is not None]
    numbers = [x for x in reads if not (isinstance(x, Operand) and x.tensor.dtype == torch.bool)]
    return len(numbers), len(reads) + sum(y is not None for y in outputs)


def _shared_with_inputs(problem: Problem) -> int:
    """Which input of the scan the boundary's `values` are, so that they are loaded once; -1: none."""
    values = getattr(problem.boundary, "values", None)
    if values is None or problem.window is not None:
        return -1
    return next((i for i, x in enumerate(problem.inputs) if x is values), -1)


def _reduced(problem: Problem) -> tuple[Problem, tuple[torch.Tensor, ...], tuple[Callable[..., Any], ...]]:
    """(the problem, scratch memory, how to prepare launches): an expectation is reduced first, unless one load takes
    all actions of a step, which the scan can do."""
    source = problem.boundary.next_values
    (operand,) = describe(problem.shape, problem.time_dim, ((source,),)).groups[0]
    actions, group = source.values.shape[-1], min(_group(operand.values), _group(operand.probs))
    if actions in (1, group):
        return problem, (), ()
    reduced = torch.empty_like(problem.written[0], dtype=problem.dtype)
    layout = describe(problem.shape, problem.time_dim, ((source, reduced),))
    operand, result = layout.groups[0]
    neighbours = operand.values.action_stride == operand.probs.action_stride == 1
    block, rows, time, num_warps = _config.choose_expected(
        actions if neighbours else 1, layout.n_rows, layout.n_steps, result.row_strides[0] == 1
    )
    given = {
        "operand": _argument(operand),
        "result": _argument(result),
        "sizes": layout.sizes,
        "n_rows": layout.n_rows,
        "T": layout.n_steps,
        "ACTIONS": actions,
        "BLOCK": block,
        "GROUP": group,
        "DIMS": len(layout.sizes),
        "DTYPE": tl.float64 if problem.dtype == torch.float64 else tl.float32,
        "INDEX": tl.int32 if _reach(layout) < 2**31 else tl.int64,
        "ROWS": rows,
        "TIME": time,
    }
    blocks = triton.cdiv(layout.n_rows, rows) * triton.cdiv(layout.n_steps, time)
    with on(reduced.device):
        launched = _expected.expected_kernel[(blocks,)](**given, num_warps=num_warps, enable_fp_fusion=False)
    problem = problem._replace(boundary=problem.boundary._replace(next_values=reduced))
    return problem, (reduced,), (functools.partial(DirectKernel, launched, given, blocks, reduced.device),)


def run(problem: Problem) -> None:
    """Launch the scan on the current stream of the tensors' device. Fills `problem.outputs` and `problem.final`."""
    scratch: tuple[torch.Tensor, ...] = ()
    prepared: tuple[Callable[..., Any], ...] = ()
    if _has_actions(problem.boundary):
        problem, scratch, prepared = _reduced(problem)
    algorithm, bounds = problem.algorithm, problem.boundary
    shared = _shared_with_inputs(problem)
    # `valid` concerns the skeleton too, and has a place of its own.
    rules = [x for name, x in bounds._asdict().items() if name not in ("valid", "start")]
    if shared >= 0:
        rules[_VALUES_SLOT] = None
    layout = describe(
        problem.shape,
        problem.time_dim,
        (
            problem.inputs,
            problem.factors,
            tuple(rules),
            problem.initial,
            problem.outputs,
            problem.final,
            (bounds.valid,),
        ),
    )
    *groups, (valid,) = (tuple(map(_argument, group)) for group in layout.groups)
    inputs, factors, boundary, initial, outputs, final = groups
    factors = tuple(
        (operand, float_parts(f) if isinstance(f, float) else None)
        for operand, f in zip(factors, problem.factors, strict=True)
    )
    first = next(y for y in layout.groups[4] if y is not None)
    rows_adjacent = first.row_strides[0] == 1 and first.time_stride != 1
    near = problem.window is not None and problem.window <= _window.NEAR and valid is None
    shape = layout.n_rows, layout.n_steps, rows_adjacent
    plain = valid is None and problem.window is None
    splits = plain and algorithm.lookahead < 2
    weight = _config.weigh(algorithm.lookahead if algorithm.reverse else 0, *_per_step(layout), plain)
    chosen = _config.choose_near(*shape) if near else _config.choose(*shape, weight, splits)
    config = _config.forced() or chosen
    # Triton 3.6 forgets constants (strides of 1) in the inner tuples of a tuple, and 3.5 refuses a tuple of tuples of
    # one kind, unless a constant of its own follows them.
    arguments: dict[str, Any] = {
        "inputs": (*inputs, None),
        "factors": (*factors, None),
        "boundary": (*boundary, None),
        "outputs": (*outputs, None),
        "sizes": layout.sizes,
        "n_rows": layout.n_rows,
        "T": layout.n_steps,
        "START": bounds.start,
        "DIMS": len(layout.sizes),
        "DTYPE": tl.float64 if problem.dtype == torch.float64 else tl.float32,
        "INDEX": tl.int32 if _reach(layout) < 2**31 else tl.int64,
        "ROWS": config.rows,
    }
    blocks = triton.cdiv(layout.n_rows, config.rows)
    tile = {"CHUNKS": config.chunks, "STEPS": config.steps, "AXIS": config.axis}
    tile["WHOLE"] = layout.n_rows % config.rows == 0 and layout.n_steps % (config.chunks * config.steps) == 0
    if problem.window is not None:
        time = config.chunks * config.steps
        blocks *= triton.cdiv(layout.n_steps, time)
        if near:
            kernel = _window.near_kernel
            arguments |= tile | {"N": problem.window}
        else:
            kernel = _window.window_kernel
            arguments |= {"valid_flags": valid, "n": problem.window, "TIME": time}
    else:
        kernel = _scan.scan_kernel
        fetch_kernel, rules_kernel = _BOUNDARY_KERNELS[type(bounds)]
        arguments |= tile | {
            "valid_flags": valid,
            "initial": (*initial, None),
            "final": (*final, None),
            "COEFFICIENTS": algorithm.coefficients.kernel,
            "TARGET": None if algorithm.target is None else algorithm.target.kernel,
            "OUTPUTS": algorithm.outputs.kernel,
            "BEYOND": algorithm.beyond.kernel,
            "BOUNDARY": rules_kernel,
            "FETCH_BOUNDARY": fetch_kernel,
            "VARIANT": algorithm.code,
            "LOOKAHEAD": algorithm.lookahead,
            "REVERSE": algorithm.reverse,
            "INPUT_KINDS": sum(
                (_tile.TAKEN if isinstance(x, Taken) else _tile.PLAIN).value * _tile.KINDS.value**i
                for i, x in enumerate(layout.groups[0])
            ),
            "ACTIONS": bounds.next_values.values.shape[-1] if _has_actions(bounds) else 0,
            "VALUES": shared,
            "N_INPUTS": len(problem.inputs),
            "N_FACTORS": len(problem.factors),
            "N_OUTPUTS": len(problem.outputs),
            "N_STEPWISE": next(
                (i for i, y in enumerate(problem.outputs) if _per_row(y, problem)), len(problem.outputs)
            ),
            "PREFETCH": config.prefetch,
        }
    device = problem.written[0].device
    phases: tuple[dict[str, Any], ...] = ({},)
    if problem.window is None:
        tiles = triton.cdiv(layout.n_steps, config.chunks * config.steps)
        # Across the seam of two parts goes a state, but no target, and nothing of what rows that are no transition say.
        parts = config.parts if splits else 1
        tiles_a_part = triton.cdiv(tiles, parts)
        parts = triton.cdiv(tiles, tiles_a_part)
        blocks *= parts
        slots = triton.next_power_of_2(parts)
        if parts > 1:
            maps = torch.empty(4, slots, layout.n_rows, dtype=problem.dtype, device=device)
            scratch += (maps,)
            phases = ({"COMPOSING": True}, {})
        arguments |= {
            "maps": maps if parts > 1 else None,
            "n_parts": parts,
            "tiles_a_part": tiles_a_part,
            "PARTS": slots,
            "COMPOSING": False,
        }
    with on(device):
        for phase in phases:
            given = arguments | phase
            # Contraction would make the bits depend on the launch configuration and on the Triton version.
            launched = kernel[(blocks,)](**given, num_warps=config.num_warps, enable_fp_fusion=False)
            prepared += (functools.partial(DirectKernel, launched, given, blocks, device),)
    if not interpreted(kernel):
        _plan.record(_plan.Launch(problem.written, scratch, prepared))


def _per_row(output: torch.Tensor | None, problem: Problem) -> bool:
    return output is not None and output.dim() < len(problem.shape)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where Triton's launcher must find the tensors' device to be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, and so on CPU tensors too."""
    return interpreted(_scan.scan_kernel)


_VALUES_SLOT = 5  # of `values` among the fields of `Successors`, which is also its place in the kernel's boundary
_BOUNDARY_KERNELS = {
    boundaries.Predecessors: (boundaries.fetch_predecessors, boundaries.predecessors),
    boundaries.Resets: (boundaries.fetch_resets, boundaries.resets),
    boundaries.Successors: (boundaries.fetch_successors, boundaries.successors),
    boundaries.Unbounded: (boundaries.fetch_nothing, boundaries.unbounded),
}
