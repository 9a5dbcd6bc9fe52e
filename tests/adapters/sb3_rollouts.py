"""Filled rollout buffers, and Stable-Baselines3's own method to judge by."""

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.buffers import RolloutBuffer

from rl_triton.adapters import sb3, status

NAME = "stable_baselines3.common.buffers.RolloutBuffer.compute_returns_and_advantage"
STOCK = RolloutBuffer.compute_returns_and_advantage
BOX = gymnasium.spaces.Box(-1, 1, (1,))


def counts(name=NAME):
    """(served, fallen back) until now."""
    entry = status().get(name, {"served": 0, "fallen_back": {}})
    return entry["served"], sum(entry["fallen_back"].values())


def make_buffer(n_steps, n_envs, *, ends=0.2, seed=0, gamma=0.99, gae_lambda=0.95, buffer_class=RolloutBuffer):
    """(buffer, last_values, dones)"""
    rng = np.random.default_rng(seed)
    buffer = buffer_class(n_steps, BOX, BOX, gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs, device="cpu")
    buffer.rewards[...] = rng.normal(size=(n_steps, n_envs))
    buffer.values[...] = rng.normal(size=(n_steps, n_envs))
    buffer.episode_starts[...] = rng.random((n_steps, n_envs)) < ends
    last_values = torch.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32))
    return buffer, last_values, rng.random(n_envs) < ends


def both(arguments, stock_method=STOCK, **options):
    """(stock, ours): the buffers after the call, from equal inputs."""
    stock, last_values, dones = arguments()
    stock_method(stock, last_values, dones)
    ours, last_values, dones = arguments()
    with sb3.patched(**options):
        ours.compute_returns_and_advantage(last_values, dones)
    return stock, ours


def same_bits(a, b):
    return a.dtype == b.dtype == np.float32 and a.shape == b.shape and (a.view(np.int32) == b.view(np.int32)).all()
