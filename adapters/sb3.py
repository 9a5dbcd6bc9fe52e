"""Stable-Baselines3: advantages and returns of every on-policy algorithm, by one patch.

`RolloutBuffer.compute_returns_and_advantage` is the one function behind A2C, PPO, TRPO, RecurrentPPO and MaskablePPO,
and no class in Stable-Baselines3 or sb3-contrib overrides it. It reads `episode_starts` (row t starts an episode, so
row t-1 ended one) and the flags of the last step; a time limit is already folded into the rewards by the collector. So
the translation is `rl_triton.gae` with `flags_at="start"` and nothing else.

The buffer's arrays stay numpy. On the CPU the results have the same bits as the float32 body of Stable-Baselines3 2.4
and later. Calls that the library does not serve run Stable-Baselines3's own code and are counted with the reason in
`rl_triton.adapters.status()`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch

import rl_triton as rlt
from rl_triton.adapters._patching import Patch

if TYPE_CHECKING:
    from stable_baselines3.common.buffers import RolloutBuffer

TESTED_VERSIONS = "2.9"

_ARRAYS = ("rewards", "values", "episode_starts", "advantages")
_patches: dict[type, Patch] = {}
_device = torch.device("cpu")


def patch(*, device: str | torch.device = "cpu") -> None:
    """Compute advantages and returns of every Stable-Baselines3 on-policy algorithm with `rl_triton.gae`.

    Replaces `RolloutBuffer.compute_returns_and_advantage` for the whole process: models that exist already follow, and
    subclasses that override the method are left alone (their `super()` call is served). Calling it again changes
    nothing but the device. Undo it with `unpatch()`, or use `with patched():`.

    Args:
        device: where to compute. "cpu" works on the numpy arrays in place and gives Stable-Baselines3's bits; a CUDA
            device copies there and back (within 1e-5 of the largest advantage), which pays for large buffers only.

    Raises:
        ImportError: Stable-Baselines3 is not installed.
        RuntimeError: the installed Stable-Baselines3 computes something else, or another copy of rl_triton patched it.
    """
    _target(device).on()


def unpatch() -> None:
    """Put Stable-Baselines3's own method back. Does nothing if it is not patched."""
    for existing in _patches.values():
        existing.off()


@contextlib.contextmanager
def patched(*, device: str | torch.device = "cpu") -> Iterator[None]:
    """`patch()` inside a `with` block. Blocks nest; the last one to end restores the identical original."""
    before = _device
    target = _target(device)
    try:
        with target.scope():
            yield
    finally:
        _use(before)


def is_patched() -> bool:
    """Whether `RolloutBuffer`, as Stable-Baselines3 has it now, computes with rl_triton."""
    buffer_class = _rollout_buffer()
    return buffer_class in _patches and _patches[buffer_class].active


def _use(device: str | torch.device) -> None:
    global _device
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"sb3.patch: device must be 'cpu' or a CUDA device, got {str(device)!r}")
    _device = device


def _rollout_buffer() -> type[RolloutBuffer]:
    try:
        from stable_baselines3.common import buffers
    except ImportError as error:
        raise ImportError("rl_triton.adapters.sb3 needs Stable-Baselines3: pip install 'rl-triton[sb3]'") from error
    return buffers.RolloutBuffer


def _target(device: str | torch.device) -> Patch:
    buffer_class = _rollout_buffer()
    _use(device)
    if buffer_class not in _patches:
        _check_behaviour(buffer_class)
        _patches[buffer_class] = Patch(buffer_class, "compute_returns_and_advantage", _serve)
    return _patches[buffer_class]


def _check_behaviour(buffer_class: type[RolloutBuffer]) -> None:
    """Compare with the installed body on random data, once: its source may change, its results may not."""
    import gymnasium
    import stable_baselines3

    rng = np.random.default_rng(0)
    n_steps, n_envs = 17, 3
    box = gymnasium.spaces.Box(-1, 1, (1,))

    def filled() -> RolloutBuffer:
        buffer = buffer_class(n_steps, box, box, gae_lambda=0.9, gamma=0.95, n_envs=n_envs)
        for name in ("rewards", "values", "episode_starts"):
            getattr(buffer, name)[...] = data[name]
        return buffer

    data = {name: rng.normal(size=(n_steps, n_envs)).astype(np.float32) for name in ("rewards", "values")}
    data["episode_starts"] = (rng.random((n_steps, n_envs)) < 0.3).astype(np.float32)
    last_values = torch.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32))
    dones = np.array([True, False, False])

    theirs, ours = filled(), filled()
    theirs.compute_returns_and_advantage(last_values, dones)
    reason = _serve(ours, last_values, dones)
    version = stable_baselines3.__version__
    pairs = [(getattr(theirs, name), getattr(ours, name)) for name in ("advantages", "returns")]
    if reason is not None or not all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs):
        raise RuntimeError(
            f"Stable-Baselines3 {version} does not compute the advantages that rl_triton.adapters.sb3 knows (tested "
            f"with {TESTED_VERSIONS}); it is left as it is. {reason or ''}"
        )
    if _device.type == "cpu" and not all(np.array_equal(a, b) for a, b in pairs):
        warnings.warn(
            f"Stable-Baselines3 {version} rounds its advantages otherwise than rl_triton (versions before 2.4 carry "
            "float64); results agree to float32 accuracy, not to the bit",
            stacklevel=4,
        )


def _serve(buffer: RolloutBuffer, last_values: torch.Tensor, dones: np.ndarray) -> str | None:
    """Do the work of `compute_returns_and_advantage`, or return the reason why Stable-Baselines3 should."""
    reason = _unsupported(buffer, last_values, dones)
    if reason is not None:
        return reason
    device = _device
    last = last_values.detach().cpu().reshape(-1)
    returns = np.empty_like(buffer.advantages)
    results = torch.from_numpy(buffer.advantages), torch.from_numpy(returns)
    given = *map(torch.from_numpy, (buffer.rewards, buffer.values, buffer.episode_starts, dones)), last
    on_device = device.type != "cpu"
    if on_device:
        given = tuple(x.to(device) for x in given)
    rewards, values, starts, last_done, edge_values = given
    try:
        computed = rlt.gae(
            rewards,
            values,
            starts,
            last_values=edge_values,
            last_done=last_done,
            flags_at="start",
            gamma=buffer.gamma,
            lambda_=buffer.gae_lambda,
            time_dim=0,
            out=None if on_device else results,
        )
    except (TypeError, ValueError) as error:
        return f"rl_triton.gae refused the input: {error}"
    if on_device:
        for target, source in zip(results, computed, strict=True):
            target.copy_(source)
    # A sum is finite only if all of its terms are; one that overflows costs no more than a call to the original.
    if not (isfinite(results[1].sum()) and isfinite(last.sum())):
        # Stable-Baselines3 multiplies by its masks and so spreads NaN over an episode's end; users look for that.
        return "rewards, values or last_values that are not finite"
    buffer.returns = returns
    return None


def _unsupported(buffer: RolloutBuffer, last_values: torch.Tensor, dones: np.ndarray) -> str | None:
    """Why this call cannot be served; Stable-Baselines3 accepts much that is not float32 arrays of one shape."""
    if type(buffer.gamma) not in (float, int) or type(buffer.gae_lambda) not in (float, int):
        return "gamma or gae_lambda is not a Python number"
    shape = (buffer.buffer_size, buffer.n_envs)
    for name in _ARRAYS:
        x = getattr(buffer, name)
        if type(x) is not np.ndarray:
            return f"{name} is not a numpy array"
        if x.dtype != np.float32:
            return f"{name} is not float32"
        if x.shape != shape:
            return f"{name} has not the shape (n_steps, n_envs)"
        if not x.flags.writeable:
            return f"{name} is read-only"
    if type(last_values) is not torch.Tensor or last_values.dtype != torch.float32:
        return "last_values is not a float32 tensor"
    if last_values.requires_grad:
        return "last_values requires grad"
    if last_values.numel() != buffer.n_envs:
        return "last_values has not one entry for each environment"
    if type(dones) is not np.ndarray or dones.shape != (buffer.n_envs,):
        return "dones is not a numpy array with one entry for each environment"
    if dones.dtype != np.bool_ and not ((dones == 0) | (dones == 1)).all():
        return "flags other than 0 and 1"
    starts = buffer.episode_starts[1:]
    if not ((starts == 0) | (starts == 1)).all():
        return "flags other than 0 and 1"
    return None
