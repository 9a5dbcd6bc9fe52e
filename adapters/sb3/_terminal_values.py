"""Values of the final observations that a time limit cut, one call of the critic a step.

Stable-Baselines3's collector adds gamma V(final observation) to the reward of each environment that a time limit cut,
with one call of `policy.obs_to_tensor` and one of `policy.predict_values` for each. Its loop stays as it is: right
before it, the collector passes the step's infos and flags to `_update_info_buffer`, which tells us which observations
will come and in which order. From then until the last of them was asked for, the two methods answer from one batched
call. No code of the user's runs between the two moments, so that nobody else sees the policy in this state, and
callbacks see what they always see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_triton.adapters._patching import Hook, locked

OWN_CRITIC = "predict_values takes more than observations"
NOT_USED = "terminal values that the collector did not ask for"
UNLIKE = "final observations that cannot be stacked"


class TerminalValues(Hook):
    """The hook in `BaseAlgorithm._update_info_buffer`. Counts final observations: served ones came from a batch."""

    _installed: TerminalValues | None = None

    def __init__(self, owner: type, wanted_for: Callable[[Any], bool]) -> None:
        super().__init__(owner, "_update_info_buffer", self._before_the_loop)
        self.wanted_for = wanted_for

    @classmethod
    def installed(cls, wanted_for: Callable[[Any], bool]) -> TerminalValues:
        from stable_baselines3.common.base_class import BaseAlgorithm

        with locked():
            if cls._installed is None or cls._installed.owner is not BaseAlgorithm:
                cls._installed = cls(BaseAlgorithm, wanted_for)
            return cls._installed

    def _before_the_loop(self, model: Any, infos: Any = None, dones: Any = None) -> None:
        if dones is None or not hasattr(model, "rollout_buffer") or not self.wanted_for(model):
            return
        final = [
            infos[i]["terminal_observation"]
            for i in np.flatnonzero(dones)
            if infos[i].get("terminal_observation") is not None and infos[i].get("TimeLimit.truncated", False)
        ]
        Batch.withdraw_from(model.policy, self.count)
        if len(final) > 1:  # a single one costs the same either way
            Batch(model.policy, final, self.count)


class Batch:
    """Answers of `obs_to_tensor` and `predict_values` for the final observations of one step."""

    def __init__(self, policy: Any, observations: list[Any], count: Callable[[str | None], None]) -> None:
        self.policy = getattr(policy, "_orig_mod", policy)  # torch.compile wraps it
        self.count = count
        self.waiting = deque(observations)
        self.rows: deque[Any] = deque()
        self.row: Any = None
        self.values: deque[torch.Tensor] | None = None
        self.obs_to_tensor, self.predict_values = self.policy.obs_to_tensor, self.policy.predict_values
        # What was set on the policy itself, by its user, comes back.
        self.own = {name: self.policy.__dict__.get(name) for name in ("obs_to_tensor", "predict_values")}
        self.policy.__dict__["obs_to_tensor"] = self._obs_to_tensor
        self.policy.__dict__["predict_values"] = self._predict_values
        self.policy.__dict__[_KEY] = self

    @staticmethod
    def withdraw_from(policy: Any, count: Callable[[str | None], None]) -> None:
        left = getattr(policy, "_orig_mod", policy).__dict__.get(_KEY)
        if left is not None:
            left.withdraw(NOT_USED)

    def withdraw(self, reason: str | None = None) -> None:
        """Give the policy its methods back, once. What was not asked for is counted."""
        if self.policy.__dict__.get(_KEY) is not self:
            return
        for name, own in self.own.items():
            if own is None:
                del self.policy.__dict__[name]
            else:
                self.policy.__dict__[name] = own
        del self.policy.__dict__[_KEY]
        for _ in range(len(self.waiting) if reason else 0):
            self.count(reason)

    def _or_withdrawn(self, method: Callable[..., Any], x: Any) -> Any:
        try:
            return method(x)
        except BaseException:
            self.withdraw()
            raise

    def _obs_to_tensor(self, observation: Any) -> Any:
        if not self.waiting or observation is not self.waiting[0]:
            return self.obs_to_tensor(observation)
        if not self.rows:
            try:
                together = _stacked(list(self.waiting))
            except (TypeError, ValueError):
                self.withdraw(UNLIKE)
                return self.obs_to_tensor(observation)
            batch = self._or_withdrawn(self.obs_to_tensor, together)[0]
            self.rows = deque((batch, i) for i in range(len(self.waiting)))
        batch, i = self.rows[0]
        self.row = _row(batch, i)
        return self.row, False

    def _predict_values(self, observations: Any, *more: Any, **others: Any) -> torch.Tensor:
        if observations is not self.row or self.row is None:
            return self.predict_values(observations, *more, **others)
        if more or others:  # as of a recurrent critic, whose state is another for each row
            self.withdraw(OWN_CRITIC)
            return self.predict_values(observations, *more, **others)
        if self.values is None:
            values = self._or_withdrawn(self.predict_values, self.rows[0][0])
            self.values = deque(values.cpu().split(1))  # one copy to the host, where the rewards are
        self.waiting.popleft()
        self.rows.popleft()
        self.count(None)
        if not self.waiting:
            self.withdraw()
        return self.values.popleft()


_KEY = "_rl_triton_terminal_values"


def _stacked(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([x[key] for x in observations]) for key in observations[0]}
    return np.stack(observations)


def _row(batch: Any, i: int) -> Any:
    return {key: x[i : i + 1] for key, x in batch.items()} if isinstance(batch, dict) else batch[i : i + 1]
