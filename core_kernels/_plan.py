"""Calls like one before: the same dtypes, shapes, strides, alignment, options and device, on other memory.

Everything that a call does before its kernel or its loop starts (checks, layout, configuration, specialization) depends
on these alone. So the first call of a kind leaves a `Plan`, which holds it all but the addresses; a later call fills
those in, allocates its results and starts. Beside a GPU the ordinary path takes 100 to 200 us of host time, a call that
is known again about as much as an eager PyTorch operation, one that has to be looked up three times as much.

What a plan cannot serve takes the ordinary path, which gives the same result: the first call of a kind; results with a
carry; differentiable results whose graph has more than one node; 16-bit tensors on a CPU; a GPU that is not the
current one; RL_TRITON_CHECK; a Triton version or a kernel without what a plan needs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from rl_triton import _backend, _checks, _config, _library

_SCALARS = frozenset({float, int, bool, str, type(None)})
_MAX_PLANS = 1024  # an operation; then it begins anew
_MAX_RECENT = 6  # calls known again by comparing, an operation
_MAX_WAYS = 4  # to know calls of one plan again: their tensors may be of several classes, say
_NEW: Any = object()
# Arguments of which a call with any but the default has more to do than one kernel or loop.
_DECLINED = ("return_carry", "return_final")

# RL_TRITON_PLANS=0, read at import, leaves every call to the ordinary path.
ENABLED = os.environ.get("RL_TRITON_PLANS") != "0"


# Not public: code that torch.compile generates uses it. Without it, calls are looked up and tensors made otherwise.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


class NoPlanError(Exception):
    """This call cannot be done by a plan."""


# Why there is no plan, or none to know again: beside what is known to be in the way, another version of Triton, PyTorch
# or numba, whose inner parts have another form.
NO_PLAN = (NoPlanError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class Places(NamedTuple):
    """Where the memory of a call comes from."""

    tensors: list[torch.Tensor]
    """All that the call was given, in order."""
    made: list[torch.Tensor]
    """Its results, and behind them its scratch memory."""
    ties: list[tuple[int, int, int]]
    """(i, j, bytes from tensor j to tensor i): where they lie in one another, which of the two is read where cannot be
    told, and need not be while they lie so."""

    def find(self, address: int) -> tuple[bool, int]:
        """(has the call made it, number) of the tensor that begins at an address."""
        for made, some in ((True, self.made), (False, self.tensors)):
            for i, x in enumerate(some):
                if x.data_ptr() == address:
                    return made, i
        raise NoPlanError("an address that is none of the arguments'")


class Code:
    """A function in the making: loops over the tensors of a call take longer than what is done to each."""

    def __init__(self, *parameters: str) -> None:
        self.lines = [f"def function({', '.join(parameters)}):"]
        self.names: dict[str, Any] = {}

    def add(self, *lines: str) -> None:
        self.lines += [f"    {line}" for line in lines]

    def name(self, x: Any) -> str:
        """What x is called in the code."""
        name = f"given{len(self.names)}"
        self.names[name] = x
        return name

    def function(self) -> Callable[..., Any]:
        exec("\n".join(self.lines), self.names)
        return self.names.pop("function")


class Start(Protocol):
    """A kernel or a loop with all in place but the addresses."""

    def write(self, code: Code, addresses: list[str], made: list[str]) -> None:
        """Add the lines that start it, which return None where the ordinary path has to.

        addresses, made: what those of the call's tensors, and the tensors that it made, are called."""


class Launch(NamedTuple):
    """What the ordinary path did, and how to prepare to do it again."""

    outputs: tuple[torch.Tensor, ...]
    scratch: tuple[torch.Tensor, ...]
    prepare: tuple[Callable[[Places], Start], ...]
    """For each kernel or loop, in their order."""


class Node(NamedTuple):
    """The node of a graph that the ordinary path made."""

    apply: Callable[..., tuple[torch.Tensor, ...]]
    arguments: tuple[Any, ...]


_recorder: ContextVar[list[Any] | None] = ContextVar("rl_triton_recorder", default=None)


def record(done: Launch | Node) -> None:
    """Called by the ordinary path after each kernel or loop, and for each differentiable result."""
    recorded = _recorder.get()
    if recorded is not None:
        recorded.append(done)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """What the ordinary path records in the block."""
    recorded: list[Any] = []
    token = _recorder.set(recorded)
    try:
        yield recorded
    finally:
        _recorder.reset(token)


class Plan:
    """A call with all but its memory in place: `run` takes its tensors and then their addresses, and gives the results,
    or None where this call has to take the ordinary path."""

    def __init__(self, launch: Launch, tensors: list[torch.Tensor], given: bool, result: Any) -> None:
        """given: the results are among the tensors, as `out`."""
        ties = [(i, j, 0) for i, j in _shared([x.data_ptr() for x in tensors])]
        places = Places(tensors, [*launch.outputs, *launch.scratch], ties)
        starts = [prepare(places) for prepare in launch.prepare]
        arguments, addresses = ([f"{name}{i}" for i in range(len(tensors))] for name in ("x", "at"))
        code = Code(*arguments, *addresses)
        code.add(*(f"if {addresses[i]} - {addresses[j]} != {between}: return None" for i, j, between in ties))
        results: list[str] = []
        if given:
            positions = {x.data_ptr(): i for i, x in enumerate(tensors)}
            written = [positions[x.data_ptr()] for x in launch.outputs]
            results = [arguments[i] for i in written]
            # The ordinary path looks closer, or words the error.
            wrong = [
                *_overlaps(written, addresses, [span(x) for x in tensors]),
                *(f"{x}.requires_grad" for x in results),
            ]
            code.add(f"if {' or '.join(wrong)}: return None")
            code.add(f"{code.name(torch.autograd.graph.increment_version)}(({', '.join(results)},))")
        made = results.copy()
        for x in (*(() if given else launch.outputs), *launch.scratch):
            made.append(f"made{len(made)}")
            code.add(f"{made[-1]} = {code.name(_allocator(x))}()")
        for start in starts:
            start.write(code, addresses, made)
        wanted = made[: len(launch.outputs)]
        if isinstance(result, torch.Tensor):
            code.add(f"return {wanted[0]}")
        else:  # a named tuple takes long to make by its own name
            code.add(f"return {code.name(tuple.__new__)}({code.name(type(result))}, ({', '.join(wanted)},))")
        self.run = code.function()
        self.ways: tuple[Callable[..., Any], ...] = ()
        """What knows its calls again."""


class GraphPlan:
    """A differentiable call that makes one node of a graph: what it was checked for holds for the next one."""

    def __init__(self, node: Node, tensors: list[torch.Tensor], result: Any) -> None:
        numbers = {id(x): i for i, x in enumerate(tensors)}
        self.apply = node.apply
        self.arguments = list(node.arguments)
        self.read: list[tuple[int, int]] = []
        """(position among the node's arguments, among the call's tensors)"""
        if len(numbers) < len(tensors):
            raise NoPlanError("one tensor in two places, which the next call's need not be")
        for position, x in enumerate(node.arguments):
            if isinstance(x, torch.Tensor):
                self.read.append((position, numbers[id(x)]))
                self.arguments[position] = None  # no plan holds memory
        self.structure = None if isinstance(result, torch.Tensor) else type(result)
        self.ways: tuple[Callable[..., Any], ...] = ()

    def run(self, *given: Any) -> Any:
        """The results with their graph, of the call's tensors and their addresses."""
        arguments = self.arguments.copy()
        for position, i in self.read:
            arguments[position] = given[i]
        results = self.apply(*arguments)
        return results[0] if self.structure is None else tuple.__new__(self.structure, results)


def _allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """How to make a tensor like this one, on the current device: as the code that torch.compile generates does, where
    this version of PyTorch has it, which skips the dispatcher."""
    make = getattr(_guards, f"_empty_strided_{like.device.type}", None)
    if make is not None:
        return functools.partial(make, tuple(like.shape), like.stride(), like.dtype)
    return functools.partial(torch.empty, tuple(like.shape), dtype=like.dtype, device=like.device)


def _shared(addresses: list[int]) -> list[tuple[int, int]]:
    """Pairs of tensors that begin at the same address, each with the first of its kind."""
    if len(set(addresses)) == len(addresses):
        return []
    return [(i, addresses.index(x)) for i, x in enumerate(addresses) if addresses.index(x) < i]


def _overlaps(written: list[int], addresses: list[str], spans: list[int]) -> list[str]:
    """Whether a result that is given lies where another argument does: a condition for each pair."""
    pairs = {(min(i, j), max(i, j)) for i in written for j in range(len(spans)) if i != j}
    return [f"-{spans[i]} < {addresses[i]} - {addresses[j]} < {spans[j]}" for i, j in sorted(pairs)]


def span(x: torch.Tensor) -> int:
    """Bytes from the first element of x to the end of its last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _describe(given: tuple[Any, ...], key: list[Any], tensors: list[torch.Tensor], addresses: list[int]) -> None:
    """Append to `key` all of the arguments that a plan depends on, and to the others what it does not."""
    for x in given:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if x.is_neg():
                raise NoPlanError("a view that negates, which its address does not tell")
            address = x.data_ptr()
            key += (x.dtype, x.shape, x.stride(), x.device, address & 15 == 0)
            tensors.append(x)
            addresses.append(address)
        elif kind in _SCALARS:
            if x != x:
                raise NoPlanError("NaN, which equals no other")
            key += (kind, x)
        elif kind is tuple:
            key.append(len(x))
            _describe(x, key, tensors, addresses)
        else:
            raise NoPlanError("an argument of another type")


# What a call depends on beside its arguments.
_settings = (_backend.chosen, _config.forced, torch.get_default_dtype, torch.is_grad_enabled)


def _recall(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], plan: Plan | GraphPlan
) -> Callable[..., Any]:
    """A function of the arguments of a call: the results if it is like this one, which a plan served, else None.

    The tensors are compared by the guards that torch.compile tells calls apart with: class, dispatch keys (as the modes
    in force change them), dtype, device, shape and strides of each, all in one call of C++. The rest is written out as
    code for these arguments, since loops over them would take longer than what they do.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    alike = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not alike(*tensors):
        raise NoPlanError("tensors that PyTorch's guards do not know again")
    code = Code("args", "kwargs")
    different: list[str] = []
    compared: list[str] = []  # the tensors, in the order that `_describe` sees them
    positional, named = [f"arg{i}" for i in range(len(args))], [f"kwarg_{name}" for name in kwargs]
    code.add(f"if len(args) != {len(args)} or len(kwargs) != {len(kwargs)}: return None")
    if args:
        code.add(f"{', '.join(positional)}, = args")
    if kwargs:
        taken = "; ".join(f"{own} = kwargs['{name}']" for own, name in zip(named, kwargs, strict=True))
        code.add(f"try: {taken}", "except KeyError: return None")
    _compare(code, (*args, *kwargs.values()), [*positional, *named], different, compared)
    different += [f"{code.name(setting)}() is not {code.name(setting())}" for setting in _settings]
    joined, addresses = ", ".join(compared), [f"at{i}" for i in range(len(compared))]
    code.add(
        f"if {' or '.join(different)}: return None",
        f"if not {code.name(alike)}({joined}): return None",
        *(f"{at} = {x}.data_ptr()" for at, x in zip(addresses, compared, strict=True)),
        f"if ({' | '.join(addresses)}) & 15: return None",  # only calls with aligned tensors are recalled
        f"return {code.name(plan.run)}({joined}, {', '.join(addresses)})",
    )
    return code.function()


def _compare(code: Code, entries: tuple[Any, ...], names: list[str], different: list[str], compared: list[str]) -> None:
    """What tells arguments of these names from the entries, as conditions, and the names of those that are tensors."""
    for name, x in zip(names, entries, strict=True):
        if type(x) in _SCALARS:
            different.append(f"type({name}) is not {code.name(type(x))} or {name} != {code.name(x)}")
        elif type(x) is not tuple:
            compared.append(name)
        elif x and tuple not in map(type, x):
            within = [f"{name}_{i}" for i in range(len(x))]
            code.add(f"if type({name}) is not tuple or len({name}) != {len(x)}: return None")
            code.add(f"{', '.join(within)}, = {name}")
            _compare(code, x, within, different, compared)
        else:
            raise NoPlanError("an empty tuple, or one in another")


class Plans:
    """The plans of one operation."""

    def __init__(self) -> None:
        self.by_key: dict[Any, Plan | GraphPlan | None] = {}
        self.recent: tuple[Callable[..., Any], ...] = ()
        """Know the calls that were looked up last."""

    def keep(self, recall: Callable[..., Any]) -> None:
        """Ask this one first from here on."""
        self.recent = (recall, *(x for x in self.recent if x is not recall))[:_MAX_RECENT]

    def clear(self) -> None:
        self.by_key.clear()
        self.recent = ()


_Op = TypeVar("_Op", bound=Callable[..., Any])


def planned(op: _Op) -> _Op:
    """A public function whose calls leave plans and follow them."""
    plans = Plans()

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _library.watched():
            return _library.call(op, args, kwargs)
        if _checks.READS_DATA or not ENABLED:
            return _library.ordinary(op, args, kwargs)
        for recall in plans.recent:
            result = recall(args, kwargs)
            if result is not None:
                return result
        return _look_up(op, args, kwargs, plans)

    call.plans = plans  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _look_up(op: Any, args: Any, kwargs: Any, plans: Plans) -> Any:
    """A call that none of the recent ones is like."""
    key: list[Any] = [*(setting() for setting in _settings), len(args), *kwargs]
    tensors: list[torch.Tensor] = []
    addresses: list[int] = []
    try:
        _describe((*args, *kwargs.values()), key, tensors, addresses)
    except (NoPlanError, RuntimeError, NotImplementedError):  # as of tensors without strides or memory
        return _library.ordinary(op, args, kwargs)
    kind = (*key, *_shared(addresses))
    plan = plans.by_key.get(kind, _NEW)
    if plan is _NEW:
        return _first(op, args, kwargs, plans.by_key, kind, tensors)
    if plan is None:
        return op(*args, **kwargs)
    for recall in plan.ways:
        result = recall(args, kwargs)
        if result is not None:
            plans.keep(recall)
            return result
    result = plan.run(*tensors, *addresses)
    if result is None:
        return op(*args, **kwargs)
    if len(plan.ways) < _MAX_WAYS and not any(address & 15 for address in addresses):
        with contextlib.suppress(*NO_PLAN):
            recall = _recall(args, kwargs, tensors, plan)
            plan.ways = (*plan.ways, recall)
            plans.keep(recall)
    return result


def _first(op: Any, args: Any, kwargs: Any, plans: Any, kind: Any, tensors: list[torch.Tensor]) -> Any:
    """The first call of a kind: the ordinary path, watched."""
    with recording() as recorded:
        result = op(*args, **kwargs)
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[kind] = None
    if any(kwargs.get(name) for name in _DECLINED):
        return result
    with contextlib.suppress(*NO_PLAN):
        if kwargs.get("differentiable") and torch.is_grad_enabled():
            (node,) = (x for x in recorded if isinstance(x, Node))
            plans[kind] = GraphPlan(node, tensors, result)
        else:
            (launch,) = recorded
            plans[kind] = Plan(launch, tensors, kwargs.get("out") is not None, result)
    return result
