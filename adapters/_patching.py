"""How an adapter replaces one attribute of a framework: exactly reversible, counted, and never twice."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MARK = "_rl_triton_patch"

_lock = threading.RLock()
_patches: dict[str, Patch] = {}


class Patch:
    """One attribute of a framework, replaced by a dispatcher while anybody wants it.

    The dispatcher asks `serve(*args, **kwargs)` first. That returns None when it did the work, or the reason why it
    did not; then the framework's own function runs. The dispatcher looks at the patch's state in every call, so a
    bound method that somebody took while the patch was on goes back to the framework's function when it is off.
    """

    def __init__(self, owner: type | ModuleType, name: str, serve: Callable[..., Any]) -> None:
        self.owner, self.name, self.serve = owner, name, serve
        self.label = f"{_dotted(owner)}.{name}"
        self.served = 0
        self.fallen_back: Counter[str] = Counter()
        self.installed: Any = None
        self.original: Any = None
        self.persistent = False
        self.depth = 0
        _patches[self.label] = self

    @property
    def wanted(self) -> bool:
        return self.persistent or self.depth > 0

    @property
    def active(self) -> bool:
        """The dispatcher is in place (or under somebody's later wrapper) and serves."""
        return self.wanted and self.installed is not None

    def apply(self) -> None:
        """Install the dispatcher, once however often it is asked for."""
        with _lock:
            current = self.owner.__dict__[self.name]
            if self.installed is not None and self._stands_on(current, self.installed):
                return
            if getattr(current, MARK, None) is not None:
                raise RuntimeError(f"{self.label} is already patched by another copy of rl_triton; unpatch that one")
            self.original = current
            self.installed = self._dispatcher(current)
            setattr(self.owner, self.name, self.installed)

    def undo(self) -> None:
        """Put the identical original back once nobody wants the patch. A wrapper that somebody put over the dispatcher
        stays, and reaches the original through it."""
        with _lock:
            if self.wanted or self.installed is None:
                return
            if self.owner.__dict__[self.name] is self.installed:
                setattr(self.owner, self.name, self.original)
                self.installed = None
            else:
                warnings.warn(
                    f"{self.label} was wrapped after rl_triton patched it; the wrapper is left in place and now calls "
                    "the framework's own function",
                    stacklevel=3,
                )

    @staticmethod
    def _stands_on(function: Any, dispatcher: Any) -> bool:
        while function is not None:
            if function is dispatcher:
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            if self.wanted:
                reason = self.serve(*args, **kwargs)
                with _lock:
                    if reason is None:
                        self.served += 1
                    else:
                        self.fallen_back[reason] += 1
                if reason is None:
                    return None
            return original(*args, **kwargs)

        setattr(dispatcher, MARK, self.label)
        return dispatcher

    def on(self) -> None:
        with _lock:
            self.apply()
            self.persistent = True

    def off(self) -> None:
        with _lock:
            self.persistent = False
            self.undo()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with _lock:
            self.apply()
            self.depth += 1
        try:
            yield
        finally:
            with _lock:
                self.depth -= 1
                self.undo()


def _dotted(owner: type | ModuleType) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def status() -> dict[str, dict[str, Any]]:
    """What is patched and what it did, by the dotted name of the replaced attribute.

    Each entry holds `active` (bool), `served` (calls that rl_triton computed) and `fallen_back` (calls handed to the
    framework's own code, by reason).
    """
    with _lock:
        return {
            label: {"active": patch.active, "served": patch.served, "fallen_back": dict(patch.fallen_back)}
            for label, patch in _patches.items()
        }
