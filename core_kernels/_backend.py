"""Which of the two backends runs a call: Triton for CUDA tensors, numba for CPU tensors, or the one that is forced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from rl_triton._algorithm import Problem
from rl_triton._triton import triton

_NAMES = ("auto", "triton", "cpu")


def _known(name: str, origin: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"{origin} must be one of {', '.join(map(repr, _NAMES))}, got {name!r}")
    return _NAMES[_NAMES.index(name)]  # the same object for each: settings are compared by identity


_default = _known(os.environ.get("RL_TRITON_BACKEND", "auto"), "RL_TRITON_BACKEND")
_chosen: ContextVar[str] = ContextVar("rl_triton_backend", default=_default)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend inside a `with` block: `"triton"`, `"cpu"`, or `"auto"` for the choice by device.

    The setting is local to the thread or task. `RL_TRITON_BACKEND`, read at import, sets the default of a process.
    `"triton"` serves CPU tensors only in Triton's interpreter (set TRITON_INTERPRET=1 before triton is imported).

    Raises ValueError for another name, and in the block for a call whose tensors the backend cannot serve.
    """
    token = _chosen.set(_known(name, "backend"))
    try:
        yield
    finally:
        _chosen.reset(token)


chosen = _chosen.get
"""The setting in force: "auto", "triton" or "cpu"."""


def runs_kernels(op: str, device: torch.device) -> bool:
    """Whether tensors on a device are served by the Triton kernels, and not by the CPU backend. ValueError where the
    backend that is forced cannot serve them, or the one that could is not installed."""
    forced = _chosen.get()
    if device.type == "cuda":
        if forced == "cpu":
            raise ValueError(
                f"{op}: the backend is forced to 'cpu', but the tensors are on {device}; move them with .cpu(), or "
                "leave the block of rl_triton.backend('cpu')"
            )
        if triton is None:
            raise ValueError(f"{op}: the tensors are on {device}, and CUDA tensors need triton: pip install triton")
        return True
    if forced != "triton":
        return False
    if triton is None or not _interpreting():
        raise ValueError(
            f"{op}: the backend is forced to 'triton', but the tensors are on the CPU; move them to a GPU, or set "
            "TRITON_INTERPRET=1 before triton is imported to run kernels in its interpreter"
        )
    return True


def _interpreting() -> bool:
    from rl_triton._launch import interpreting

    return interpreting()


def run(problem: Problem) -> None:
    """Fill the problem's outputs on the backend that serves its device."""
    if runs_kernels(problem.algorithm.name, problem.written[0].device):
        from rl_triton import _launch

        _launch.run(problem)
    else:
        from rl_triton import _cpu

        _cpu.run(problem)
