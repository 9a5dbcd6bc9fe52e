"""Which buffers are served, on which device, and who wants it.

The state lives here and not in the package's `__init__`, so that reloading that loses nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from rl_triton.adapters._patching import Patch, locked, locked_if_free
from rl_triton.adapters.sb3._behaviour import body_of, rollout_buffer_class
from rl_triton.adapters.sb3._compute import Body, serve
from rl_triton.adapters.sb3._terminal_values import FinalObservations, TerminalValues, withdraw_all

METHOD = "compute_returns_and_advantage"
NOT_SELECTED = "not a buffer of a model that was patched"
TERMINAL_VALUES = ("single", "batched")


class Scope:
    """One wish: for everything in the process, or for one model or buffer."""

    def __init__(self, model: Any, device: str | torch.device, terminal_values: str, persistent: bool) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"sb3.patch: device must be 'cpu' or a CUDA device, got {str(device)!r}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"sb3.patch: torch sees no CUDA device here, got device={str(device)!r}; pass 'cpu'")
        if terminal_values not in TERMINAL_VALUES:
            raise ValueError(f"sb3.patch: terminal_values must be 'single' or 'batched', got {terminal_values!r}")
        buffer_class = rollout_buffer_class()
        if not (model is None or isinstance(model, buffer_class) or hasattr(model, "rollout_buffer")):
            raise TypeError(
                f"sb3.patch: model must be an on-policy algorithm, a RolloutBuffer, or None for all of them, got "
                f"{type(model).__name__}"
            )
        self.model = None if model is None else weakref.ref(model, _end_dead)
        self.batched, self.persistent = terminal_values == "batched", persistent
        self.patches: list[Patch] = [BufferPatch.of(buffer_class)]
        if self.batched:
            self.patches += (TerminalValues.installed(_batches), FinalObservations.installed())

    @property
    def covers_all(self) -> bool:
        return self.model is None

    def is_of(self, model: Any) -> bool:
        """Whether it was made for this model, or for all (None)."""
        return self.model is None if model is None else self.model is not None and self.model() is model

    def has(self, x: Any) -> bool:
        """Whether a model or a buffer is covered."""
        if self.model is None:
            return True
        model = self.model()
        return model is not None and (model is x or getattr(model, "rollout_buffer", None) is x)

    @property
    def is_dead(self) -> bool:
        """Whether its model is gone."""
        return self.model is not None and self.model() is None

    def begin(self) -> None:
        with _changing(), contextlib.ExitStack() as undo:
            for patch in self.patches:
                patch.hold()
                undo.callback(patch.release)
            undo.pop_all()
            _set([*_scopes, self])

    def end(self) -> None:
        with _changing():
            if self not in _scopes:
                return
            _set([scope for scope in _scopes if scope is not self])
            for patch in self.patches:
                patch.release()
            if self.batched:
                withdraw_all()


_scopes: list[Scope] = []
_changes = 0
"""How deep in changes of them the thread is that holds the lock."""


def _renew_changes() -> None:
    global _changes
    _changes = 0


if hasattr(os, "register_at_fork"):  # that thread is not in the new process
    os.register_at_fork(after_in_child=_renew_changes)


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """The lock, under which scopes change; then those end whose models have gone meanwhile."""
    global _changes
    with locked():
        _changes += 1
        try:
            yield
        finally:
            _changes -= 1
            _end_dead()


def _end_dead(_: Any = None) -> None:
    """End the scopes of models that are gone. The garbage collector calls this at any moment, in the middle of a change
    too, or where another thread waits for this one: then whoever changes or asks next does it."""
    global _changes
    with locked_if_free() as free:
        if not free or _changes:
            return
        _changes += 1  # so that each end does not begin this anew
        try:
            for scope in _scopes:
                if scope.is_dead:
                    scope.end()
        finally:
            _changes -= 1


def _set(scopes: list[Scope]) -> None:
    """A new list each time, so that calls in other threads need no lock to read it. The last one that covers something
    decides; those for one model come behind those for all."""
    global _scopes
    _scopes = sorted(scopes, key=lambda scope: not scope.covers_all)


def _find(x: Any) -> Scope | None:
    """The scope whose options hold for a model or a buffer."""
    for scope in reversed(_scopes):
        if scope.has(x):
            return scope
    return None


def _batches(model: Any) -> bool:
    scope = _find(model)
    return scope is not None and scope.batched


class BufferPatch(Patch):
    """`compute_returns_and_advantage` of one class `RolloutBuffer`; reloading its module makes another."""

    body: Body
    _of: dict[type, BufferPatch] = {}  # noqa: RUF012

    def __init__(self, buffer_class: type) -> None:
        super().__init__(buffer_class, METHOD, self._serve)

    @classmethod
    def of(cls, buffer_class: type) -> BufferPatch:
        with locked():
            if buffer_class not in cls._of:
                cls._of[buffer_class] = cls(buffer_class)
            return cls._of[buffer_class]

    def apply(self) -> None:
        with locked():
            if self.installed is None:
                self.body = body_of(self.owner, self.owner.__dict__[METHOD])
            super().apply()

    def _serve(self, buffer: Any, last_values: Any = None, dones: Any = None, *rest: Any, **others: Any) -> str | None:
        scope = _find(buffer)
        if scope is None:
            _end_dead()
            return NOT_SELECTED
        if rest or others:
            return "arguments that Stable-Baselines3 does not have"
        try:
            return serve(buffer, last_values, dones, scope.device, self.body)
        except AttributeError as error:  # somebody calls the method on an object of another kind
            return f"not a rollout buffer: {error}"


def patch(model: Any = None, *, device: str | torch.device = "cpu", terminal_values: str = "single") -> None:
    """Compute advantages and returns of Stable-Baselines3's on-policy algorithms with `rl_triton.gae`.

    Replaces `RolloutBuffer.compute_returns_and_advantage` for the whole process: models that exist already follow, and
    subclasses that override the method are left alone (their `super()` call is served). Calling it again changes
    nothing but the options. Undo it with `unpatch()`, or use `with patched():`.

    Args:
        model: serve this model only (whatever buffer it has at the time of a call), or this buffer; all others run
            Stable-Baselines3's own code. Nothing is stored in the model, and the patch ends with it. Its options come
            before those for all.
        device: where to compute. "cpu" works on the numpy arrays in place and gives Stable-Baselines3's bits; a CUDA
            device copies there and back (within 1e-5 of the largest advantage), which pays for large buffers only.
            Arrays that are tensors are served where they are.
        terminal_values: "batched" evaluates the final observations of all environments that a time limit cut in a step
            in one call of the critic, in place of one call each; rewards agree to 1e-5. For A2C, PPO, TRPO and
            MaskablePPO. "single" leaves that to Stable-Baselines3.

    Raises:
        ImportError: Stable-Baselines3 is not installed.
        RuntimeError: the installed Stable-Baselines3 computes something else, or another copy of rl_triton patched it.
        TypeError: `model` has no rollout buffer.
        ValueError: an option that does not exist.
    """
    scope = Scope(model, device, terminal_values, persistent=True)
    with _changing():
        before = [other for other in _scopes if other.persistent and other.is_of(model)]
        scope.begin()
        for other in before:
            other.end()


def unpatch(model: Any = None) -> None:
    """Put Stable-Baselines3's own method back, or only stop serving one model. Does nothing if it is not patched."""
    with _changing():
        for scope in _scopes:
            if scope.persistent and (model is None or scope.is_of(model)):
                scope.end()


@contextlib.contextmanager
def patched(
    model: Any = None, *, device: str | torch.device = "cpu", terminal_values: str = "single"
) -> Iterator[None]:
    """`patch()` inside a `with` block. Blocks nest; the last one to end restores the identical original."""
    scope = Scope(model, device, terminal_values, persistent=False)
    scope.begin()
    try:
        yield
    finally:
        scope.end()


def is_patched(model: Any = None) -> bool:
    """Whether `RolloutBuffer`, as Stable-Baselines3 has it now, computes with rl_triton: for all, or for one model.

    False after Stable-Baselines3's module was reloaded, which makes a new class; `patch()` again.
    """
    _end_dead()
    patch = BufferPatch._of.get(rollout_buffer_class())
    if patch is None or not patch.active:
        return False
    return any(scope.covers_all if model is None else scope.has(model) for scope in _scopes)
