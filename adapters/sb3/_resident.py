"""What the buffers of tensors share: data that follow `device`, and steps that are stored as numpy would store them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from rl_triton.adapters.sb3._compute import is_finite

_CPU = torch.device("cpu")


class Resident:
    """Mixin: every tensor that the object holds, itself or in a dictionary, lies on `device`.

    Assigning to `device` moves them; `load_replay_buffer` of Stable-Baselines3 does so. A pickle holds them on the
    host, so that one from a GPU opens where there is none, and there `device` is the host.
    """

    @property
    def device(self) -> torch.device:
        return self.__dict__["device"]

    @device.setter
    def device(self, device: str | torch.device) -> None:
        device = torch.device(device)
        self.__dict__.update(_moved(self.__dict__, device))
        self.__dict__["device"] = device  # as in any buffer, so that pickles look alike

    def __getstate__(self) -> dict[str, Any]:
        return _moved(self.__dict__, _CPU)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        device = state["device"]
        here = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
        self.device = device if here else _CPU


def _moved(x: Any, device: torch.device) -> Any:
    if type(x) is dict:
        return {key: _moved(part, device) for key, part in x.items()}
    return x.to(device) if isinstance(x, torch.Tensor) else x


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype, device=_CPU).numpy().dtype


def as_tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without a graph, of the same memory where that may be. What is no tensor takes the dtype, if one is
    given, as numpy would convert it: torch does not take every array."""
    if isinstance(x, torch.Tensor):
        return x.detach()
    x = np.asarray(x, None if dtype is None else _numpy_dtype(dtype), order="C")
    return torch.from_numpy(x if x.flags.carray else x.copy())


def store(name: str, row: torch.Tensor, x: Any, *, reshape: bool = False) -> None:
    """Write x to one step of a field. It broadcasts as numpy's assignment does, which is how Stable-Baselines3 stores:
    leading axes may lack, or be of size one and too many. With `reshape` only the number of entries counts.

    Raises ValueError for another shape.
    """
    x = given = as_tensor(x, row.dtype)
    if reshape and x.numel() == row.numel():
        x = x.reshape(row.shape)
    while x.dim() > row.dim() and x.shape[0] == 1:
        x = x[0]
    fits = x.dim() <= row.dim() and all(
        n in (1, m) for n, m in zip(reversed(x.shape), reversed(row.shape), strict=False)
    )
    if not fits or (reshape and x.shape != row.shape):
        rule = "have the entries of" if reshape else "broadcast to"
        raise ValueError(
            f"{name} must {rule} one step of all environments, shape {list(row.shape)}, got shape "
            f"{list(given.shape)}: reshape it to that"
        )
    row.copy_(x)


def edge(name: str, x: Any, n_envs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One entry for each environment: x flattened, or a single one for all."""
    row = torch.empty(n_envs, dtype=dtype, device=device)
    store(name, row, as_tensor(x, dtype).reshape(-1))
    return row


def factor(owner: Any, name: str) -> Any:
    """γ or λ of a buffer, a Python number or a tensor.

    Raises ValueError for a number that is not finite: selecting would hide it behind the ends of episodes.
    """
    x = getattr(owner, name)
    x = x.item() if isinstance(x, np.generic) else x
    if isinstance(x, (int, float)) and not is_finite(x):
        raise ValueError(f"{type(owner).__name__}: {name} must be finite in float32, got {x}; assign another to it")
    return x
