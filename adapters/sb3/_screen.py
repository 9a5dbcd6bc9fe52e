"""What the library does not serve and only the data tell, found in one pass."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

CLEAN, FLAGS, NOT_FINITE = 0, 1, 2

# Bits of float32, so that a compiler can look at several numbers at once.
_ONE = np.int32(0x3F800000)
_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)


def _look(starts, last_values, returns):
    starts, last_values, returns = starts.view(np.int32), last_values.view(np.int32), returns.view(np.int32)
    fractional, infinite = np.int32(0), np.int32(0)
    for i in range(last_values.shape[0]):
        infinite |= np.int32((last_values[i] & _EXPONENT) == _EXPONENT)
    for t in range(returns.shape[0]):
        for i in range(returns.shape[1]):
            infinite |= np.int32((returns[t, i] & _EXPONENT) == _EXPONENT)
    for t in range(1, starts.shape[0]):
        for i in range(starts.shape[1]):
            start = starts[t, i]
            fractional |= np.int32(((start & _MAGNITUDE) != 0) & (start != _ONE))
    if fractional:
        return FLAGS
    return NOT_FINITE if infinite else CLEAN


def compiled(function: Any, signatures: list[str]) -> Any:
    """The function by numba, for these types."""
    from numba import njit  # when it is needed: importing an adapter costs nothing

    try:
        return njit(signatures, cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no directory to store the loop in: compile it anew in each process
        return njit(signatures, nogil=True)(function)


@functools.cache
def _compiled() -> Any:
    forms = ("float32[:, ::1], float32[::1], float32[:, ::1]", "float32[:, :], float32[:], float32[:, :]")
    return compiled(_look, [f"int64({form})" for form in forms])


def screen(starts: np.ndarray, last_values: np.ndarray, returns: np.ndarray) -> int:
    """CLEAN; FLAGS if an entry of starts[1:] is neither 0 nor 1; NOT_FINITE if one of the others is inf or NaN.

    float32 of shapes [T, N], [N] and [T, N]. A reward or value that is not finite shows in the return of its own step.
    """
    return _compiled()(starts, last_values, returns)
