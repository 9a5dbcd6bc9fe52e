"""Calls like one before: the same dtypes, shapes, strides, alignment, options and device, on other memory.

Everything that a call does before its kernel or its loop starts (checks, layout, configuration, specialization) depends
on these alone. So the first call of a kind leaves a `Plan`, which holds it all but the addresses; a later call fills
those in, allocates its results and starts. Beside a GPU the ordinary path takes 100 to 200 us of host time, a plan
about as much as an eager PyTorch operation.

What a plan cannot serve takes the ordinary path, which gives the same result: the first call of a kind; results with a
carry; `differentiable`; 16-bit tensors on a CPU; a GPU that is not the current one; RL_TRITON_CHECK; a Triton version
or a kernel without what a plan needs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch

from rl_triton import _backend, _checks, _config, _library

_SCALARS = frozenset({float, int, bool, str, type(None)})
_MAX_PLANS = 1024  # an operation; then it begins anew
_NEW: Any = object()
# Arguments of which a call with any but the default has more to do than one kernel or loop.
_DECLINED = ("return_carry", "return_final", "differentiable")

# RL_TRITON_PLANS=0, read at import, leaves every call to the ordinary path.
ENABLED = os.environ.get("RL_TRITON_PLANS") != "0"


class NoPlanError(Exception):
    """This call cannot be done by a plan."""


class Places(NamedTuple):
    """Where the memory of a call comes from."""

    tensors: list[torch.Tensor]
    """All that the call was given, in order."""
    made: list[torch.Tensor]
    """Its results, and behind them its scratch memory."""

    def find(self, address: int) -> tuple[bool, int]:
        """(has the call made it, number) of the tensor that begins at an address."""
        for made, some in ((True, self.made), (False, self.tensors)):
            for i, x in enumerate(some):
                if x.data_ptr() == address:
                    return made, i
        raise NoPlanError("an address that is none of the arguments'")


Start = Callable[[list[torch.Tensor], list[int], list[torch.Tensor]], bool]
"""Start on the call's tensors, their addresses and what it made; False where the ordinary path has to."""


class Launch(NamedTuple):
    """What the ordinary path did, and how to prepare to do it again."""

    outputs: tuple[torch.Tensor, ...]
    scratch: tuple[torch.Tensor, ...]
    prepare: tuple[Callable[[Places], Start], ...]
    """For each kernel or loop, in their order."""


_recorder: ContextVar[list[Launch] | None] = ContextVar("rl_triton_recorder", default=None)


def record(launch: Launch) -> None:
    """Called by the ordinary path after each kernel or loop."""
    launches = _recorder.get()
    if launches is not None:
        launches.append(launch)


class Plan:
    """A call with all but its memory in place."""

    def __init__(self, launch: Launch, tensors: list[torch.Tensor], given: bool, result: Any) -> None:
        """given: the results are among the tensors, as `out`."""
        arguments = {x.data_ptr(): i for i, x in enumerate(tensors)}
        self.new = [_allocator(x, tensors) for x in (*(() if given else launch.outputs), *launch.scratch)]
        self.given = [arguments[x.data_ptr()] for x in launch.outputs] if given else []
        self.spans = [_span(x) for x in tensors]
        self.structure = None if isinstance(result, torch.Tensor) else type(result)
        self.n_results = len(launch.outputs)
        places = Places(tensors, [*launch.outputs, *launch.scratch])
        self.starts = [prepare(places) for prepare in launch.prepare]

    def __call__(self, tensors: list[torch.Tensor], addresses: list[int]) -> Any:
        """The results, or None where this call has to take the ordinary path."""
        if self.given and self._may_overlap(addresses):
            return None
        made = [tensors[i] for i in self.given]
        for x in made:
            if x.requires_grad:
                return None  # an error, which the ordinary path words
            torch.autograd.graph.increment_version(x)
        for allocate in self.new:
            made.append(allocate(tensors))
        for start in self.starts:
            if not start(tensors, addresses, made):
                return None
        return made[0] if self.structure is None else self.structure(*made[: self.n_results])

    def _may_overlap(self, addresses: list[int]) -> bool:
        """Whether a given result lies where another argument does: then the ordinary path looks closer."""
        for i in self.given:
            start, end = addresses[i], addresses[i] + self.spans[i]
            for j, address in enumerate(addresses):
                if j != i and address < end and start < address + self.spans[j]:
                    return True
        return False


def _allocator(result: torch.Tensor, tensors: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """How to make a tensor like a result: like an argument if there is one of its kind, which is cheapest."""
    for i, x in enumerate(tensors):
        if x.dtype == result.dtype and x.shape == result.shape and x.stride() == result.stride():
            return lambda tensors: torch.empty_like(tensors[i])
    shape, dtype, device = result.shape, result.dtype, result.device
    return lambda _: torch.empty(shape, dtype=dtype, device=device)


def _span(x: torch.Tensor) -> int:
    """Bytes from the first element of x to the end of its last."""
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _describe(given: tuple[Any, ...], key: list[Any], tensors: list[torch.Tensor], addresses: list[int]) -> None:
    """Append to `key` all of the arguments that a plan depends on, and to the others what it does not."""
    for x in given:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
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


_Op = TypeVar("_Op", bound=Callable[..., Any])


def planned(op: _Op) -> _Op:
    """A public function whose calls leave plans and follow them."""
    plans: dict[Any, Plan | None] = {}

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _library.watched():
            return _library.call(op, args, kwargs)
        if _checks.READS_DATA or not ENABLED:
            return _library.ordinary(op, args, kwargs)
        key: list[Any] = [_backend.chosen(), _config.forced(), torch.get_default_dtype(), *kwargs]
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        try:
            _describe((*args, *kwargs.values()), key, tensors, addresses)
        except (NoPlanError, RuntimeError, NotImplementedError):  # as of tensors without strides or memory
            return _library.ordinary(op, args, kwargs)
        kind = tuple(key)
        plan = plans.get(kind, _NEW)
        if plan is _NEW:
            return _first(op, args, kwargs, plans, kind, tensors, addresses)
        result = None if plan is None else plan(tensors, addresses)
        return op(*args, **kwargs) if result is None else result

    call.plans = plans  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _first(
    op: Any, args: Any, kwargs: Any, plans: Any, kind: Any, tensors: list[torch.Tensor], addresses: list[int]
) -> Any:
    """The first call of a kind: the ordinary path, watched."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        result = op(*args, **kwargs)
    finally:
        _recorder.reset(token)
    if len(set(addresses)) < len(addresses):
        return result  # which of two arguments in one place is read where cannot be told; the next call's may be apart
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    plans[kind] = None
    if len(launches) == 1 and not any(kwargs.get(name) for name in _DECLINED):
        # Beside what is known to be in the way: kernels of another Triton version, described in another form.
        with contextlib.suppress(NoPlanError, AttributeError, KeyError, TypeError, ValueError):
            plans[kind] = Plan(launches[0], tensors, kwargs.get("out") is not None, result)
    return result
