"""The loops of calls made before, for rollouts of the same sizes.

A short rollout is computed in less time than its arrays are wrapped as tensors and looked at. A loop that is kept holds
sizes, strides and factors, and no array: the next rollout has others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_triton import _backend, _checks, _library, _plan
from rl_triton.adapters.sb3._screen import compiled


class Kind:
    """Calls with the same sizes and factors, on arrays that `addresses_of` serves."""

    def __init__(self) -> None:
        self.loop: Any = None
        self.tried = False

    def keep(self, call: Callable[[], Any], tensors: list[torch.Tensor]) -> None:
        """Make a call by the ordinary path of `rl_triton.gae`, and keep its loop."""
        from rl_triton import _cpu  # when it is needed: importing an adapter costs nothing

        self.loop = _cpu.kept_loop(call, tensors)
        self.tried = True


@functools.lru_cache(maxsize=64, typed=True)
def _kind(n_steps: int, n_envs: int, gamma: float, gae_lambda: float) -> Kind:
    return Kind()


def kind_of(n_steps: int, n_envs: int, gamma: float, gae_lambda: float) -> Kind | None:
    """What is kept of calls with these sizes and factors; None where a call is to be seen or to be checked, or where
    another backend is to run it."""
    if not _plan.ENABLED or _checks.READS_DATA or _backend.chosen() == "triton" or _library.watched():
        return None
    return _kind(n_steps, n_envs, gamma, gae_lambda)


def forget() -> None:
    """Keep nothing of the calls made so far."""
    _kind.cache_clear()


def _locate(rewards, values, starts, last_values, dones, advantages, returns):
    places = (
        rewards.ctypes.data,
        values.ctypes.data,
        starts.ctypes.data,
        last_values.ctypes.data,
        dones.ctypes.data,
        advantages.ctypes.data,
        returns.ctypes.data,
    )
    sizes = (rewards.nbytes, values.nbytes, starts.nbytes, last_values.nbytes, dones.nbytes)
    first, end = places[5], places[5] + advantages.nbytes
    for i in range(5):
        if first < places[i] + sizes[i] and places[i] < end:
            return None
    return places


@functools.cache
def _addresses() -> Any:
    rows, edge, flags = "float32[:, ::1]", "float32[::1]", "boolean[::1]"
    return compiled(_locate, [f"({', '.join((rows, rows, rows, edge, flags, rows, rows))})"])


def addresses_of(*arrays: np.ndarray) -> tuple[int, ...] | None:
    """Where rewards, values, episode_starts, last_values, dones, advantages and returns begin, each C-contiguous and
    float32, but bool for dones; None if advantages, which are written to, share memory with one that is read. Returns
    are new."""
    return _addresses()(*arrays)
