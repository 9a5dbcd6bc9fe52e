"""n-step replay on the device of the model, for `replay_buffer_class=` of DQN, SAC, TD3 and their kin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete

import rl_triton as rlt
from rl_triton.adapters.sb3._resident import Resident, factor, store

try:
    from stable_baselines3.common.buffers import NStepReplayBuffer
except ImportError as error:
    raise ImportError(
        "rl_triton.adapters.sb3.replay needs Stable-Baselines3 2.7 or newer, the first with n-step replay: "
        "pip install 'stable-baselines3>=2.7'"
    ) from error
from stable_baselines3.common.type_aliases import ReplayBufferSamples

_FIELDS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class TensorNStepReplayBuffer(Resident, NStepReplayBuffer):
    """`NStepReplayBuffer` in tensors on the model's device, with returns from `rl_triton.n_step_returns`.

    Transitions go to the device when they are stored; a minibatch is gathered there. The same numpy seed draws the
    same transitions as Stable-Baselines3's buffer does, and the returns agree to float32 accuracy:

        R = r[t] + γ r[t+1] + ... + γ^(m-1) r[t+m-1],   discount = γ^m,   next observation = that after step t+m-1

    where m = n, or less: the first step t+m-1 that ended an episode or was the newest one stored. `dones` is 1 where
    it terminated, and 0 where a time limit cut it. Observations are Box and the like, as in Stable-Baselines3. A NaN
    beyond an episode's end does not come back across it, as it does there. Assign to `device` to move everything.
    A `VecNormalize` normalizes on the host, which costs a copy there and back.

        SAC(..., replay_buffer_class=TensorNStepReplayBuffer, replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99})
    """

    pos: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _FIELDS:
            setattr(self, name, torch.as_tensor(getattr(self, name), device=self.device))

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        given = {
            "observations": obs,
            "next_observations": next_obs,
            "actions": action,
            "rewards": reward,
            "dones": done,
        }
        if self.handle_timeout_termination:
            given["timeouts"] = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        discrete = isinstance(self.observation_space, Discrete)
        for name, x in given.items():
            reshape = name == "actions" or (discrete and name.endswith("observations"))
            store(f"{type(self).__name__}.add: {name}", getattr(self, name)[self.pos], x, reshape=reshape)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        gamma = float(factor(self, "gamma"))
        env_inds = np.random.randint(0, self.n_envs, size=batch_inds.shape)
        first, envs = (torch.from_numpy(x).to(self.device) for x in (batch_inds, env_inds))
        steps = (first[:, None] + torch.arange(self.n_steps, device=self.device)) % self.buffer_size
        column = envs[:, None]
        newest = (self.pos - 1) % self.buffer_size  # what follows it in memory is older
        ended = (self.dones[steps, column] != 0) | (self.timeouts[steps, column] != 0) | (steps == newest)

        rewards = self.rewards[steps, column]
        if env is not None:
            rewards = self._on_device(env.normalize_reward(rewards.cpu().numpy()).astype(np.float32))
        nothing = torch.zeros((), device=self.device).expand_as(rewards)
        returns = rlt.n_step_returns(rewards, ended, n=self.n_steps, values=nothing, last_values=None, gamma=gamma)

        n_more = torch.where(ended.any(1), ended.int().argmax(1), self.n_steps - 1)
        last = (first + n_more) % self.buffer_size
        terminated = torch.where(self.timeouts[last, envs] != 0, 0.0, self.dones[last, envs])
        return ReplayBufferSamples(
            observations=self._normalized(self.observations[first, envs], env),
            actions=self.actions[first, envs],
            next_observations=self._normalized(self.next_observations[last, envs], env),
            dones=terminated[:, None],
            rewards=returns[:, :1],
            discounts=(gamma ** (n_more + 1).float())[:, None],
        )

    def _normalized(self, observations: torch.Tensor, env: Any) -> torch.Tensor:
        return observations if env is None else self._on_device(env.normalize_obs(observations.cpu().numpy()))

    def _on_device(self, x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x, device=self.device)
