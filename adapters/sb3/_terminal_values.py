"""Values of the final observations that a time limit cut, one call of the critic a step.

Stable-Baselines3's collector adds gamma V(final observation) to the reward of each environment that a time limit cut,
with one call of `policy.obs_to_tensor` and one of `policy.predict_values` for each. Its loop stays as it is: right
before it, the collector passes the step's infos and flags to `_update_info_buffer`, which tells us which observations
will come and in which order. They wait here, beside the policy and not in it. `obs_to_tensor`, replaced in the class
that has it, knows them again, and from its return until `predict_values` is called, which is next, the policy has a
`predict_values` that answers from one batched call. Nothing runs between the two that may fail, so that nobody else
sees the policy in this state, whatever goes wrong in the loop or in the critic.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_triton.adapters._patching import MARK, Hook, Patch, locked

OWN_CRITIC = "predict_values takes more than observations"
NOT_USED = "terminal values that the collector did not ask for"
OVERRIDDEN = "the policy has an obs_to_tensor of its own"
UNLIKE = "final observations that cannot be stacked"

_waiting: weakref.WeakKeyDictionary[Any, Batch] = weakref.WeakKeyDictionary()
"""What is to come, by policy."""


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
        policy = getattr(model.policy, "_orig_mod", model.policy)  # torch.compile wraps it
        withdraw(policy, NOT_USED)
        if len(final) < 2:  # a single one costs the same either way
            return
        # One that calls Stable-Baselines3's may change what it gets, which the batch would not see.
        if getattr(policy.obs_to_tensor, "__func__", None) is FinalObservations.installed().installed:
            _waiting[policy] = Batch(final, self.count)
        else:
            for _ in final:
                self.count(OVERRIDDEN)


class FinalObservations(Patch):
    """`obs_to_tensor` of Stable-Baselines3's policies, which knows the observations that are waited for."""

    _installed: FinalObservations | None = None

    @classmethod
    def installed(cls) -> FinalObservations:
        from stable_baselines3.common.policies import BasePolicy

        owner = next(base for base in BasePolicy.__mro__ if "obs_to_tensor" in base.__dict__)
        with locked():
            if cls._installed is None or cls._installed.owner is not owner:
                cls._installed = cls(owner, "obs_to_tensor", lambda: None)
            return cls._installed

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatcher(policy: Any, *args: Any, **kwargs: Any) -> Any:
            if self.wanted and len(args) == 1 and not torch.compiler.is_compiling():
                batch = _awaited(policy, args[0])
                if batch is not None:
                    return batch.to_tensor(policy, functools.partial(original, policy))
            return original(policy, *args, **kwargs)

        setattr(dispatcher, MARK, self.label)
        return dispatcher


def _awaited(policy: Any, observation: Any) -> Batch | None:
    """What waits for this observation. (A function: the dispatcher's code must not hold the dictionary, which could not
    be pickled with it.)"""
    batch = _waiting.get(policy) if _waiting else None
    return batch if batch is not None and observation is batch.observations[0] else None


class Batch:
    """Final observations of one step, until the collector has asked for their values. Holds no policy."""

    def __init__(self, observations: list[Any], count: Callable[[str | None], None]) -> None:
        self.observations = deque(observations)
        self.count = count
        self.n = len(observations)
        self.together: Any = None
        self.values: deque[torch.Tensor] = deque()
        self.own: Any = None
        self.answering = False

    def to_tensor(self, policy: Any, obs_to_tensor: Callable[[Any], Any]) -> Any:
        """What `obs_to_tensor` gives for the first that waits: its row of all of them."""
        if self.together is None:
            try:
                together = _stacked(list(self.observations))
            except (TypeError, ValueError):
                withdraw(policy, UNLIKE)
                return obs_to_tensor(self.observations[0])
            try:
                self.together = obs_to_tensor(together)[0]
            except BaseException:
                withdraw(policy)
                raise
        row = _row(self.together, self.n - len(self.observations))
        self.release(policy)
        self.own = policy.__dict__.get("predict_values")  # what its user has set on the policy itself
        policy.__dict__["predict_values"] = functools.partial(self.answer, policy, row)
        self.answering = True
        return row, False

    def release(self, policy: Any) -> None:
        """Give the policy its method back."""
        if not self.answering:
            return
        self.answering = False
        if self.own is None:
            policy.__dict__.pop("predict_values", None)
        else:
            policy.__dict__["predict_values"], self.own = self.own, None

    def answer(self, policy: Any, row: Any, observations: Any, *more: Any, **others: Any) -> torch.Tensor:
        """What `predict_values` gives for a row: its value."""
        self.release(policy)
        unlike = OWN_CRITIC if more or others else NOT_USED if observations is not row else None
        if unlike is not None:  # as of a recurrent critic, whose state is another for each row
            withdraw(policy, unlike)
            return policy.predict_values(observations, *more, **others)
        if not self.values:
            try:
                values = policy.predict_values(self.together)
            except BaseException:
                withdraw(policy)
                raise
            self.values = deque(values.cpu().split(1))  # one copy to the host, where the rewards are
        self.observations.popleft()
        self.count(None)
        if not self.observations:
            withdraw(policy)
        return self.values.popleft()


def withdraw(policy: Any, reason: str | None = None) -> None:
    """Wait for nothing any more, and leave the policy as it was. What was not asked for is counted."""
    batch = _waiting.pop(policy, None)
    if batch is not None:
        batch.release(policy)
        for _ in batch.observations if reason else ():
            batch.count(reason)


def withdraw_all() -> None:
    for reference in _waiting.keyrefs():
        policy = reference()
        if policy is not None:
            withdraw(policy, NOT_USED)


def _stacked(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([x[key] for x in observations]) for key in observations[0]}
    return np.stack(observations)


def _row(batch: Any, i: int) -> Any:
    return {key: x[i : i + 1] for key, x in batch.items()} if isinstance(batch, dict) else batch[i : i + 1]
