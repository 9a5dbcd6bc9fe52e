"""The scan skeleton on a CPU: one numba loop for every estimator, over the strides of the tensors as they are.

The loop walks time in the direction of the scan and, for each step, a block of rows, so that neighbours in memory are
neighbours in the loop for both layouts. An `Algorithm` and a boundary enter by their type: numba compiles and stores
one loop for each, with their scalar functions inlined. The type carries a digest of the source, so a stored loop is
never older than the code. No fused multiply-add and no reordering: float32 results have a plain loop's bits.

An operand is (elements, row starts, row stride, time stride): element (o, i, t) of it, outer row o, inner row i, lies
at starts[o] + i * row_stride + t * time_stride.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import NativeValue, intrinsic, models, overload, register_jitable, register_model, unbox

from rl_triton import _scalar, boundaries
from rl_triton._algorithm import Algorithm, Expectation, Problem, Taken
from rl_triton._layout import Operand, describe

_EDGE, _VALID, _ENDED = 0, 1, 2
_DIGEST = hashlib.sha256(Path(__file__).read_bytes() + Path(_scalar.__file__).read_bytes()).hexdigest()[:16]
_AS_NUMPY = {"error_model": "numpy"}  # a division by zero is inf or NaN, no exception
_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}

# ---------------------------------------------------------------------------------------------- algorithms as types


class _AlgorithmType(types.Opaque):
    """numba's type of an `Algorithm`: one loop is compiled for each, found again on disk by this name."""

    def __init__(self, name: str, digest: str) -> None:
        self.algorithm = name
        super().__init__(name=f"rl_triton.Algorithm({name}, {digest}, {_DIGEST})")


def _compiled(function: Any) -> Any:
    """The function for numba, and with it the plain functions of this package that it calls."""
    _make_jitable_callees(function)
    return njit(**_AS_NUMPY)(function)


def _make_jitable_callees(function: Any) -> None:
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    for callee in (*named, *enclosed):
        ours = isinstance(callee, FunctionType) and callee.__module__.startswith("rl_triton.estimators")
        if ours and callee not in _jitable:
            _jitable.add(callee)
            _make_jitable_callees(callee)
            register_jitable(**_AS_NUMPY)(callee)


_jitable: set[Any] = set()


class _Tag:
    """What stands for an algorithm in a call of the loop."""

    def __init__(self, algorithm: Algorithm) -> None:
        direction = "" if algorithm.reverse else ", forward"
        name = " ".join((algorithm.name, *algorithm.variant)) + direction
        self._numba_type_ = _AlgorithmType(name, algorithm.digest)
        self.has_target = algorithm.target is not None
        self.coefficients = _compiled(algorithm.coefficients.scalar)
        self.outputs = _compiled(algorithm.outputs.scalar)
        self.beyond = _compiled(algorithm.beyond.scalar)
        if algorithm.target is not None:
            self.target = _compiled(algorithm.target.scalar)
        _tags[self._numba_type_.algorithm] = self


_tags: dict[str, _Tag] = {}
_tag_of = functools.cache(_Tag)
register_model(_AlgorithmType)(models.OpaqueModel)


@unbox(_AlgorithmType)
def _unbox_algorithm(typ, obj, c):
    return NativeValue(c.context.get_dummy_value())


def _coefficients(algorithm, x, v_next, cut, factors):
    raise NotImplementedError("compiled only")


def _outputs(algorithm, x, state, ahead, factors):
    raise NotImplementedError("compiled only")


def _beyond(algorithm, v, zero):
    raise NotImplementedError("compiled only")


@overload(_coefficients)
def _compile_coefficients(algorithm, x, v_next, cut, factors):
    coefficients = _tags[algorithm.algorithm].coefficients
    return lambda algorithm, x, v_next, cut, factors: coefficients(x, v_next, cut, factors)


@overload(_outputs)
def _compile_outputs(algorithm, x, state, ahead, factors):
    outputs = _tags[algorithm.algorithm].outputs
    return lambda algorithm, x, state, ahead, factors: outputs(x, state, ahead, factors)


def _target(algorithm, x, v_next, cut, state_next, factors):
    raise NotImplementedError("compiled only")


@overload(_target)
def _compile_target(algorithm, x, v_next, cut, state_next, factors):
    if not _tags[algorithm.algorithm].has_target:
        return lambda algorithm, x, v_next, cut, state_next, factors: state_next
    target = _tags[algorithm.algorithm].target
    return lambda algorithm, x, v_next, cut, state_next, factors: target(x, v_next, cut, state_next, factors)


@overload(_beyond)
def _compile_beyond(algorithm, v, zero):
    beyond = _tags[algorithm.algorithm].beyond
    return lambda algorithm, v, zero: beyond(v, zero)


for _helper in (_scalar.scaled, _scalar.clipped):
    register_jitable(_helper)


@overload(_scalar.one)
def _compile_one(x):
    one = x
    return lambda x: one(1)


# ------------------------------------------------------------------------------------------------------ operands


def _load(operand, o, i, t, zero):
    raise NotImplementedError("compiled only")


def _flag(operand, o, i, t):
    raise NotImplementedError("compiled only")


def _load_each(operands, o, i, t, zero):
    raise NotImplementedError("compiled only")


def _load_factors(operands, o, i, t, product):
    raise NotImplementedError("compiled only")


def _store_each(operands, o, i, t, y):
    raise NotImplementedError("compiled only")


@intrinsic
def _address(typing_context, array):
    """The data pointer of an array: the loop then counts no references and checks no index."""

    def codegen(context, builder, signature, arguments):
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), codegen


def _addressed(operand):
    """Operands, in tuples of any depth, with addresses in place of arrays."""
    raise NotImplementedError("compiled only")


@overload(_addressed)
def _compile_addressed(operand):
    if isinstance(operand, types.Array):
        return lambda operand: _address(operand)
    if isinstance(operand, types.BaseNamedTuple):
        make = operand.instance_class
        return lambda operand: make(*_addressed_each(operand))
    if isinstance(operand, types.BaseTuple):
        return lambda operand: _addressed_each(operand)
    return lambda operand: operand


def _addressed_each(operands):
    raise NotImplementedError("compiled only")


@overload(_addressed_each)
def _compile_addressed_each(operands):
    if len(operands) == 0:
        return lambda operands: ()
    return lambda operands: (_addressed(operands[0]), *_addressed_each(operands[1:]))


@njit(inline="always", **_AS_NUMPY)
def _index(operand, o, i, t):
    return operand[1][o] + i * operand[2] + t * operand[3]


@overload(_load)
def _compile_load(operand, o, i, t, zero):
    if isinstance(operand, types.NoneType):
        return lambda operand, o, i, t, zero: zero
    dtype = zero
    if len(operand) == 4:
        return lambda operand, o, i, t, zero: dtype(operand[0][_index(operand, o, i, t)])

    def taken(operand, o, i, t, zero):
        action = np.int64(operand[5][0][_index(operand[5], o, i, t)])
        return dtype(operand[0][_index(operand, o, i, t) + action * operand[4]])

    def expectation(operand, o, i, t, zero):
        probs = operand[5]
        at, probs_at = _index(operand, o, i, t), _index(probs, o, i, t)
        total = zero
        for action in range(operand[6]):
            p = dtype(probs[0][probs_at + action * probs[4]])
            if p != 0:
                total += p * dtype(operand[0][at + action * operand[4]])
        return total

    return taken if len(operand) == 6 else expectation


@overload(_flag)
def _compile_flag(operand, o, i, t):
    if isinstance(operand, types.NoneType):
        return lambda operand, o, i, t: False
    return lambda operand, o, i, t: operand[0][_index(operand, o, i, t)] != 0


@overload(_load_each)
def _compile_load_each(operands, o, i, t, zero):
    if len(operands) == 1:
        return lambda operands, o, i, t, zero: (_load(operands[0], o, i, t, zero),)
    return lambda operands, o, i, t, zero: (
        _load(operands[0], o, i, t, zero),
        *_load_each(operands[1:], o, i, t, zero),
    )


@overload(_load_factors)
def _compile_load_factors(operands, o, i, t, product):
    """A missing factor is the product of those before it."""
    if len(operands) == 0:
        return lambda operands, o, i, t, product: ()
    if isinstance(operands[0], types.NoneType):
        return lambda operands, o, i, t, product: (product, *_load_factors(operands[1:], o, i, t, product))

    def load(operands, o, i, t, product):
        factor = _load(operands[0], o, i, t, product)
        return (factor, *_load_factors(operands[1:], o, i, t, product * factor))

    return load


@overload(_store_each)
def _compile_store_each(operands, o, i, t, y):
    def store_one(operands, o, i, t, y):
        operands[0][0][_index(operands[0], o, i, t)] = y[0]

    def store_all(operands, o, i, t, y):
        operands[0][0][_index(operands[0], o, i, t)] = y[0]
        _store_each(operands[1:], o, i, t, y[1:])

    return store_one if len(operands) == 1 else store_all


def _store_zeros(operands, o, i, t, zero):
    raise NotImplementedError("compiled only")


@overload(_store_zeros)
def _compile_store_zeros(operands, o, i, t, zero):
    def store_one(operands, o, i, t, zero):
        operands[0][0][_index(operands[0], o, i, t)] = zero

    def store_all(operands, o, i, t, zero):
        operands[0][0][_index(operands[0], o, i, t)] = zero
        _store_zeros(operands[1:], o, i, t, zero)

    return store_one if len(operands) == 1 else store_all


# ------------------------------------------------------------------------------------- the boundary rules, one step


def _bound(boundary, o, i, t, shift, at_edge, kind, value, closed, zero):
    """The rules of boundaries.py on row i at step t, given the kind and value of what follows it: whether the step is
    valid and cut, V of its successor, V of the next valid row (of the successor at the edge), whether the step replaces
    the state and by what value, and the kind and value that the next step of the walk will see. `shift` is 1 for start
    flags."""
    raise NotImplementedError("compiled only")


def _flagged(boundary, o, i, t, shift, at_edge, zero):
    """Whether row t carries a flag, and V(s'_t) if so."""
    raise NotImplementedError("compiled only")


def _absent(boundary, name):
    return isinstance(boundary.types[boundary.fields.index(name)], types.NoneType)


@njit(inline="always", **_AS_NUMPY)
def _ended(boundary, o, i, t, shift, at_edge):
    if at_edge:
        return _flag(boundary.last_done, o, i, 0)
    return _flag(boundary.terminated, o, i, t + shift)


@overload(_flagged)
def _compile_flagged(boundary, o, i, t, shift, at_edge, zero):
    if _absent(boundary, "truncated"):
        return lambda boundary, o, i, t, shift, at_edge, zero: (_ended(boundary, o, i, t, shift, at_edge), zero)

    def flagged(boundary, o, i, t, shift, at_edge, zero):
        if _ended(boundary, o, i, t, shift, at_edge):
            return True, zero
        if _flag(boundary.truncated, o, i, t):
            return True, _load(boundary.bootstrap_values, o, i, t, zero)
        return False, zero

    return flagged


@overload(_bound)
def _compile_bound(boundary, o, i, t, shift, at_edge, kind, value, closed, zero):
    if boundary.instance_class is boundaries.Unbounded:
        return lambda boundary, o, i, t, shift, at_edge, kind, value, closed, zero: (
            True, closed and at_edge, zero, zero, False, zero, kind, value,
        )  # fmt: skip

    if boundary.instance_class is boundaries.Resets:
        without_valid = _absent(boundary, "valid")

        def forward(boundary, o, i, t, shift, at_edge, kind, value, closed, zero):
            cut = False
            if shift == 1 or not at_edge:
                cut = _flag(boundary.done, o, i, t + shift - 1)
            if without_valid or _flag(boundary.valid, o, i, t):
                return True, cut, zero, zero, False, zero, kind, value
            return False, False, zero, zero, cut, zero, kind, value

        return forward

    has_next_values = not _absent(boundary, "next_values")

    def without_gaps(boundary, o, i, t, shift, at_edge, kind, value, closed, zero):
        flagged, flag_value = _flagged(boundary, o, i, t, shift, at_edge, zero)
        v_open = value
        if has_next_values and not flagged:
            v_open = _load(boundary.next_values, o, i, t, zero)
        v_next = flag_value if flagged else v_open
        v_follow = v_open if at_edge else value
        cut = flagged or (closed and at_edge)
        return True, cut, v_next, v_follow, False, zero, kind, _load(boundary.values, o, i, t, zero)

    def with_gaps(boundary, o, i, t, shift, at_edge, kind, value, closed, zero):
        flagged, flag_value = _flagged(boundary, o, i, t, shift, at_edge, zero)
        if not _flag(boundary.valid, o, i, t):
            if flagged:
                return False, False, zero, zero, True, flag_value, _ENDED, flag_value
            return False, False, zero, zero, False, zero, kind, value
        v_open = value
        if has_next_values and not flagged and kind != _ENDED:
            v_open = _load(boundary.next_values, o, i, t, zero)
        v_next = flag_value if flagged else v_open
        v_follow = v_open if kind == _EDGE else value
        cut = flagged or kind == _ENDED or (closed and kind == _EDGE)
        return True, cut, v_next, v_follow, False, zero, _VALID, _load(boundary.values, o, i, t, zero)

    return without_gaps if _absent(boundary, "valid") else with_gaps


def _is_valid(boundary, o, i, t):
    raise NotImplementedError("compiled only")


@overload(_is_valid)
def _compile_is_valid(boundary, o, i, t):
    if _absent(boundary, "valid"):
        return lambda boundary, o, i, t: True
    return lambda boundary, o, i, t: _flag(boundary.valid, o, i, t)


def _has_next_values(boundary):
    raise NotImplementedError("compiled only")


@overload(_has_next_values)
def _compile_has_next_values(boundary):
    present = not _absent(boundary, "next_values")
    return lambda boundary: present


# --------------------------------------------------------------------------------------------------------- the loops


@njit(nogil=True, **_AS_NUMPY)
def _walk(
    algorithm, reverse, closed, shift, inputs, factors, boundary, initial, outputs, final, zero, one, sizes, block
):
    n_outer, n_inner, n_steps = sizes
    state = np.empty(block, dtype=type(zero))
    target = np.empty(block, dtype=type(zero))
    value = np.empty(block, dtype=type(zero))
    kind = np.empty(block, dtype=np.int64)
    for o in range(n_outer):
        for first in range(0, n_inner, block):
            width = min(block, n_inner - first)
            for j in range(width):
                edge = _load(boundary.last_values, o, first + j, 0, zero)
                state[j] = _beyond(algorithm, edge, zero) if closed else _load(initial[0], o, first + j, 0, zero)
                target[j] = _load(initial[1], o, first + j, 0, zero)
                value[j] = edge
                kind[j] = _EDGE
            for step in range(n_steps):
                t = n_steps - 1 - step if reverse else step
                at_edge = step == 0
                for j in range(width):
                    i = first + j
                    valid, cut, v_next, v_follow, reset, reset_value, kind[j], value[j] = _bound(
                        boundary, o, i, t, shift, at_edge, kind[j], value[j], closed, zero
                    )
                    if valid:
                        x = _load_each(inputs, o, i, t, zero)
                        f = _load_factors(factors, o, i, t, one)
                        a, b = _coefficients(algorithm, x, v_next, cut, f)
                        state_next = state[j]
                        scanned = a if cut or b == 0 else a + b * state_next
                        ahead = (v_next, v_follow, cut, state_next, target[j])
                        target[j] = _target(algorithm, x, v_next, cut, state_next, f)
                        state[j] = scanned
                        _store_each(outputs, o, i, t, _outputs(algorithm, x, scanned, ahead, f))
                    else:
                        if reset:
                            state[j] = _beyond(algorithm, reset_value, zero)
                            target[j] = reset_value
                        _store_zeros(outputs, o, i, t, zero)
            for j in range(width):
                final[0][0][_index(final[0], o, first + j, 0)] = state[j]
                final[1][0][_index(final[1], o, first + j, 0)] = target[j]


def _scan(
    algorithm, reverse, closed, shift, inputs, factors, boundary, initial, outputs, final, zero, one, sizes, block
):
    _walk(
        algorithm,
        reverse,
        closed,
        shift,
        _addressed(inputs),
        _addressed(factors),
        _addressed(boundary),
        _addressed(initial),
        _addressed(outputs),
        _addressed(final),
        zero,
        one,
        sizes,
        block,
    )


@njit(nogil=True, **_AS_NUMPY)
def _look_ahead(shift, n, inputs, factors, boundary, outputs, zero, one, sizes):
    n_outer, n_inner, n_steps = sizes
    for o in range(n_outer):
        for i in range(n_inner):
            edge = _load(boundary.last_values, o, i, 0, zero)
            for t in range(n_steps):
                total, discount, v_beyond, count = zero, one, edge, 0
                if not _is_valid(boundary, o, i, t):
                    _store_zeros(outputs, o, i, t, zero)
                    continue
                for ahead in range(t, n_steps):
                    at_edge = ahead == n_steps - 1
                    if _is_valid(boundary, o, i, ahead):
                        if count == n:
                            if _has_next_values(boundary):
                                total += _scalar.scaled(discount, v_beyond)
                            else:
                                total += _scalar.scaled(discount, _load(boundary.values, o, i, ahead, zero))
                            break
                        total += _scalar.scaled(discount, _load(inputs[0], o, i, ahead, zero))
                        gamma = _load_factors(factors, o, i, ahead, one)[0]
                        vanishes = discount * gamma == 0 and gamma != 0  # NaN must reach across an underflow
                        discount = discount if vanishes else discount * gamma
                        count += 1
                        if _has_next_values(boundary):
                            v_beyond = _load(boundary.next_values, o, i, ahead, zero)
                    flagged, value = _flagged(boundary, o, i, ahead, shift, at_edge, zero)
                    if flagged:
                        total += _scalar.scaled(discount, value)
                        break
                    if at_edge:
                        total += _scalar.scaled(discount, v_beyond)
                outputs[0][0][_index(outputs[0], o, i, t)] = total


def _window(shift, n, inputs, factors, boundary, outputs, zero, one, sizes):
    _look_ahead(
        shift,
        n,
        _addressed(inputs),
        _addressed(factors),
        _addressed(boundary),
        _addressed(outputs),
        zero,
        one,
        sizes,
    )


try:
    _scan = njit(cache=True, nogil=True, **_AS_NUMPY)(_scan)
    _window = njit(cache=True, nogil=True, **_AS_NUMPY)(_window)
except RuntimeError:  # numba found no directory to store the loops in: compile them anew in each process
    _scan = njit(nogil=True, **_AS_NUMPY)(_scan)
    _window = njit(nogil=True, **_AS_NUMPY)(_window)

_ROW_BLOCK = 256


def _elements(x: torch.Tensor) -> np.ndarray:
    """The memory under a tensor as a flat array, without a copy."""
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        x = x.as_strided((extent,), (1,))
    flat = x.numpy().reshape(-1)
    return flat.view(np.uint8) if x.dtype is torch.bool else flat


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


@functools.lru_cache(maxsize=1024)
def _constant(x: float, dtype: Any, n_outer: int) -> tuple:
    """An operand that reads x everywhere."""
    return np.array([x], dtype), _origins(n_outer), 0, 0


def _widened(source: Any) -> Any:
    """16-bit floats as float32: numba has no arithmetic for them."""
    if isinstance(source, torch.Tensor):
        return source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
    if isinstance(source, (Expectation, Taken)):
        return type(source)(*map(_widened, source))
    return source


def _unified(boundary: Any, time_dim: int) -> Any:
    """The same boundary in fewer forms, since each form is a loop to compile: the last step's flag has a slot of its
    own, and a truncated step's value comes from one slot."""
    if not isinstance(boundary, boundaries.Successors):
        return boundary
    if boundary.last_done is None:
        boundary = boundary._replace(last_done=boundary.terminated.select(time_dim, -1))
    if boundary.truncated is not None and boundary.bootstrap_values is None:
        boundary = boundary._replace(bootstrap_values=boundary.next_values)
    return boundary


def _completed(boundary: Any, zero: Any, never: Any, always: Any) -> Any:
    """Operands for what is absent: no edge value, no values; and where a truncated or an invalid step can be, both."""
    boundary = boundary._replace(last_values=boundary.last_values or zero)
    if isinstance(boundary, boundaries.Successors):
        boundary = boundary._replace(values=boundary.values or zero)
        if boundary.truncated or boundary.valid:
            boundary = boundary._replace(
                truncated=boundary.truncated or never,
                bootstrap_values=boundary.bootstrap_values or zero,
                valid=boundary.valid or always,
            )
    return boundary


def run(problem: Problem) -> None:
    """Run the scan on the calling thread. Fills `problem.outputs` and `problem.final`."""
    algorithm, number = problem.algorithm, _NUMPY[problem.dtype]
    boundary = _unified(problem.boundary, problem.time_dim)
    narrow = problem.outputs[0].dtype in (torch.float16, torch.bfloat16)
    written = tuple(torch.empty_like(y, dtype=torch.float32) for y in problem.outputs) if narrow else problem.outputs
    given = (problem.inputs, problem.factors, tuple(boundary), problem.initial)
    groups = (*(tuple(map(_widened, group)) for group in given), written, problem.final)
    layout = describe(problem.shape, problem.time_dim, groups)
    n_inner = layout.sizes[0]
    n_outer = layout.n_rows // n_inner

    def argument(source: Any) -> Any:
        if source is None:
            return None
        if isinstance(source, Operand):
            starts = _row_starts(layout.sizes, source.row_strides)
            return _elements(source.tensor), starts, source.row_strides[0], source.time_stride
        first, second = map(argument, source)
        if isinstance(source, Taken):
            return (*first, source.table.action_stride, second)
        n_actions = source.values.tensor.shape[-1]
        return (*first, source.values.action_stride, (*second, source.probs.action_stride), n_actions)

    inputs, factors, flags, initial, outputs, final = (tuple(map(argument, group)) for group in layout.groups)
    factors = tuple(
        _constant(f, number, n_outer) if isinstance(f, float) else operand
        for operand, f in zip(factors, problem.factors, strict=True)
    )
    zero = _constant(0.0, number, n_outer)
    scratch = np.empty(1, number), _origins(n_outer), 0, 0
    never, always = _constant(0, np.uint8, n_outer), _constant(1, np.uint8, n_outer)
    boundary = _completed(type(boundary)(*flags), zero, never, always)
    shift = int(problem.boundary.start)
    sizes = (n_outer, n_inner, layout.n_steps)
    if problem.window is not None:
        _window(shift, problem.window, inputs, factors, boundary, outputs, number(0), number(1), sizes)
    else:
        row_stride, time_stride = layout.groups[4][0].row_strides[0], layout.groups[4][0].time_stride
        _scan(
            _tag_of(algorithm),
            algorithm.reverse,
            problem.initial[0] is None,
            shift,
            inputs,
            factors,
            boundary,
            tuple(x or zero for x in initial),
            outputs,
            tuple(x or scratch for x in final),
            number(0),
            number(1),
            sizes,
            min(n_inner, _ROW_BLOCK) if row_stride < time_stride else 1,
        )
    if narrow:
        for y, wide in zip(problem.outputs, written, strict=True):
            y.copy_(wide)
