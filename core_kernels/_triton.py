"""Triton where it is installed; where it is not (macOS, Windows), importing the package still works.

Kernels are written against `jit` and `tl` of this module. Without Triton `jit` leaves a function as it is, nothing
ever launches it, and CPU tensors run through the numba backend as usual.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language.extra import libdevice
except ImportError:
    triton = libdevice = None
    tl: Any = None  # type: ignore[no-redef]

    def jit(fn: Any) -> Any:
        return fn


def constant(x: Any) -> Any:
    """A module's constant, in the form that kernels can read."""
    return x if tl is None else tl.constexpr(x)


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter (TRITON_INTERPRET=1 was set before triton was imported)."""
    return triton is not None and not isinstance(kernel, triton.runtime.jit.JITFunction)


__all__ = ["constant", "interpreted", "jit", "libdevice", "tl", "triton"]
