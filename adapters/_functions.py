"""`Patch` for functions that the modules of a framework bind by name and whose results are returned."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from rl_triton.adapters._patching import MARK, Patch

# Whether the library's operations are operators of PyTorch, which compilers, transforms and modes can follow.
TRACEABLE = hasattr(torch.ops.rl_triton, "gae")

TRACED = "torch.compile traces the framework's own code (counted once a trace)"
MISFIT = "arguments that rl_triton does not know"


class NotServedError(Exception):
    """The reason why a call goes to the framework's own function."""


class FunctionPatch(Patch):
    """A function in the namespace of one module. `serve(*args, **kwargs)` returns the result that the framework's
    function would, or raises `NotServedError`.

    A module that did `from elsewhere import function` has a binding, and a patch, of its own: what its code calls is
    looked up in its own namespace, whatever becomes of the module that the function came from.

    While torch.compile traces, it follows the code of `serve` if it can follow the library, and leaves a graph that
    counts nothing; else the framework's own function is traced, and each trace is counted.
    """

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self._traced(original, args, kwargs)
            if not self.wanted:
                return original(*args, **kwargs)
            try:
                result = self.serve(*args, **kwargs)
            except NotServedError as reason:
                self.count(str(reason))
                return original(*args, **kwargs)
            except TypeError:
                if _fits(self.serve, args, kwargs):
                    raise
                self.count(MISFIT)
                return original(*args, **kwargs)
            self.count(None)
            return result

        setattr(dispatcher, MARK, self.label)
        # Pickled by reference: the binding under this name is this function and no other.
        dispatcher.__module__ = self.owner.__name__
        return dispatcher

    def _traced(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if TRACEABLE and self.wanted:
            try:
                return self.serve(*args, **kwargs)
            except NotServedError:
                return original(*args, **kwargs)
        _note_trace(self)
        return original(*args, **kwargs)


def _fits(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@torch.compiler.assume_constant_result
def _note_trace(patch: FunctionPatch) -> None:
    """Dynamo runs this while it traces, and puts its result, None, in place of the call."""
    if patch.wanted:
        patch.count(TRACED)
