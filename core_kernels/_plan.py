"""Calls like one before: the same dtypes, shapes, strides, alignment, options and device, on other memory.

Everything that a call does before its kernel or its loop starts (checks, layout, configuration, specialization) depends
on these alone. So the first call of a kind leaves a `Plan`, which holds it all but the addresses; a later call fills
those in, allocates its results and starts. Beside a GPU the ordinary path takes 100 to 200 us of host time, a plan
about as much as an eager PyTorch operation.

What a plan cannot serve takes the ordinary path, which gives the same result: the first call of a kind; results with a
carry; differentiable results whose graph has more than one node; 16-bit tensors on a CPU; a GPU that is not the
current one; RL_TRITON_CHECK; a Triton version or a kernel without what a plan needs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from rl_triton import _backend, _checks, _config, _library

_SCALARS = frozenset({float, int, bool, str, type(None)})
_MAX_PLANS = 1024  # an operation; then it begins anew
_MAX_RECENT = 4  # calls known again by comparing, a form
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


Start = Callable[[list[int], list[torch.Tensor]], bool]
"""Start on the addresses of the call's tensors and on what it made; False where the ordinary path has to."""


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
    """A call with all but its memory in place."""

    def __init__(self, launch: Launch, tensors: list[torch.Tensor], given: bool, result: Any) -> None:
        """given: the results are among the tensors, as `out`."""
        self.ties = [(i, j, 0) for i, j in _shared([x.data_ptr() for x in tensors])]
        arguments = {x.data_ptr(): i for i, x in enumerate(tensors)}
        self.new = [_allocator(x) for x in (*(() if given else launch.outputs), *launch.scratch)]
        self.given = [arguments[x.data_ptr()] for x in launch.outputs] if given else []
        self.overlap = _overlap(self.given, [span(x) for x in tensors])
        self.structure = None if isinstance(result, torch.Tensor) else type(result)
        self.n_results = len(launch.outputs) if launch.scratch else None
        places = Places(tensors, [*launch.outputs, *launch.scratch], self.ties)
        self.starts = [prepare(places) for prepare in launch.prepare]

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Any:
        """The results, or None where this call has to take the ordinary path."""
        for i, j, between in self.ties:
            if addresses[i] - addresses[j] != between:
                return None
        made: list[torch.Tensor] = []
        if self.given:
            if self.overlap(addresses):
                return None  # the ordinary path looks closer, or words the error
            for i in self.given:
                if tensors[i].requires_grad:
                    return None
                made.append(tensors[i])
            torch.autograd.graph.increment_version(made)
        for allocate in self.new:
            made.append(allocate())
        for start in self.starts:
            if not start(addresses, made):
                return None
        if self.structure is None:
            return made[0]
        # A named tuple takes long to make by its own name.
        return tuple.__new__(self.structure, made[: self.n_results])


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

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Any:
        """The results with their graph."""
        arguments = self.arguments.copy()
        for position, i in self.read:
            arguments[position] = tensors[i]
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


def _overlap(given: list[int], spans: list[int]) -> Callable[[list[int]], bool]:
    """Whether a result that is given lies where another argument does, as a function of the addresses."""
    pairs = {(min(i, j), max(i, j)) for i in given for j in range(len(spans)) if i != j}
    apart = (f"-{spans[i]} < at[{i}] - at[{j}] < {spans[j]}" for i, j in sorted(pairs))
    return eval(f"lambda at: {' or '.join(apart) or False}")


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
            key += (kind, x)
        elif kind is tuple:
            key.append(len(x))
            _describe(x, key, tensors, addresses)
        else:
            raise NoPlanError("an argument of another type")


# What a call depends on beside its arguments.
_settings = (_backend.chosen, _config.forced, torch.get_default_dtype, torch.is_grad_enabled)


def _recall(given: tuple[Any, ...], tensors: list[torch.Tensor], plan: Plan | GraphPlan) -> Callable[..., Any]:
    """A function of the arguments of a call: the results if it is like this one, which a plan served, else None.

    The tensors are compared by the guards that torch.compile tells calls apart with: class, dispatch keys (as the modes
    in force change them), dtype, device, shape and strides of each, all in one call of C++. The rest is written out as
    code for these arguments, since loops over them would take longer than what they do.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    alike = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not alike(*tensors):
        raise NoPlanError("tensors that PyTorch's guards do not know again")
    names: dict[str, Any] = {"alike": alike, "plan": plan}
    unpacked: list[str] = []
    different: list[str] = []
    compared: list[str] = []  # the tensors, in the order that `_describe` sees them

    def take(entries: tuple[Any, ...], source: str, prefix: str) -> None:
        """Code that takes entries out of a tuple, and that compares them with these."""
        own = [f"{prefix}{i}" for i in range(len(entries))]
        unpacked.append(f"{', '.join(own)}, = {source}")
        for name, x in zip(own, entries, strict=True):
            if type(x) in _SCALARS:
                names[f"{name}_is"], names[f"{name}_type"] = x, type(x)
                different.append(f"type({name}) is not {name}_type or {name} != {name}_is")
            elif type(x) is not tuple:
                compared.append(name)
            elif x and tuple not in map(type, x):
                unpacked.append(f"if type({name}) is not tuple or len({name}) != {len(x)}: return None")
                take(x, name, f"{name}_")
            else:
                raise NoPlanError("a tuple in a tuple")

    take(given, "given", "x")
    for name, setting in zip(("chosen", "forced", "default_dtype", "recording"), _settings, strict=True):
        names[name], names[f"{name}_is"] = setting, setting()
        different.append(f"{name}() is not {name}_is")
    joined = ", ".join(compared)
    lines = [
        *unpacked,
        f"if {' or '.join(different)}: return None",
        f"if not alike({joined}): return None",
        f"addresses = [{', '.join(f'{name}.data_ptr()' for name in compared)}]",
        "if gcd(16, *addresses) != 16: return None",  # only calls with aligned tensors are recalled
        f"return plan(({joined},), addresses)",
    ]
    names["gcd"] = math.gcd
    exec("def recall(given):\n    " + "\n    ".join(lines), names)
    return names["recall"]


class Plans:
    """The plans of one operation."""

    def __init__(self) -> None:
        self.by_key: dict[Any, Plan | GraphPlan | None] = {}
        self.recent: dict[tuple[Any, ...], tuple[Callable[..., Any], ...]] = {}
        """by form: the number of arguments and the names of keywords"""

    def clear(self) -> None:
        self.by_key.clear()
        self.recent.clear()

    def recall(
        self,
        form: tuple[Any, ...],
        given: tuple[Any, ...],
        tensors: list[torch.Tensor],
        addresses: list[int],
        plan: Plan | GraphPlan,
    ) -> None:
        """Know this call again."""
        if not any(address & 15 for address in addresses):
            with contextlib.suppress(*NO_PLAN):
                self.recent[form] = (_recall(given, tensors, plan), *self.recent.get(form, ())[: _MAX_RECENT - 1])


_Op = TypeVar("_Op", bound=Callable[..., Any])


def planned(op: _Op) -> _Op:
    """A public function whose calls leave plans and follow them."""
    plans = Plans()
    recent = plans.recent

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _library.watched():
            return _library.call(op, args, kwargs)
        if _checks.READS_DATA or not ENABLED:
            return _library.ordinary(op, args, kwargs)
        given = (*args, *kwargs.values())
        form = (len(args), *kwargs)
        for recall in recent.get(form, ()):
            result = recall(given)
            if result is not None:
                return result
        return _look_up(op, args, kwargs, plans, form, given)

    call.plans = plans  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _look_up(op: Any, args: Any, kwargs: Any, plans: Plans, form: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """A call that none of the recent ones is like."""
    key: list[Any] = [*(setting() for setting in _settings), *form]
    tensors: list[torch.Tensor] = []
    addresses: list[int] = []
    try:
        _describe(given, key, tensors, addresses)
    except (NoPlanError, RuntimeError, NotImplementedError):  # as of tensors without strides or memory
        return _library.ordinary(op, args, kwargs)
    kind = (*key, *_shared(addresses))
    plan = plans.by_key.get(kind, _NEW)
    if plan is _NEW:
        return _first(op, args, kwargs, plans.by_key, kind, tensors)
    result = None if plan is None else plan(tensors, addresses)
    if result is None:
        return op(*args, **kwargs)
    plans.recall(form, given, tensors, addresses, plan)
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
