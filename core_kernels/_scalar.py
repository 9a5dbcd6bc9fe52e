"""What the scalar twins of the kernels' functions are written with. Plain Python; numba compiles it into the loops."""

from __future__ import annotations

from typing import Any


def scaled(factor: Any, x: Any) -> Any:
    """factor * x, where a zero factor does not read x (0 * inf never appears)."""
    return factor * x if factor != 0 else factor


def clipped(x: Any, bar: Any) -> Any:
    """min(x, bar), but NaN stays visible."""
    return bar if x > bar else x


def where(condition: bool, yes: Any, no: Any) -> Any:
    """yes if condition else no, both formed: what a compiler takes for a branch on a number keeps it from working on
    several rows at once."""
    return yes if condition else no


def one(x: Any) -> Any:
    """1, in the dtype of x."""
    return type(x)(1)
