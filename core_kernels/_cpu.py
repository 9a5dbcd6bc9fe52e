"""The scan skeleton on a CPU: one numba loop for every estimator, over the strides of the tensors as they are.

The loop walks time in the direction of the scan and, for each step, a block of rows, so that neighbours in memory are
neighbours in the loop for both layouts. An `Algorithm` and a boundary enter by their type: numba compiles and stores
one loop for each, with their scalar functions inlined. No fused multiply-add and no reordering: float32 results have a
plain loop's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from rl_triton import _plan, _scalar, boundaries
from rl_triton._algorithm import Expectation, Problem, Taken
from rl_triton._cpu_forms import (
    AS_NUMPY,
    EDGE,
    Place,
    address,
    addressed,
    beyond_of,
    bound,
    coefficients_of,
    flagged_row,
    index,
    is_valid,
    keep_kind,
    keep_target,
    load,
    load_each,
    load_factors,
    outputs_of,
    reads_next_values,
    store_each,
    tag_of,
    target_of,
    where,
    where_each,
    zeros_of,
)
from rl_triton._layout import Operand, describe

_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


@njit(nogil=True, **AS_NUMPY)
def _walk(
    algorithm, reverse, closed, shift, inputs, factors, boundary, initial, outputs, final, zero, one, sizes, block
):
    n_outer, n_inner, n_steps = sizes
    zeros = zeros_of(outputs, zero)
    # Addresses, so that no index is checked for being negative.
    states, targets = np.empty(block, dtype=type(zero)), np.empty(block, dtype=type(zero))
    values, kinds = np.empty(block, dtype=type(zero)), np.empty(block, dtype=np.int32)
    state, target, value, kind = address(states), address(targets), address(values), address(kinds)
    for o in range(n_outer):
        for first in range(0, n_inner, block):
            width = min(block, n_inner - first)
            for j in range(width):
                edge = load(boundary.last_values, o, first + j, 0, zero)
                state[j] = beyond_of(algorithm, edge, zero) if closed else load(initial[0], o, first + j, 0, zero)
                target[j] = load(initial[1], o, first + j, 0, zero)
                value[j] = edge
                kind[j] = EDGE
            for step in range(n_steps):
                t = n_steps - 1 - step if reverse else step
                at_edge, at_end = step == 0, step == n_steps - 1
                flag_t = min(t + shift, n_steps - 1) if reverse else t + shift - 1
                for j in range(width):
                    i = first + j
                    valid, cut, v_next, v_follow, reset, reset_value, kind_before, value_before = bound(
                        boundary, o, i, t, flag_t, at_edge, at_end, kind[j], value[j], closed, zero
                    )
                    keep_kind(boundary, kind, j, kind_before)
                    value[j] = value_before
                    x = load_each(valid, inputs, o, i, t, zero)
                    f = load_factors(factors, o, i, t, one)
                    a, b = coefficients_of(algorithm, x, v_next, cut, f)
                    state_next, target_next = state[j], target[j]
                    scanned = where(cut | (b == 0), a, a + b * state_next)
                    ahead = (v_next, v_follow, cut, state_next, target_next)
                    results = outputs_of(algorithm, x, scanned, ahead, f)
                    store_each(outputs, o, i, t, where_each(valid, results, zeros))
                    follows = target_of(algorithm, x, v_next, cut, state_next, f)
                    keep_target(algorithm, target, j, where(valid, follows, where(reset, reset_value, target_next)))
                    beyond = beyond_of(algorithm, reset_value, zero)
                    state[j] = where(valid, scanned, where(reset, beyond, state_next))
            for j in range(width):
                final[0][0][index(final[0], o, first + j, 0)] = state[j]
                final[1][0][index(final[1], o, first + j, 0)] = target[j]


def _scan(
    algorithm,
    reverse,
    closed,
    shift,
    inputs,
    factors,
    boundary,
    initial,
    outputs,
    final,
    zero,
    one,
    sizes,
    block,
    places,
):
    _walk(
        algorithm,
        reverse,
        closed,
        shift,
        addressed(inputs, places),
        addressed(factors, places),
        addressed(boundary, places),
        addressed(initial, places),
        addressed(outputs, places),
        addressed(final, places),
        zero,
        one,
        sizes,
        block,
    )


@njit(nogil=True, **AS_NUMPY)
def _look_ahead(shift, n, inputs, factors, boundary, outputs, zero, one, sizes):
    n_outer, n_inner, n_steps = sizes
    zeros = zeros_of(outputs, zero)
    for o in range(n_outer):
        for i in range(n_inner):
            edge = load(boundary.last_values, o, i, 0, zero)
            for t in range(n_steps):
                total, discount, v_beyond, count = zero, one, edge, 0
                if not is_valid(boundary, o, i, t):
                    store_each(outputs, o, i, t, zeros)
                    continue
                for ahead in range(t, n_steps):
                    at_edge = ahead == n_steps - 1
                    if is_valid(boundary, o, i, ahead):
                        if count == n:
                            if reads_next_values(boundary):
                                total += _scalar.scaled(discount, v_beyond)
                            else:
                                total += _scalar.scaled(discount, load(boundary.values, o, i, ahead, zero))
                            break
                        total += _scalar.scaled(discount, load(inputs[0], o, i, ahead, zero))
                        gamma = load_factors(factors, o, i, ahead, one)[0]
                        vanishes = discount * gamma == 0 and gamma != 0  # NaN must reach across an underflow
                        discount = discount if vanishes else discount * gamma
                        count += 1
                        if reads_next_values(boundary):
                            v_beyond = load(boundary.next_values, o, i, ahead, zero)
                    flag_t = min(ahead + shift, n_steps - 1)
                    flagged, value = flagged_row(boundary, o, i, ahead, flag_t, at_edge, zero)
                    if flagged:
                        total += _scalar.scaled(discount, value)
                        break
                    if at_edge:
                        total += _scalar.scaled(discount, v_beyond)
                outputs[0][0][index(outputs[0], o, i, t)] = total


def _window(shift, n, inputs, factors, boundary, outputs, zero, one, sizes, places):
    _look_ahead(
        shift,
        n,
        addressed(inputs, places),
        addressed(factors, places),
        addressed(boundary, places),
        addressed(outputs, places),
        zero,
        one,
        sizes,
    )


try:
    _scan = njit(cache=True, nogil=True, **AS_NUMPY)(_scan)
    _window = njit(cache=True, nogil=True, **AS_NUMPY)(_window)
except RuntimeError:  # numba found no directory to store the loops in: compile them anew in each process
    _scan = njit(nogil=True, **AS_NUMPY)(_scan)
    _window = njit(nogil=True, **AS_NUMPY)(_window)

_ROW_BLOCK = 2048
# Of rows whose steps are neighbours in memory: enough that one row's step does not wait for that of another, and few
# enough that their cache lines stay where they are until the walk has used them up, whatever power of two lies between.
_STRIDED_ROW_BLOCK = 8


# What the loops read elements as, by dtype.
_KINDS: dict[torch.dtype, Any] = {
    torch.bool: np.uint8(0),
    torch.uint8: np.uint8(0),
    torch.int8: np.int8(0),
    torch.int16: np.int16(0),
    torch.int32: np.int32(0),
    torch.int64: np.int64(0),
    torch.uint16: np.uint16(0),
    torch.uint32: np.uint32(0),
    torch.uint64: np.uint64(0),
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
}


class _Table:
    """The addresses that a loop reads and writes at, and what they are addresses in."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.memory: list[Any] = []  # alive as long as the table

    def place(self, memory: torch.Tensor | np.ndarray) -> Place:
        if isinstance(memory, torch.Tensor):
            address, kind = memory.data_ptr(), _KINDS[memory.dtype]
        else:
            address, kind = memory.ctypes.data, memory.dtype.type(0)
        self.addresses.append(address)
        self.memory.append(memory)
        return Place(len(self.addresses) - 1, kind)


@functools.lru_cache(maxsize=1024)
def _row_starts(sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Offsets of the outer rows, all axes but the innermost."""
    starts = _origins(1)
    for size, stride in zip(sizes[1:], strides[1:], strict=True):
        starts = (np.arange(size, dtype=np.int64)[:, None] * stride + starts).reshape(-1)
    return starts


@functools.lru_cache(maxsize=64)
def _origins(n_outer: int) -> np.ndarray:
    return np.zeros(n_outer, dtype=np.int64)


@functools.lru_cache(maxsize=256)
def _same(x: float, n: int, dtype: Any) -> np.ndarray:
    return np.full(n, x, dtype)


def _widened(source: Any) -> Any:
    """16-bit floats as float32: numba has no arithmetic for them."""
    if isinstance(source, torch.Tensor):
        return source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
    if isinstance(source, (Expectation, Taken)):
        return type(source)(*map(_widened, source))
    return source


def _unified(boundary: Any, time_dim: int) -> Any:
    """The same boundary in fewer forms, since each form is a loop to compile: the last step's flag has a slot of its
    own."""
    if not isinstance(boundary, (boundaries.Successors, boundaries.Predecessors)):
        return boundary
    if boundary.last_done is None:
        boundary = boundary._replace(last_done=boundary.terminated.select(time_dim, -1))
    return boundary


def _completed(boundary: Any, zero: Any, never: Any, always: Any) -> Any:
    """Operands for what is absent: no edge value, no values; and where a truncated or an invalid step can be, both."""
    boundary = boundary._replace(last_values=boundary.last_values or zero)
    if isinstance(boundary, boundaries.Successors):
        boundary = boundary._replace(values=boundary.values or zero)
        if boundary.truncated or boundary.valid:
            boundary = boundary._replace(
                truncated=boundary.truncated or never,
                bootstrap_values=None if boundary.next_values else boundary.bootstrap_values or zero,
                valid=boundary.valid or always,
            )
    return boundary


class PlannedLoop:
    """A compiled loop with all its arguments but the addresses in place."""

    def __init__(self, loop: Any, arguments: tuple[Any, ...], table: _Table, tag: Any, places: _plan.Places) -> None:
        self.arguments = arguments
        self.kept = loop, tag, [x for x in table.memory if isinstance(x, np.ndarray)]
        # Past numba's dispatcher, which looks at the type of every argument of every call.
        signature = tuple(map(loop.typeof_pyval, (*arguments, np.array(table.addresses, np.int64))))
        self.loop = loop.overloads[signature].entry_point
        tensors = *places.tensors, *places.made
        if any(x.dtype in (torch.float16, torch.bfloat16) for x in tensors):
            raise _plan.NoPlanError("16-bit tensors are widened by a copy")
        spans = [(x.data_ptr(), _plan.span(x)) for x in tensors]
        self.slots = [self._found(x, spans, places) for x in table.memory]
        """(position among the call's addresses, bytes from there)"""

    @staticmethod
    def _found(memory: Any, spans: list[tuple[int, int]], places: _plan.Places) -> tuple[int, int]:
        if isinstance(memory, np.ndarray):
            return len(spans), memory.ctypes.data  # behind the addresses stands a zero
        start = memory.data_ptr()
        around = [i for i, (first, n_bytes) in enumerate(spans) if first <= start < first + n_bytes]
        given = [i for i in around if i < len(places.tensors)]  # a given result is among both
        if not around:
            raise _plan.NoPlanError("an address that is in none of the arguments")
        found = (given or around)[0]
        places.ties.extend((i, found, spans[i][0] - spans[found][0]) for i in given[1:])
        return found, start - spans[found][0]

    def write(self, code: _plan.Code, addresses: list[str], made: list[str]) -> None:
        places = *addresses, *(f"{x}.data_ptr()" for x in made), "0"
        code.add(f"{code.name(self)}(({', '.join(places)}))")

    def __call__(self, places: tuple[int, ...]) -> None:
        """Run it on the addresses of the call's tensors and of those that it made, with a zero behind."""
        self.loop(*self.arguments, np.array([places[i] + at for i, at in self.slots], np.int64))


def kept_loop(call: Callable[[], Any], tensors: list[torch.Tensor]) -> PlannedLoop | None:
    """Make a call of an operation's ordinary path on CPU tensors and keep its loop; None where that cannot be kept.

    For whoever calls with the same options and layouts again and again, and makes sure of that: the loop checks
    nothing. It is called with the addresses of `tensors`, which are all that the call reads and writes, and a zero.
    """
    with _plan.recording() as launches:
        call()
    places = _plan.Places(tensors, [], [])
    try:
        ((prepare,),) = (launch.prepare for launch in launches)
        loop = prepare(places)
    except _plan.NO_PLAN:
        return None
    return None if places.ties else loop


def _argument(source: Any, table: _Table, sizes: tuple[int, ...]) -> Any:
    """An operand as the loops read it."""
    if source is None:
        return None
    if isinstance(source, Operand):
        starts = _row_starts(sizes, source.row_strides)
        return table.place(source.tensor), starts, source.row_strides[0], source.time_stride
    first, second = (_argument(x, table, sizes) for x in source)
    if isinstance(source, Taken):
        return (*first, source.table.action_stride, second)
    n_actions = source.values.tensor.shape[-1]
    return (*first, source.values.action_stride, (*second, source.probs.action_stride), n_actions)


def run(problem: Problem) -> None:
    """Run the scan on the calling thread. Fills `problem.outputs` and `problem.final`."""
    algorithm, number = problem.algorithm, _NUMPY[problem.dtype]
    boundary = _unified(problem.boundary, problem.time_dim)
    narrow = problem.written[0].dtype in (torch.float16, torch.bfloat16)
    written = problem.outputs
    if narrow:
        written = tuple([None if y is None else torch.empty_like(y, dtype=torch.float32) for y in written])
    given = (problem.inputs, problem.factors, tuple(boundary), problem.initial)
    groups = (*(tuple(map(_widened, group)) for group in given), written, problem.final)
    layout = describe(problem.shape, problem.time_dim, groups)
    n_inner = layout.sizes[0]
    n_outer = layout.n_rows // n_inner

    table = _Table()

    def each_step(rows: np.ndarray) -> tuple:
        """The operand that is the same at every step. It has a number a row though all be the same: what lies a stride
        of one apart, a compiler can read for several rows at once."""
        return table.place(rows), _origins(n_outer), 1, 0

    inputs, factors, flags, initial, outputs, final = (
        tuple(_argument(x, table, layout.sizes) for x in group) for group in layout.groups
    )
    factors = tuple(
        number(f) if isinstance(f, float) else operand for operand, f in zip(factors, problem.factors, strict=True)
    )
    zero = each_step(_same(0.0, n_inner, number))
    never, always = (each_step(_same(x, n_inner, np.uint8)) for x in (0, 1))
    boundary = _completed(type(boundary)(*flags), zero, never, always)
    shift = int(problem.boundary.start)
    sizes = (n_outer, n_inner, layout.n_steps)
    loop: Any
    arguments: tuple[Any, ...]
    if problem.window is not None:
        loop, tag = _window, None
        arguments = (shift, problem.window, inputs, factors, boundary, outputs, number(0), number(1), sizes)
    else:
        loop, tag = _scan, tag_of(algorithm)
        first = next(y for y in layout.groups[4] if y is not None)
        row_stride, time_stride = first.row_strides[0], first.time_stride
        block = min(n_inner, _ROW_BLOCK if row_stride < time_stride else _STRIDED_ROW_BLOCK)
        unused = each_step(np.empty(n_inner, number))  # for what nobody asked for
        inputs, initial = tuple(x or zero for x in inputs), tuple(x or zero for x in initial)
        final = tuple(x or unused for x in final)
        # Each has its own: several rows at once are worked on only where no two results share memory.
        outputs = tuple(x or each_step(np.empty(n_inner, number)) for x in outputs)
        start = (tag, algorithm.reverse, problem.initial[0] is None, shift)
        operands = (inputs, factors, boundary, initial, outputs, final)
        arguments = (*start, *operands, number(0), number(1), sizes, block)
    loop(*arguments, np.array(table.addresses, np.int64))
    if narrow:
        for y, wide in zip(problem.outputs, written, strict=True):
            if y is not None and wide is not None:
                y.copy_(wide)
    else:
        prepare = functools.partial(PlannedLoop, loop, arguments, table, tag)
        _plan.record(_plan.Launch(problem.written, (), (prepare,)))
