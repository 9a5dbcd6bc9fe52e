"""The public functions as PyTorch operators, `torch.ops.rl_triton`: for whatever looks on while a call is made.

An ordinary eager call goes straight to its kernel, since PyTorch's dispatcher costs more than the kernel does. But
torch.compile, torch.export, make_fx, jit.trace, functorch's transforms, FakeTensorMode and user-defined modes must see
an operator, with tensors in and tensors out, or they would miss the call and take its memory as it is. `watched` tells
the two apart; `call` turns the arguments of a public function into those of its operator:

    rl_triton::gae(Tensor rewards, ..., float? gamma, Tensor? gamma_tensor, ..., int time_dim, ...) -> Tensor[]
    rl_triton::gae_out(..., Tensor(a0!) out_0, Tensor(a1!) out_1) -> ()
    rl_triton::gae_differentiable(..., str code) -> Tensor[]

(`normalize_advantages` is no scan: where something looks on, it is written with PyTorch's own operators.) The first two
carry no graph, whatever their inputs, and are opaque: their kernel is the public function itself. Under
functorch's vmap the batch axis becomes the first axis of the rows. The third is no kernel but the expression of
`_differentiable.py`, which autograd and compilers look into; what they find there are elementwise operators around
`rl_triton::affine_scan`.

Everything is derived from the signatures of the public functions, so an argument is declared in one place.
"""

from __future__ import annotations

import hashlib
import inspect
import numbers
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._device import DeviceContext

from rl_triton import _checks

_LIBRARY = torch.library.Library("rl_triton", "DEF")
_TENSOR, _OPTIONAL, _FACTOR, _PAIR = "Tensor", "Tensor?", "factor", "pair"
_KINDS = {
    "torch.Tensor": _TENSOR,
    "torch.Tensor | None": _OPTIONAL,
    "torch.Tensor | _checks.Required | None": _OPTIONAL,
    "float | torch.Tensor": _FACTOR,
    "float | torch.Tensor | None": _FACTOR,
    "tuple[torch.Tensor, torch.Tensor] | None": _PAIR,
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
}
_SCALARS: dict[str, type] = {"int": int, "float": float, "str": str}
# Arguments that decide which operator is called, or how, and reach none of them.
_ABOVE = ("out", "differentiable")
# Compilers keep what they found in a `_differentiable` operator, also on disk: its code is part of the call.
_CODE = hashlib.sha256(
    b"".join(
        Path(__file__).with_name(name).read_bytes() for name in ("_autograd.py", "_differentiable.py", "_linear.py")
    )
).hexdigest()[:16]

_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._is_tracing


def watched() -> bool:
    """Whether something looks on that has to see an operator: a compiler, a tracer, a mode or a transform."""
    return bool(
        _compiling()
        or _dispatch_modes()
        or (_function_modes() and not _only_default_device())
        or _transform() is not None
        or _tracing()
    )


def traced(x: torch.Tensor) -> bool:
    """Whether a function has to do with operators what it would do to the memory of x."""
    return watched() or isinstance(x, _checks.STAND_INS)


def _only_default_device() -> bool:
    """Whether the function modes are those of torch.set_default_device: calls name their device, so it is nothing to
    them."""
    return all(type(mode) is DeviceContext for mode in torch.overrides._get_current_function_mode_stack())


class _Parameter(NamedTuple):
    name: str
    kind: str
    default: Any
    """`inspect.Parameter.empty` where there is none."""

    def declare(self) -> Iterator[str]:
        """The arguments of the operator, as its schema has them."""
        if self.kind == _FACTOR:
            yield from (f"float? {self.name}", f"Tensor? {self.name}_tensor")
        elif self.kind == _PAIR:
            yield from (f"Tensor? {self.name}_0", f"Tensor? {self.name}_1")
        else:
            yield f"{self.kind} {self.name}"

    def split(self, x: Any, flat: list[Any]) -> bool:
        """Append what the operator is called with; False where x is none of what the argument takes."""
        kind = self.kind
        if kind in (_TENSOR, _OPTIONAL):
            flat.append(x)
            return isinstance(x, torch.Tensor) or (kind == _OPTIONAL and x is None)
        if kind == _FACTOR:
            if isinstance(x, torch.Tensor):
                flat += (None, x)
                return True
            if x is None:
                flat += (None, None)
                return self.default is None
            if isinstance(x, bool) or not isinstance(x, (float, numbers.Real)):
                return False
            flat += (x if type(x) is float else float(x), None)
            return True
        if kind == _PAIR:
            if x is None:
                flat += (None, None)
                return True
            flat += x if isinstance(x, tuple) else ()
            return isinstance(x, tuple) and len(x) == 2 and all(isinstance(y, torch.Tensor) for y in x)
        if kind == "bool":
            flat.append(bool(x))
            return True
        flat.append(x)
        return type(x) is _SCALARS[kind]

    def join(self, flat: Iterator[Any]) -> Any:
        """The argument, from those that `split` made of it."""
        first = next(flat)
        if self.kind == _FACTOR:
            second = next(flat)
            return first if second is None else second
        if self.kind == _PAIR:
            second = next(flat)
            return None if first is None else (first, second)
        return first


class _Operator:
    """A public function and the operators behind it."""

    def __init__(self, public: Callable[..., Any], structure: type | None) -> None:
        """structure: the named tuple of its results; None where it has one, `tuple` where their number varies."""
        self.public = public
        self.function = inspect.unwrap(public)
        """Without plans: the ordinary path."""
        self.name = public.__name__
        self.structure = structure
        self.n_results = 1 if structure is None else len(getattr(structure, "_fields", ()))
        given = inspect.signature(self.function).parameters.values()
        self.n_positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
        self.names = tuple(p.name for p in given)
        self.parameters = tuple(
            _Parameter(p.name, _KINDS[p.annotation], p.default) for p in given if p.name not in _ABOVE
        )
        self.carry = "return_carry" if "return_carry" in self.names else "return_final"
        declared = ", ".join(text for p in self.parameters for text in p.declare())
        written = ", ".join(f"Tensor(a{i}!) out_{i}" for i in range(self.n_results))
        self._define(self.name, f"({declared}) -> Tensor[]", self._new, self._new_fake, self._vmap)
        self.new = getattr(torch.ops.rl_triton, self.name).default
        if structure is tuple:
            return
        self._define(f"{self.name}_out", f"({declared}, {written}) -> ()", self._out, self._out_fake, self._vmap_out)
        tags = (torch.Tag.pt2_compliant_tag,)
        _LIBRARY.define(f"{self.name}_differentiable({declared}, str code) -> Tensor[]", tags=tags)
        _LIBRARY.impl(f"{self.name}_differentiable", self._differentiable, "CompositeImplicitAutograd")
        self.out = getattr(torch.ops.rl_triton, f"{self.name}_out").default
        self.differentiable = getattr(torch.ops.rl_triton, f"{self.name}_differentiable").default

    def _define(self, name: str, schema: str, kernel: Any, fake: Any, vmap: Any) -> None:
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(torch.ops.rl_triton, name).default

        def without_graph(keys: torch._C.DispatchKeySet, *flat: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & torch._C._after_autograd_keyset, *flat)

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, without_graph, "Autograd", with_keyset=True)
        torch.library.register_fake(f"rl_triton::{name}", fake, lib=_LIBRARY)
        torch.library.register_vmap(f"rl_triton::{name}", vmap, lib=_LIBRARY)

    # ------------------------------------------------------------------------------------------------- the operators

    def _arguments(self, flat: tuple[Any, ...]) -> dict[str, Any]:
        """Those of the public function, but for the defaults."""
        rest = iter(flat)
        given = [(p, p.join(rest)) for p in self.parameters]
        return {p.name: x for p, x in given if x is not p.default}

    def _new(self, *flat: Any) -> list[torch.Tensor]:
        with _Inside():
            return _leaves(self.public(**self._arguments(flat)))

    def _new_fake(self, *flat: Any) -> list[torch.Tensor]:
        return _leaves(self.function(**self._arguments(flat)))

    def _split_out(self, flat: tuple[Any, ...]) -> dict[str, Any]:
        out = flat[-self.n_results :]
        return self._arguments(flat[: -self.n_results]) | {"out": out[0] if self.structure is None else out}

    def _out(self, *flat: Any) -> None:
        with _Inside():
            self.public(**self._split_out(flat))

    def _out_fake(self, *flat: Any) -> None:
        self.function(**self._split_out(flat))

    def _differentiable(self, *flat: Any) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            return _leaves(self.function(**self._arguments(flat[:-1]), differentiable=True))
        return self.new(*flat[:-1])

    def _vmap(self, info: Any, in_dims: tuple[int | None, ...], *flat: Any) -> tuple[list[torch.Tensor], list[int]]:
        """The batch axis becomes the first of the rows."""
        rest, dims = iter(flat), iter(in_dims)
        batched: list[Any] = []
        n_axes = self._n_axes(flat, in_dims)
        for p in self.parameters:
            for _ in p.declare():
                x, dim = next(rest), next(dims)
                if isinstance(x, torch.Tensor):
                    if dim is not None:
                        x = x.movedim(dim, 0)
                        if p.kind == _FACTOR and x.dim() == 1 and n_axes:  # 0-d: a factor for each entry of the batch
                            x = x.reshape(-1, *[1] * n_axes)
                    elif p.kind == _FACTOR:
                        x = x.unsqueeze(0) if x.dim() else x
                    else:
                        x = x.expand(info.batch_size, *x.shape)
                elif p.name == "time_dim" and x >= 0:
                    x += 1
                batched.append(x)
        results = self.new(*batched)
        return results, [0] * len(results)

    def _n_axes(self, flat: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> int:
        """Axes of the flags, the batch's not counted: what a factor per step has, and `time_dim` counts."""
        at = self.names.index("done") if "done" in self.names else 0
        return flat[at].dim() - (in_dims[at] is not None)

    def _vmap_out(self, info: Any, in_dims: Any, *flat: Any) -> Any:
        raise ValueError(
            f"{self.name}: out was given under torch.vmap, which makes its results itself; pass out=None, or call "
            f"{self.name} without vmap, with the batch as one more axis of the arguments"
        )

    # -------------------------------------------------------------------------------------------------------- a call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.names, args))  # noqa: B905 - a surplus is found below
        fits = len(args) <= self.n_positional and all(name in self.names and name not in given for name in kwargs)
        given.update(kwargs)
        if given.get("next_values") is not None and given.get("last_values", _checks.REQUIRED) is _checks.REQUIRED:
            given["last_values"] = None
        flat: list[Any] = []
        for p in self.parameters:
            fits = fits and p.split(given.get(p.name, p.default), flat)
        out, differentiable = given.get("out"), given.get("differentiable", False)
        return_carry = bool(given.get(self.carry, False))
        if out is not None:
            outs = out if self.structure is not None else (out,)
            fits = fits and not differentiable and type(outs) is tuple and len(outs) == self.n_results
            fits = fits and all(isinstance(x, torch.Tensor) for x in outs)
        if not fits:
            return self.function(*args, **kwargs)  # an error, in its own words
        if out is not None and not return_carry:
            self.out(*flat, *outs)
            return out if self.structure is None else self.structure(*out)
        if not differentiable or not torch.is_grad_enabled():
            results = self.new(*flat)
        elif _compiling():
            results = self.differentiable(*flat, _CODE)
        else:
            return self.function(*args, **kwargs)  # tensor operators, which whatever looks on can follow
        if out is not None:
            for x, y in zip(outs, results):  # noqa: B905 - the carry is behind them
                x.copy_(y)
            results = [*outs, *results[self.n_results :]]
        if self.structure is tuple:
            return tuple(results)
        n = self.n_results
        result = results[0] if self.structure is None else self.structure(*results[:n])
        if not return_carry:
            return result
        return result, results[n] if len(results) == n + 1 else tuple(results[n:])


def _leaves(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else [leaf for part in x for leaf in _leaves(part)]


class _State(threading.local):
    inside = False


class _Inside:
    """In an operator's kernel: calls are not dispatched once more."""

    def __enter__(self) -> None:
        self.before, _state.inside = _state.inside, True

    def __exit__(self, *exc: object) -> None:
        _state.inside = self.before


_state = _State()
_operators: dict[str, _Operator] = {}


def register(public: Callable[..., Any], structure: type | None = None) -> None:
    """Make the operators of a function, whose results are a named tuple or one tensor; or, where they are a tuple of as
    many as are wanted, the first alone."""
    if structure not in (None, tuple) and hasattr(
        _pytree, "_register_namedtuple"
    ):  # by name, in programs that are saved
        _pytree._register_namedtuple(structure, serialized_type_name=f"rl_triton.{structure.__name__}")
    _operators[public.__name__] = _Operator(public, structure)


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A watched call of a public function."""
    operator = _operators.get(function.__name__)  # none, where a function is written with others
    if operator is None or (not _compiling() and _state.inside):
        return function(*args, **kwargs)
    return operator(args, kwargs)


def ordinary(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that no plan serves. Stand-ins for tensors outlive the mode that made them, and have no memory."""
    stands_in = any(isinstance(x, _checks.STAND_INS) for x in (*args, *kwargs.values()))
    return call(function, args, kwargs) if stands_in else function(*args, **kwargs)
