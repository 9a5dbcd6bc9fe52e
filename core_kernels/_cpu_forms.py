"""What the CPU loops are made of: algorithms, operands and boundary rules, in the form that numba compiles.

Each helper is a function that numba picks an implementation for by the types of its arguments: an absent operand costs
nothing, a tuple of operands is unrolled, and an `Algorithm` or a boundary brings its own code. The type of an algorithm
carries a digest of the source, so a loop stored on disk is never older than the code.

An operand is a number, or (place, row starts, row stride, time stride): element (o, i, t) of it, outer row o, inner row
i, lies at starts[o] + i * row_stride + t * time_stride from its place. One with an action axis goes on with the stride
of that axis and the operand that it is read with. Places are numbers in a table of addresses, the one argument that
changes from call to call.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import NativeValue, intrinsic, models, overload, register_jitable, register_model, unbox

from rl_triton import _scalar, boundaries
from rl_triton._algorithm import Algorithm

AS_NUMPY = {"error_model": "numpy"}  # a division by zero is inf or NaN, no exception
# What follows a row: the window's edge, a valid row, a flag on a row that is not valid. For `Predecessors` the flag is
# the row's own, and tells two kinds apart.
EDGE, VALID, ENDED, TRUNCATED = map(np.int32, range(4))
_SOURCES = (Path(__file__), Path(__file__).with_name("_cpu.py"), Path(_scalar.__file__))
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]

# ---------------------------------------------------------------------------------------------- algorithms as types


class _AlgorithmType(types.Opaque):
    """numba's type of an `Algorithm`: one loop is compiled for each, found again on disk by this name."""

    def __init__(self, name: str, digest: str) -> None:
        self.algorithm = name
        super().__init__(name=f"rl_triton.Algorithm({name}, {digest}, {_DIGEST})")


def _compiled(function: Any) -> Any:
    """The function for numba, and with it the plain functions of this package that it calls."""
    _make_jitable_callees(function)
    return njit(**AS_NUMPY)(function)


def _make_jitable_callees(function: Any) -> None:
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    for callee in (*named, *enclosed):
        ours = isinstance(callee, FunctionType) and callee.__module__.startswith("rl_triton.estimators")
        if ours and callee not in _jitable:
            _jitable.add(callee)
            _make_jitable_callees(callee)
            register_jitable(**AS_NUMPY)(callee)


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
tag_of = functools.cache(_Tag)
register_model(_AlgorithmType)(models.OpaqueModel)


@unbox(_AlgorithmType)
def _unbox_algorithm(typ, obj, c):
    return NativeValue(c.context.get_dummy_value())


def coefficients_of(algorithm, x, v_next, cut, factors):
    raise NotImplementedError("compiled only")


def outputs_of(algorithm, x, state, ahead, factors):
    raise NotImplementedError("compiled only")


def beyond_of(algorithm, v, zero):
    raise NotImplementedError("compiled only")


@overload(coefficients_of)
def _compile_coefficients(algorithm, x, v_next, cut, factors):
    coefficients = _tags[algorithm.algorithm].coefficients
    return lambda algorithm, x, v_next, cut, factors: coefficients(x, v_next, cut, factors)


@overload(outputs_of)
def _compile_outputs(algorithm, x, state, ahead, factors):
    outputs = _tags[algorithm.algorithm].outputs
    return lambda algorithm, x, state, ahead, factors: outputs(x, state, ahead, factors)


def target_of(algorithm, x, v_next, cut, state_next, factors):
    raise NotImplementedError("compiled only")


@overload(target_of)
def _compile_target(algorithm, x, v_next, cut, state_next, factors):
    if not _tags[algorithm.algorithm].has_target:
        return lambda algorithm, x, v_next, cut, state_next, factors: state_next
    target = _tags[algorithm.algorithm].target
    return lambda algorithm, x, v_next, cut, state_next, factors: target(x, v_next, cut, state_next, factors)


@overload(beyond_of)
def _compile_beyond(algorithm, v, zero):
    beyond = _tags[algorithm.algorithm].beyond
    return lambda algorithm, v, zero: beyond(v, zero)


for _helper in (_scalar.scaled, _scalar.clipped):
    register_jitable(_helper)


@overload(_scalar.where)
def _compile_where(condition, yes, no):
    return lambda condition, yes, no: where(condition, yes, no)


@overload(_scalar.one)
def _compile_one(x):
    one = x
    return lambda x: one(1)


# ------------------------------------------------------------------------------------------------------ operands


class Place(NamedTuple):
    """Where an operand begins."""

    number: int
    """in the table of addresses"""
    kind: Any
    """a number of the elements' type"""


def load(operand, o, i, t, zero):
    raise NotImplementedError("compiled only")


def flag(operand, o, i, t):
    raise NotImplementedError("compiled only")


def load_where(wanted, operand, o, i, t, zero):
    """What only matters where `wanted`. Numbers are read everywhere, since a branch costs more and keeps the compiler
    from working on several rows at once; what lies at an action, or is summed over actions, is not."""
    raise NotImplementedError("compiled only")


def load_each(wanted, operands, o, i, t, zero):
    raise NotImplementedError("compiled only")


def load_factors(operands, o, i, t, product):
    raise NotImplementedError("compiled only")


@intrinsic
def address(typing_context, array):
    """The data pointer of an array: the loop then counts no references and checks no index."""

    def codegen(context, builder, signature, arguments):
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def where(typing_context, condition, yes, no):
    """yes if condition else no, without a branch, so that the compiler can work on several rows at once."""

    def codegen(context, builder, signature, arguments):
        condition = context.cast(builder, arguments[0], signature.args[0], types.boolean)
        return builder.select(condition, *arguments[1:])

    return yes(types.boolean, yes, yes), codegen


@intrinsic
def read(typing_context, pointer, at):
    """pointer[at] of memory that nothing writes to while the loop runs: results share none with the inputs, and a
    compiler that knows it can work on several rows at once."""

    def codegen(context, builder, signature, arguments):
        address = builder.gep(arguments[0], [arguments[1]], inbounds=True)
        loaded = builder.load(address)
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return context.data_model_manager[signature.return_type].from_data(builder, loaded)

    return pointer.dtype(pointer, types.intp), codegen


def keep_target(algorithm, kept, j, target):
    """Keep a step's target, for algorithms that have one."""
    raise NotImplementedError("compiled only")


@overload(keep_target)
def _compile_keep_target(algorithm, kept, j, target):
    if not _tags[algorithm.algorithm].has_target:
        return lambda algorithm, kept, j, target: None

    def keep(algorithm, kept, j, target):
        kept[j] = target

    return keep


def keep_kind(boundary, kept, j, kind):
    """Keep what follows a row, for boundaries that ask for it."""
    raise NotImplementedError("compiled only")


@overload(keep_kind)
def _compile_keep_kind(boundary, kept, j, kind):
    for_gaps = boundary.instance_class is boundaries.Successors and not _absent(boundary, "valid")
    if not for_gaps and boundary.instance_class is not boundaries.Predecessors:
        return lambda boundary, kept, j, kind: None

    def keep(boundary, kept, j, kind):
        kept[j] = kind

    return keep


def store_each(operands, o, i, t, y):
    """Each result to its own operand's element."""
    raise NotImplementedError("compiled only")


@overload(store_each)
def _compile_store_each(operands, o, i, t, y):
    if len(operands) == 1:

        def store(operands, o, i, t, y):
            operands[0][0][index(operands[0], o, i, t)] = y[0]

    else:

        def store(operands, o, i, t, y):
            operands[0][0][index(operands[0], o, i, t)] = y[0]
            store_each(operands[1:], o, i, t, y[1:])

    return store


@intrinsic
def _pointer(typing_context, location, kind):
    """An address as a pointer to elements of a number's type."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.intp, kind), codegen


def addressed(operand, addresses):
    """Operands, in tuples of any depth, with pointers in place of places and arrays."""
    raise NotImplementedError("compiled only")


@overload(addressed)
def _compile_addressed(operand, addresses):
    if isinstance(operand, types.Array):
        return lambda operand, addresses: address(operand)
    if isinstance(operand, types.BaseNamedTuple):
        if operand.instance_class is Place:
            return lambda operand, addresses: _pointer(addresses[operand.number], operand.kind)
        make = operand.instance_class
        return lambda operand, addresses: make(*_addressed_each(operand, addresses))
    if isinstance(operand, types.BaseTuple):
        return lambda operand, addresses: _addressed_each(operand, addresses)
    return lambda operand, addresses: operand


def _addressed_each(operands, addresses):
    raise NotImplementedError("compiled only")


@overload(_addressed_each)
def _compile_addressed_each(operands, addresses):
    if len(operands) == 0:
        return lambda operands, addresses: ()
    return lambda operands, addresses: (
        addressed(operands[0], addresses),
        *_addressed_each(operands[1:], addresses),
    )


@njit(inline="always", **AS_NUMPY)
def index(operand, o, i, t):
    return read(operand[1], o) + i * operand[2] + t * operand[3]


@overload(load)
def _compile_load(operand, o, i, t, zero):
    if isinstance(operand, types.NoneType):
        return lambda operand, o, i, t, zero: zero
    if isinstance(operand, types.Number):
        return lambda operand, o, i, t, zero: operand
    dtype = zero
    if len(operand) == 4:
        return lambda operand, o, i, t, zero: dtype(read(operand[0], index(operand, o, i, t)))

    def taken(operand, o, i, t, zero):
        action = np.int64(operand[5][0][index(operand[5], o, i, t)])
        return dtype(operand[0][index(operand, o, i, t) + action * operand[4]])

    def expectation(operand, o, i, t, zero):
        probs = operand[5]
        at, probs_at = index(operand, o, i, t), index(probs, o, i, t)
        total = zero
        for action in range(operand[6]):
            p = dtype(probs[0][probs_at + action * probs[4]])
            if p != 0:
                total += p * dtype(operand[0][at + action * operand[4]])
        return total

    return taken if len(operand) == 6 else expectation


@overload(flag)
def _compile_flag(operand, o, i, t):
    if isinstance(operand, types.NoneType):
        return lambda operand, o, i, t: False
    return lambda operand, o, i, t: read(operand[0], index(operand, o, i, t)) != 0


@overload(load_where)
def _compile_load_where(wanted, operand, o, i, t, zero):
    if isinstance(operand, types.BaseTuple) and len(operand) > 4:
        return lambda wanted, operand, o, i, t, zero: load(operand, o, i, t, zero) if wanted else zero
    return lambda wanted, operand, o, i, t, zero: load(operand, o, i, t, zero)


@overload(load_each)
def _compile_load_each(wanted, operands, o, i, t, zero):
    if len(operands) == 1:
        return lambda wanted, operands, o, i, t, zero: (load_where(wanted, operands[0], o, i, t, zero),)
    return lambda wanted, operands, o, i, t, zero: (
        load_where(wanted, operands[0], o, i, t, zero),
        *load_each(wanted, operands[1:], o, i, t, zero),
    )


@overload(load_factors)
def _compile_load_factors(operands, o, i, t, product):
    """A missing factor is the product of those before it."""
    if len(operands) == 0:
        return lambda operands, o, i, t, product: ()
    if isinstance(operands[0], types.NoneType):
        return lambda operands, o, i, t, product: (product, *load_factors(operands[1:], o, i, t, product))

    def load_first(operands, o, i, t, product):
        factor = load(operands[0], o, i, t, product)
        return (factor, *load_factors(operands[1:], o, i, t, product * factor))

    return load_first


def where_each(condition, yes, no):
    raise NotImplementedError("compiled only")


@overload(where_each)
def _compile_where_each(condition, yes, no):
    if len(yes) == 1:
        return lambda condition, yes, no: (where(condition, yes[0], no[0]),)
    return lambda condition, yes, no: (where(condition, yes[0], no[0]), *where_each(condition, yes[1:], no[1:]))


def zeros_of(operands, zero):
    """The results of a step that is no transition."""
    raise NotImplementedError("compiled only")


@overload(zeros_of)
def _compile_zeros_of(operands, zero):
    if len(operands) == 1:
        return lambda operands, zero: (zero,)
    return lambda operands, zero: (zero, *zeros_of(operands[1:], zero))


# ------------------------------------------------------------------------------------- the boundary rules, one step


def bound(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
    """The rules of boundaries.py on row i at step t, given the kind and value of what follows it: whether the step is
    valid and cut, V of its successor, V of the next valid row (of the successor at the edge), whether the step replaces
    the state and by what value, and the kind and value that the next step of the walk will see. `flag_t` is the step at
    which the flag stands, one on for start flags; backward in time it stays inside the window, forward, where it is the
    flag of the step before, it may be -1. `at_edge` and `at_end` mark the first and the last step of the walk."""
    raise NotImplementedError("compiled only")


def flagged_row(boundary, o, i, t, flag_t, at_edge, zero):
    """Whether row t carries a flag, and V(s'_t) if so."""
    raise NotImplementedError("compiled only")


def _absent(boundary, name):
    return isinstance(boundary.types[boundary.fields.index(name)], types.NoneType)


@njit(inline="always", **AS_NUMPY)
def _ended(boundary, o, i, flag_t, at_edge):
    return where(at_edge, flag(boundary.last_done, o, i, 0), flag(boundary.terminated, o, i, flag_t))


@overload(flagged_row)
def _compile_flagged(boundary, o, i, t, flag_t, at_edge, zero):
    if _absent(boundary, "truncated"):
        return lambda boundary, o, i, t, flag_t, at_edge, zero: (_ended(boundary, o, i, flag_t, at_edge), zero)

    source = boundary.fields.index("bootstrap_values" if _absent(boundary, "next_values") else "next_values")

    def ended_or_cut(boundary, o, i, t, flag_t, at_edge, zero):
        ended = _ended(boundary, o, i, flag_t, at_edge)
        cut_short = where(ended, False, flag(boundary.truncated, o, i, t))
        value = load_where(cut_short, boundary[source], o, i, t, zero)
        return ended | cut_short, where(cut_short, value, zero)

    return ended_or_cut


@overload(bound)
def _compile_bound(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
    if boundary.instance_class is boundaries.Unbounded:
        return lambda boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero: (
            True, closed & at_edge, zero, zero, False, zero, kind, value,
        )  # fmt: skip

    if boundary.instance_class is boundaries.Resets:
        without_valid = _absent(boundary, "valid")

        def forward(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
            cut = where(flag_t >= 0, flag(boundary.done, o, i, max(flag_t, 0)), False)
            valid = without_valid or flag(boundary.valid, o, i, t)
            return valid, cut, zero, zero, where(valid, False, cut), zero, kind, value

        return forward

    if boundary.instance_class is boundaries.Predecessors:

        def following(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
            ended = _ended(boundary, o, i, where(at_end, t, flag_t + 1), at_end)
            goes_on = where(at_end, EDGE, VALID)
            after = where(ended, ENDED, where(flag(boundary.truncated, o, i, t), TRUNCATED, goes_on))
            return True, kind != VALID, after, zero, False, zero, after, zero

        return following

    has_next_values = not _absent(boundary, "next_values")

    def without_gaps(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
        flagged, flag_value = flagged_row(boundary, o, i, t, flag_t, at_edge, zero)
        v_open = value
        if has_next_values:
            v_open = load_where(not flagged, boundary.next_values, o, i, t, zero)
        v_next = where(flagged, flag_value, v_open)
        v_follow = where(at_edge, v_open, value)
        cut = flagged | (closed & at_edge)
        return True, cut, v_next, v_follow, False, zero, kind, load(boundary.values, o, i, t, zero)

    def with_gaps(boundary, o, i, t, flag_t, at_edge, at_end, kind, value, closed, zero):
        valid = flag(boundary.valid, o, i, t)
        flagged, flag_value = flagged_row(boundary, o, i, t, flag_t, at_edge, zero)
        ended, at_edge = kind == ENDED, kind == EDGE
        v_open = value
        if has_next_values:
            goes_on = where(flagged | ended, False, valid)
            v_open = where(ended, value, load_where(goes_on, boundary.next_values, o, i, t, zero))
        v_next = where(flagged, flag_value, v_open)
        v_follow = where(at_edge, v_open, value)
        cut = flagged | ended | (closed & at_edge)
        reset = where(valid, False, flagged)
        kind = where(valid, VALID, where(flagged, ENDED, kind))
        value = where(valid, load(boundary.values, o, i, t, zero), where(flagged, flag_value, value))
        return valid, cut, v_next, v_follow, reset, flag_value, kind, value

    return without_gaps if _absent(boundary, "valid") else with_gaps


def is_valid(boundary, o, i, t):
    raise NotImplementedError("compiled only")


@overload(is_valid)
def _compile_is_valid(boundary, o, i, t):
    if _absent(boundary, "valid"):
        return lambda boundary, o, i, t: True
    return lambda boundary, o, i, t: flag(boundary.valid, o, i, t)


def reads_next_values(boundary):
    raise NotImplementedError("compiled only")


@overload(reads_next_values)
def _compile_has_next_values(boundary):
    present = not _absent(boundary, "next_values")
    return lambda boundary: present
