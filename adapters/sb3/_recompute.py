"""Advantages of a rollout again, with the critic as it is now."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_triton.adapters.sb3._resident import as_tensor


def recompute_advantages(model: Any, *, batch_size: int | None = None) -> None:
    """Compute `advantages` and `returns` of a model's rollout anew, with the values that its critic gives now.

    Re-estimating advantages before each pass over a rollout makes them follow the critic (Andrychowicz et al. 2021,
    arXiv 2006.05990, section 3.5, recommend it). For use between two `rollout_buffer.get()`, that is between epochs, or
    before the first. Runs the method that the buffer has, so Stable-Baselines3's own unless it is patched.

    `values` and `log_probs`, which the losses compare with, stay what they were when the rollout was collected. So do
    the rewards, into which the collector folded the values of states where a time limit cut.

    Args:
        model: PPO, A2C, TRPO or MaskablePPO, after `collect_rollouts`.
        batch_size: observations in one call of the critic; None for all at once.

    Raises:
        TypeError: the critic or the buffer is recurrent: values would need the states that led to them.
        RuntimeError: the rollout is not complete.
    """
    from stable_baselines3.common.utils import obs_as_tensor

    buffer, policy = model.rollout_buffer, model.policy
    if hasattr(buffer, "hidden_states_vf"):
        raise TypeError("recompute_advantages: a recurrent buffer's values depend on states that are not recomputed")
    if not buffer.full:
        raise RuntimeError("recompute_advantages: the rollout is not complete; call it after collect_rollouts")
    n_steps, n_envs = buffer.buffer_size, buffer.n_envs
    training = policy.training
    policy.set_training_mode(False)
    try:
        with torch.no_grad():
            values = _values(policy, buffer, batch_size)
            last_values = policy.predict_values(obs_as_tensor(model._last_obs, policy.device))
    finally:
        policy.set_training_mode(training)
    dones = model._last_episode_starts
    flat = buffer.generator_ready  # by the first get(): rows of one environment follow each other, [N * T, 1]
    values = values.reshape(n_envs, n_steps).T if flat else values.reshape(n_steps, n_envs)
    if hasattr(buffer, "recompute"):
        buffer.recompute(values, last_values, dones)
        return
    collected, buffer.values = buffer.values, np.ascontiguousarray(values.cpu().numpy())
    buffer.advantages = np.empty_like(buffer.values)
    try:
        buffer.compute_returns_and_advantage(last_values, dones)
    finally:
        buffer.values = collected
    if flat:
        for name in ("advantages", "returns"):
            setattr(buffer, name, buffer.swap_and_flatten(getattr(buffer, name)))


def _values(policy: Any, buffer: Any, batch_size: int | None) -> torch.Tensor:
    """V of the stored observations, in their order."""
    n = buffer.buffer_size * buffer.n_envs
    tensors = getattr(buffer, "tensors", None)
    observations = buffer.observations if tensors is None else tensors["observations"]

    def chosen(x: Any, shape: tuple[int, ...], rows: slice) -> torch.Tensor:
        return as_tensor(x.reshape(n, *shape)[rows]).to(policy.device)

    values = []
    for first in range(0, n, batch_size or n):
        rows = slice(first, first + (batch_size or n))
        if isinstance(observations, dict):
            given: Any = {key: chosen(x, buffer.obs_shape[key], rows) for key, x in observations.items()}
        else:
            given = chosen(observations, buffer.obs_shape, rows)
        values.append(policy.predict_values(given))
    return torch.cat(values)
