"""GAE as a Python loop over time in eager PyTorch, as CleanRL's scripts write it inline; TD(λ) returns likewise."""

from __future__ import annotations

import torch


def loop(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    last_values: torch.Tensor,
    gamma: float,
    lambda_: float,
    time_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dones[t]` (a float, as those scripts store it) says that step t ended an episode."""
    reward, value, done = (x.movedim(time_dim, 0) for x in (rewards, values, dones))
    advantages = torch.zeros_like(rewards)
    advantage = advantages.movedim(time_dim, 0)
    n_steps = len(reward)
    last: torch.Tensor | float = 0.0
    for t in reversed(range(n_steps)):
        next_value = last_values if t == n_steps - 1 else value[t + 1]
        going_on = 1.0 - done[t]
        delta = reward[t] + gamma * next_value * going_on - value[t]
        advantage[t] = last = delta + gamma * lambda_ * going_on * last
    return advantages, advantages + values


def td_lambda_loop(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    last_values: torch.Tensor,
    gamma: float,
    lambda_: float,
    time_dim: int,
) -> torch.Tensor:
    reward, value, done = (x.movedim(time_dim, 0) for x in (rewards, values, dones))
    returns = torch.zeros_like(rewards)
    result = returns.movedim(time_dim, 0)
    n_steps = len(reward)
    last = last_values
    for t in reversed(range(n_steps)):
        next_value = last_values if t == n_steps - 1 else value[t + 1]
        going_on = 1.0 - done[t]
        result[t] = last = reward[t] + gamma * going_on * ((1 - lambda_) * next_value + lambda_ * last)
    return returns
