"""Which advantages the installed Stable-Baselines3 computes, found out by running it.

Its source may change while its results do not, and a function that somebody put in its place counts as well. So it is
run once on random data and compared with the two bodies that this adapter knows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_triton import _backend
from rl_triton.adapters.sb3._compute import FLOAT32, FLOAT64, Body, serve

TESTED_VERSIONS = "2.0.0, 2.3.2, 2.4.1, 2.6.0 and 2.9.2"
_CPU = torch.device("cpu")


def rollout_buffer_class() -> Any:
    """`RolloutBuffer` as Stable-Baselines3 has it now."""
    try:
        from stable_baselines3.common import buffers
    except ImportError as error:
        raise ImportError("rl_triton.adapters.sb3 needs Stable-Baselines3: pip install 'rl-triton[sb3]'") from error
    return buffers.RolloutBuffer


def _filled(buffer_class: Any) -> tuple[Any, torch.Tensor, np.ndarray]:
    """(buffer, last_values, dones), the same each time."""
    import gymnasium

    rng = np.random.default_rng(0)
    n_steps, n_envs = 67, 5
    box = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = buffer_class(n_steps, box, box, device="cpu", gae_lambda=0.9, gamma=0.95, n_envs=n_envs)
    buffer.rewards[...], buffer.values[...] = rng.normal(size=(2, n_steps, n_envs))
    buffer.episode_starts[...] = rng.random((n_steps, n_envs)) < 0.1
    last_values = torch.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32))
    return buffer, last_values, np.array([True, False, False, True, False])


@functools.lru_cache(maxsize=32)
def body_of(buffer_class: Any, method: Callable[..., Any]) -> Body:
    """The body that `method`, the class's `compute_returns_and_advantage`, has.

    Raises:
        RuntimeError: it has neither.
    """
    theirs, last_values, dones = _filled(buffer_class)
    error: Exception | None = None
    try:
        method(theirs, last_values, dones)
    except Exception as raised:
        error = raised
    ours = {}
    for body in (FLOAT32, FLOAT64):
        mine, last_values, dones = _filled(buffer_class)
        ours[body] = mine
        with _backend.backend("auto"):  # one that is forced may not serve the host, or rounds otherwise
            reason = serve(mine, last_values, dones, _CPU, body)
        if error is None and reason is None and _agree(theirs, mine, np.array_equal):
            return body
    version = _version()
    if error is not None or not _agree(theirs, ours[FLOAT32], functools.partial(np.allclose, rtol=1e-4, atol=1e-4)):
        raise RuntimeError(
            f"Stable-Baselines3 {version} does not compute the advantages that rl_triton.adapters.sb3 knows (tested "
            f"with {TESTED_VERSIONS}); it is left as it is"
        ) from error
    warnings.warn(
        f"Stable-Baselines3 {version} rounds its advantages in a way that rl_triton does not know; results agree to "
        "float32 accuracy, not to the bit",
        stacklevel=6,
    )
    return FLOAT32


def _agree(theirs: Any, ours: Any, equal: Callable[..., bool]) -> bool:
    return all(equal(getattr(theirs, name), getattr(ours, name)) for name in ("advantages", "returns"))


def _version() -> str:
    import stable_baselines3

    return stable_baselines3.__version__
