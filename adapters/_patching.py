"""How an adapter replaces one attribute of a framework: exactly reversible, counted, and never twice."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

MARK = "_rl_triton_patch"

# What is patched is still patched when this module is reloaded.
_lock = globals().get("_lock") or threading.RLock()
_entries: list[Entry] = globals().get("_entries", [])
# The patch of every dispatcher that anybody still holds.
_made: weakref.WeakKeyDictionary[Any, Patch] = globals().get("_made") or weakref.WeakKeyDictionary()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may have held it when this process was forked
    os.register_at_fork(after_in_child=_renew_lock)


def locked() -> contextlib.AbstractContextManager[Any]:
    """The lock under which adapters change what is patched: `with locked():`."""
    return _lock


@contextlib.contextmanager
def locked_if_free() -> Iterator[bool]:
    """The lock, but without waiting for it: yields whether it was free, or is this thread's own."""
    lock = _lock
    free = lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            lock.release()


def patch_of(function: Any) -> Patch | None:
    """The patch whose dispatcher this is."""
    return _made.get(function) if isinstance(function, FunctionType) else None


def patch_under(function: Any) -> Patch | None:
    """The patch whose dispatcher this is, or wraps."""
    return next((patch for part in _chain(function) if (patch := patch_of(part)) is not None), None)


def framework_function(function: Any) -> Any:
    """What our dispatcher stands in for, if this is one or wraps one; else the function itself."""
    return next((part.__wrapped__ for part in _chain(function) if patch_of(part) is not None), function)


def restore_bindings() -> None:
    """Give the framework's function to every module that bound, under whatever name, a dispatcher that nobody wants any
    more: it was imported while the patch was in force, or ran its own imports again."""
    with _lock:
        # Mostly none: nothing holds a dispatcher whose patch is undone but who bound it. One that is still installed is
        # under somebody's wrapper, which reaches it by whatever name.
        idle = {
            id(function): function
            for function, patch in list(_made.items())
            if not patch.wanted and patch.installed is not function
        }
        if not idle:
            return
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, bound in list(vars(module).items()):
                    if id(bound) in idle:
                        setattr(module, name, bound.__wrapped__)


def _chain(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


class Entry:
    """What `status()` reports under one label: calls served, and calls handed to the framework, by reason."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.served = 0
        self.fallen_back: Counter[str] = Counter()
        with _lock:
            _entries.append(self)

    @property
    def active(self) -> bool:
        return True

    def count(self, reason: str | None) -> None:
        """One call: served if `reason` is None."""
        with _lock:
            if reason is None:
                self.served += 1
            else:
                self.fallen_back[reason] += 1


class Patch(Entry):
    """One attribute of a framework, replaced by a dispatcher while anybody wants it.

    The dispatcher asks `serve(*args, **kwargs)` first. That returns None when it did the work, or the reason why it
    did not; then the framework's own function runs. The dispatcher looks at the patch's state in every call, so a
    bound method that somebody took while the patch was on goes back to the framework's function when it is off.
    """

    def __init__(self, owner: type | ModuleType, name: str, serve: Callable[..., Any]) -> None:
        super().__init__(f"{_dotted(owner)}.{name}")
        self.owner, self.name, self.serve = owner, name, serve
        self.installed: Any = None
        self.original: Any = None
        self.found: Any = None  # the original, or the dispatcher of the module that this one imports it from
        self.persistent = False
        self.depth = 0

    def __getstate__(self) -> dict[str, Any]:
        """A dispatcher that is no longer where its name says is pickled by value, if at all, and with it this. Wherever
        it is loaded, nobody wants the copy."""
        return {**vars(self), "persistent": False, "depth": 0, "installed": None, "found": None}

    @property
    def wanted(self) -> bool:
        return self.persistent or self.depth > 0

    @property
    def active(self) -> bool:
        """The dispatcher is in place (or under somebody's later wrapper) and serves."""
        return self.wanted and self.in_place

    @property
    def in_place(self) -> bool:
        return self.installed is not None and self._stands_on(self.owner.__dict__[self.name], self.installed)

    def apply(self) -> None:
        """Install the dispatcher, once however often it is asked for."""
        with _lock:
            current = self.owner.__dict__[self.name]
            if self.in_place:
                return
            if self.installed is not None and current is not self.original and not self._renewed(current):
                warnings.warn(
                    f"{self.label} was replaced after rl_triton patched it; the replacement is left in place",
                    stacklevel=4,
                )
                return
            other = patch_of(current)
            rival = other is not None and other is not self and other.owner is self.owner and other.wanted
            original = current if other is None or rival else framework_function(current)
            if any(getattr(function, MARK, None) is not None for function in _chain(original)):
                raise RuntimeError(f"{self.label} is already patched by another copy of rl_triton; unpatch that one")
            self.found, self.original = current, original
            self.installed = self._dispatcher(original)
            _made[self.installed] = self
            setattr(self.owner, self.name, self.installed)

    def undo(self) -> None:
        """Put the identical original back once nobody wants the patch. A wrapper that somebody put over the dispatcher
        stays, and reaches the original through it."""
        with _lock:
            if self.wanted or self.installed is None:
                return
            current = self.owner.__dict__[self.name]
            if current is self.original or self._renewed(current):
                below = self.found if current is self.installed else current
                patch = patch_of(below)
                setattr(self.owner, self.name, below if patch is None or patch.wanted else framework_function(below))
                self.installed = self.found = None
            else:
                warnings.warn(
                    f"{self.label} was wrapped after rl_triton patched it; the wrapper is left in place and now calls "
                    "the framework's own function",
                    stacklevel=4,
                )

    def _renewed(self, current: Any) -> bool:
        """Whether the framework's own module was run again and put `current` in this place: the same definition once
        more, or what it imports from a module that is patched."""
        if patch_of(current) is not None:
            return True
        return (
            isinstance(current, FunctionType)
            and current.__globals__ is getattr(self.original, "__globals__", None)
            and current.__qualname__ == self.original.__qualname__
        )

    @staticmethod
    def _stands_on(function: Any, dispatcher: Any) -> bool:
        return any(part is dispatcher for part in _chain(function))

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            # A traced call is the framework's own: what it counts and caches has no place in a graph.
            if self.wanted and not torch.compiler.is_compiling():
                reason = self.serve(*args, **kwargs)
                self.count(reason)
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

    def hold(self) -> None:
        """Want the patch once more; each `hold` needs a `release`."""
        with _lock:
            self.apply()
            self.depth += 1

    def release(self) -> None:
        with _lock:
            self.depth -= 1
            self.undo()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.release()


class Hook(Patch):
    """A method that runs as it is, after `serve(*args, **kwargs)` has seen its arguments and counted what it did."""

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            if self.wanted and not torch.compiler.is_compiling():
                self.serve(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(dispatcher, MARK, self.label)
        return dispatcher


def _dotted(owner: type | ModuleType) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def status() -> dict[str, dict[str, Any]]:
    """What is patched and what it did, by the dotted name of the replaced attribute.

    Each entry holds `active` (bool), `served` (calls that rl_triton computed) and `fallen_back` (calls handed to the
    framework's own code, by reason). Where a module was reloaded, `active` speaks of the class that it has now.
    """
    report: dict[str, dict[str, Any]] = {}
    with _lock:
        for entry in _entries:
            before = report.get(entry.label, {"served": 0, "fallen_back": {}})
            report[entry.label] = {
                "active": entry.active,
                "served": before["served"] + entry.served,
                "fallen_back": dict(Counter(before["fallen_back"]) + entry.fallen_back),
            }
    return report
