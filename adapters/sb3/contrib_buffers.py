"""Rollout buffers for sb3-contrib: with action masks (MaskablePPO) and with LSTM states (RecurrentPPO).

MaskablePPO takes its class as `rollout_buffer_class=`. RecurrentPPO names its own; give it another one after it was
made, with what it knows: `model.rollout_buffer = recurrent_buffer(model, ScanRecurrentRolloutBuffer)`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from rl_triton.adapters.sb3._resident import as_tensor, store
from rl_triton.adapters.sb3.buffers import Scan, TensorStorage

try:
    from sb3_contrib.common.maskable.buffers import (
        MaskableDictRolloutBuffer,
        MaskableDictRolloutBufferSamples,
        MaskableRolloutBuffer,
        MaskableRolloutBufferSamples,
    )
    from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
    from sb3_contrib.common.recurrent.type_aliases import (
        RecurrentDictRolloutBufferSamples,
        RecurrentRolloutBufferSamples,
        RNNStates,
    )
except ImportError as error:
    raise ImportError("rl_triton.adapters.sb3.contrib_buffers needs sb3-contrib: pip install sb3-contrib") from error


class ScanMaskableRolloutBuffer(Scan, MaskableRolloutBuffer):
    """`MaskableRolloutBuffer` that computes with `rl_triton.gae`."""


class ScanMaskableDictRolloutBuffer(Scan, MaskableDictRolloutBuffer):
    """`MaskableDictRolloutBuffer` that computes with `rl_triton.gae`."""


class ScanRecurrentRolloutBuffer(Scan, RecurrentRolloutBuffer):
    """`RecurrentRolloutBuffer` that computes with `rl_triton.gae`."""


class ScanRecurrentDictRolloutBuffer(Scan, RecurrentDictRolloutBuffer):
    """`RecurrentDictRolloutBuffer` that computes with `rl_triton.gae`."""


class _TensorMaskable(TensorStorage):
    _FIELDS = (*TensorStorage._FIELDS, "action_masks")
    _FLATTENED = (*TensorStorage._FLATTENED, "action_masks")

    def add(self, *args: Any, action_masks: Any = None, **kwargs: Any) -> None:
        if action_masks is not None:
            self._store("action_masks", action_masks, reshape=True)
        super().add(*args, **kwargs)

    def _get_samples(self, chosen: torch.Tensor, env: Any = None) -> Any:
        observations, masks = self.tensors["observations"], self.tensors["action_masks"][chosen]
        if isinstance(observations, dict):
            samples, picked = MaskableDictRolloutBufferSamples, {key: x[chosen] for key, x in observations.items()}
        else:
            samples, picked = MaskableRolloutBufferSamples, observations[chosen]
        return samples(picked, self.tensors["actions"][chosen], *self._scalars(chosen), masks)


class TensorMaskableRolloutBuffer(_TensorMaskable, MaskableRolloutBuffer):
    """`MaskableRolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


class TensorMaskableDictRolloutBuffer(_TensorMaskable, MaskableDictRolloutBuffer):
    """`MaskableDictRolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


class _TensorRecurrent(TensorStorage):
    _STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
    _FIELDS = (*TensorStorage._FIELDS, *_STATES)
    _FLATTENED = (*TensorStorage._FLATTENED, *_STATES, "episode_starts")

    def reset(self) -> None:
        super().reset()
        # The flags come from the host, and where sequences start decides shapes: a copy there spares waiting.
        self._starts_on_host = np.zeros((self.buffer_size, self.n_envs), bool)

    def add(self, *args: Any, lstm_states: Any = None, **kwargs: Any) -> None:
        for name, x in zip(self._STATES, (*lstm_states.pi, *lstm_states.vf), strict=True):
            self._store(name, x)
        episode_start = kwargs["episode_start"] if "episode_start" in kwargs else args[3]
        store(
            f"{type(self).__name__}.add: episode_starts",
            torch.from_numpy(self._starts_on_host[self.pos]),
            as_tensor(episode_start, torch.bool),
        )
        super().add(*args, **kwargs)

    def _flatten(self) -> None:
        if not self.generator_ready:
            for name in self._STATES:  # [n_steps, layers, n_envs, size]
                self.tensors[name] = self.tensors[name].transpose(1, 2)
        super()._flatten()

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Minibatches of neighbouring steps, split into sequences and padded, as Stable-Baselines3 would."""
        n = self._check_full()
        self._flatten()
        starts = self._starts_on_host.copy()
        starts[0] = True  # another environment
        starts = starts.T.reshape(-1)
        split = np.random.randint(n)
        indices = np.roll(np.arange(n), -split)
        size = batch_size or n
        for first in range(0, n, size):
            yield self._get_sequences(indices[first : first + size], starts)

    def _get_sequences(self, chosen: np.ndarray, starts: np.ndarray) -> Any:
        begins = starts[chosen]
        begins[0] = True
        begins = np.flatnonzero(begins)
        lengths = np.diff(begins, append=len(chosen))
        steps = np.arange(lengths.max())
        real = steps < lengths[:, None]  # [sequences, longest]
        at = np.where(real, begins[:, None] + steps, 0)
        rows = torch.from_numpy(chosen[at].reshape(-1)).to(self.device)
        mask = torch.from_numpy(real.reshape(-1)).to(self.device)
        first_rows = torch.from_numpy(chosen[begins]).to(self.device)

        def padded(x: Any) -> Any:
            if isinstance(x, dict):
                return {key: padded(part) for key, part in x.items()}
            return torch.where(
                mask.reshape(-1, *[1] * (x.dim() - 1)), x[rows], torch.zeros((), dtype=x.dtype, device=x.device)
            )

        def states(name: str) -> tuple[torch.Tensor, ...]:
            kinds = (f"hidden_states_{name}", f"cell_states_{name}")
            return tuple(self.tensors[kind][first_rows].transpose(0, 1).contiguous() for kind in kinds)

        tensors = self.tensors
        dictionary = isinstance(tensors["observations"], dict)
        return (RecurrentDictRolloutBufferSamples if dictionary else RecurrentRolloutBufferSamples)(
            observations=padded(tensors["observations"]),
            actions=padded(tensors["actions"]),
            old_values=padded(tensors["values"]).flatten(),
            old_log_prob=padded(tensors["log_probs"]).flatten(),
            advantages=padded(tensors["advantages"]).flatten(),
            returns=padded(tensors["returns"]).flatten(),
            lstm_states=RNNStates(states("pi"), states("vf")),
            episode_starts=padded(tensors["episode_starts"]).flatten(),
            mask=mask.float(),
        )


class TensorRecurrentRolloutBuffer(_TensorRecurrent, RecurrentRolloutBuffer):
    """`RecurrentRolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


class TensorRecurrentDictRolloutBuffer(_TensorRecurrent, RecurrentDictRolloutBuffer):
    """`RecurrentDictRolloutBuffer` in tensors on the model's device; see `TensorStorage`."""


def recurrent_buffer(model: Any, buffer_class: type) -> Any:
    """A buffer of another class for a RecurrentPPO, with the sizes and factors of the one that it has."""
    buffer = model.rollout_buffer
    return buffer_class(
        buffer.buffer_size,
        buffer.observation_space,
        buffer.action_space,
        buffer.hidden_state_shape,
        device=buffer.device,
        gae_lambda=buffer.gae_lambda,
        gamma=buffer.gamma,
        n_envs=buffer.n_envs,
    )
