"""What an estimator is to the scan: coefficients, outputs and the state beyond a boundary, nothing else.

Every estimator of this package is one first-order affine recurrence over the steps of a window,

    X[t] = α[t] + β[t] X[t+1]        (backward in time; t-1 in place of t+1 where `reverse` is False).

An `Algorithm` says how the inputs of a step become (α, β) and how the scanned X becomes results. The skeleton
(`_scan.py` on a GPU, `_cpu.py` on a CPU) knows tiles, carries, layouts and boundaries, and no algorithm.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Forms(NamedTuple):
    """One definition for both backends: `kernel` acts on register tiles (@jit), `scalar` on one step (plain Python
    that numba compiles; it must keep the dtype of its arguments, so it names no float literal)."""

    kernel: Any
    scalar: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Algorithm:
    """An estimator, as the skeleton sees it. The kernel forms take `VARIANT`, a constant, as a last argument.

    coefficients(x, v_next, cut, factors) -> (α, β)
        x: the step's inputs; v_next: the value of its successor, 0 where terminated; cut: whether the recurrence
        stops here (the skeleton zeroes β there itself); factors: gamma, lambda and the like.
    target(x, v_next, cut, state_next, factors)
        with `lookahead` 2: a quantity of the step whose value at the next valid step the outputs need.
    outputs(x, state, ahead, factors) -> results of the step, a tuple
        ahead = (v_next, v_follow, cut, state_next, target_next): v_follow is V of the next valid step (v_next at the
        window's edge); state_next and target_next, X and the target one step on, exist with `lookahead` 1 and 2.
        Where the scan runs forward, state_next is X one step before: the neighbour that the recurrence reads.
        With the boundary `Predecessors`, v_next is the kind of what follows the step.
    beyond(v) -> the state just beyond a boundary whose successor has value v
        (scalar form: beyond(v, zero)).
    """

    name: str
    coefficients: Forms
    outputs: Forms
    beyond: Forms
    target: Forms | None = None
    lookahead: int = 0
    reverse: bool = True
    variant: tuple[str, ...] = ()
    """Which of several forms of the equations; the scalar forms are made for it."""
    code: int = 0
    """The variant as the kernel forms know it (a tuple of strings is no constant in every Triton version)."""

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the scalar code, so that a compiled loop on disk is never older than its source."""
        forms = (self.coefficients, self.outputs, self.beyond, self.target)
        files = sorted({inspect.getfile(form.scalar) for form in forms if form is not None})
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


class Expectation(NamedTuple):
    """In place of a per-step tensor: Σ_a probs[.., a] values[.., a], reduced as it is loaded or before."""

    values: Any
    probs: Any


class Taken(NamedTuple):
    """In place of a per-step tensor: table[.., actions[..]], picked as it is loaded."""

    table: Any
    actions: Any


class Problem(NamedTuple):
    """A validated call, ready for either backend. Nothing in it has been copied."""

    algorithm: Algorithm
    shape: torch.Size
    """Shape of every per-step tensor."""
    time_dim: int
    """Position of the time axis in `shape`, not negative."""
    inputs: tuple[Any, ...]
    """Per-step tensors (or `Taken`), in the order in which `coefficients` unpacks them; None is zero."""
    factors: tuple[float | torch.Tensor | None, ...]
    """Floats, or tensors expanded to `shape`. None: the product of the factors before it."""
    boundary: Any
    """`Successors`, `Predecessors`, `Resets` or `Unbounded` of boundaries.py."""
    initial: tuple[torch.Tensor | None, torch.Tensor | None]
    """State and target one step past the window (before it, where the scan runs forward), one per row; None: closed."""
    outputs: tuple[torch.Tensor | None, ...]
    """Where the results go, each of `shape`; None: nobody wants that one. Behind those there may be some with one entry
    per row: they get what the scan says at its last step."""
    final: tuple[torch.Tensor | None, torch.Tensor | None]
    """Where the last scanned state and target go, one per row, or None."""
    dtype: torch.dtype
    """Arithmetic: float32, or float64 if the result is."""
    window: int | None = None
    """Steps to look ahead, where the problem is the n-step window and no scan."""

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The outputs that are wanted."""
        return tuple([y for y in self.outputs if y is not None])
