"""What Stable-Baselines3 spends where, with and without rl_triton: the tables of docs/sb3.md.

    python examples/sb3_costs.py                     # about three minutes on two cores
    python examples/sb3_costs.py --parts call

Prints Markdown.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import gymnasium
import numpy as np
import stable_baselines3
import torch
import tyro
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from rl_triton.adapters import sb3, status

STOCK = RolloutBuffer.compute_returns_and_advantage
Part = Literal["call", "share", "terminal", "recompute", "transfer"]


@dataclass
class Args:
    parts: tuple[Part, ...] = ("call", "share", "terminal", "recompute")
    """"transfer" needs a CUDA device and shows from which size on `device="cuda"` pays"""
    repeats: int = 200


def shortest(call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Microseconds of the fastest of some calls, in time of this thread: what else runs there only adds to it."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first may compile
        start = clock()
        call()
        best = min(best, clock() - start)
    return best * 1e6


def in_turn(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """`shortest` of each, one after the other and again, so that all see the same machine."""
    return [min(times) for times in zip(*([shortest(call, 1) for call in calls] for _ in range(repeats)), strict=True)]


def rows(title: str, *columns: str) -> None:
    print(f"\n**{title}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def filled(n_steps: int, n_envs: int) -> tuple[RolloutBuffer, torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(0)
    box = gymnasium.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(n_steps, box, box, device="cpu", gae_lambda=0.95, n_envs=n_envs)
    buffer.rewards[...], buffer.values[...] = rng.normal(size=(2, n_steps, n_envs))
    buffer.episode_starts[...] = rng.random((n_steps, n_envs)) < 0.01
    last_values = torch.from_numpy(rng.normal(size=(n_envs, 1)).astype(np.float32))
    return buffer, last_values, rng.random(n_envs) < 0.01


def call(args: Args) -> None:
    rows("One call of `compute_returns_and_advantage`", "n_steps x n_envs", "stock", "patched", "ratio", "")
    for n_steps, n_envs in [
        (1, 16),
        (2, 16),
        (5, 16),
        (16, 16),
        (128, 8),
        (2048, 1),
        (2048, 8),
        (2048, 64),
        (128, 1024),
        (16, 4096),
    ]:
        buffer, *edge = filled(n_steps, n_envs)
        stock = shortest(lambda: STOCK(buffer, *edge), args.repeats)  # noqa: B023
        with sb3.patched():
            before = sum(entry["served"] for entry in status().values())
            ours = shortest(lambda: buffer.compute_returns_and_advantage(*edge), 3 * args.repeats)  # noqa: B023
            served = sum(entry["served"] for entry in status().values()) > before
        note = "" if served else "left to Stable-Baselines3"
        row(f"{n_steps} x {n_envs}", f"{stock:.0f} us", f"{ours:.0f} us", f"{stock / ours:.1f}", note)


class TimedBuffer(RolloutBuffer):
    seconds = 0.0

    def compute_returns_and_advantage(self, last_values, dones):
        start = time.thread_time()
        super().compute_returns_and_advantage(last_values, dones)
        self.seconds += time.thread_time() - start


def share(args: Args) -> None:
    rows("Its share of `learn()`, stock", "run", "learn()", "in the method", "share")
    for algorithm, env, n_envs, options, steps in [
        (PPO, "CartPole-v1", 1, {}, 8192),
        (PPO, "Pendulum-v1", 1, {}, 8192),
        (PPO, "CartPole-v1", 8, {"n_steps": 2048, "batch_size": 1024, "n_epochs": 4}, 32768),
        (A2C, "CartPole-v1", 16, {}, 8000),
    ]:
        vec_env = make_vec_env(env, n_envs=n_envs, seed=0)
        model = algorithm("MlpPolicy", vec_env, rollout_buffer_class=TimedBuffer, seed=0, device="cpu", **options)
        start = time.thread_time()
        model.learn(steps)
        seconds = time.thread_time() - start
        spent = model.rollout_buffer.seconds
        name = f"{algorithm.__name__} {env}, {model.n_steps} x {n_envs}"
        row(name, f"{seconds:.1f} s", f"{1e3 * spent:.0f} ms", f"{100 * spent / seconds:.2f} %")


class FreeEnvs(VecEnv):
    """Environments that cost next to nothing, as those of a GPU simulator do: what is left is Stable-Baselines3. Each
    is cut after `limit` steps, all of them together or a part of them in every step."""

    def __init__(self, n_envs: int, limit: int, together: bool = False) -> None:
        space = gymnasium.spaces.Box(-1, 1, (8,))
        super().__init__(n_envs, space, gymnasium.spaces.Box(-1, 1, (2,)))
        self.rng, self.limit = np.random.default_rng(0), limit
        self.ages = np.zeros(n_envs, int) if together else self.rng.integers(limit, size=n_envs)
        self.rewards = np.ones(n_envs, np.float32)

    def _observations(self) -> np.ndarray:
        return self.rng.random((self.num_envs, 8), dtype=np.float32)

    def reset(self):
        return self._observations()

    def step_async(self, actions):
        pass

    def step_wait(self):
        self.ages += 1
        dones, final = self.ages == self.limit, self._observations()
        infos = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(dones):
            infos[i] = {"TimeLimit.truncated": True, "terminal_observation": final[i]}
        self.ages[dones] = 0
        return self._observations(), self.rewards.copy(), dones, infos

    def close(self):
        pass

    def get_attr(self, name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, name, value, indices=None):
        pass

    def env_method(self, name, *arguments, indices=None, **named):
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


def terminal(args: Args) -> None:
    rows(
        "Collecting a rollout, environments free, a time limit of 200 steps",
        "n_envs x n_steps",
        "limits reached",
        "final observations",
        "single",
        "batched",
        "saved",
    )
    for n_envs, n_steps, together in [(64, 200, True), (1024, 16, False), (4096, 16, False)]:
        model = PPO("MlpPolicy", FreeEnvs(n_envs, 200, together), n_steps=n_steps, batch_size=n_envs, device="cpu")
        _, callback = model._setup_learn(n_envs * n_steps)

        def collect(values: str) -> None:
            with sb3.patched(terminal_values=values):
                model.collect_rollouts(model.env, callback, model.rollout_buffer, n_steps)  # noqa: B023

        single, batched = in_turn([lambda: collect("single"), lambda: collect("batched")], args.repeats // 5 + 1)
        saved = 100 * (1 - batched / single)
        times = [f"{microseconds / 1e3:.1f} ms" for microseconds in (single, batched)]
        final = n_envs * n_steps // 200
        row(f"{n_envs} x {n_steps}", "together" if together else "apart", f"about {final}", *times, f"{saved:.0f} %")


def recompute(args: Args) -> None:
    rows("Re-estimating advantages before an epoch", "n_steps x n_envs", "stock", "patched", "of which the critic")
    for n_steps, n_envs in [(2048, 1), (2048, 8), (128, 64)]:
        model = PPO("MlpPolicy", FreeEnvs(n_envs, 200), n_steps=n_steps, batch_size=n_envs * n_steps, device="cpu")
        _, callback = model._setup_learn(n_envs * n_steps)
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_steps)
        observations = torch.from_numpy(model.rollout_buffer.observations.reshape(-1, 8))

        def critic() -> None:
            with torch.no_grad():
                model.policy.predict_values(observations)  # noqa: B023

        def patched() -> None:
            with sb3.patched():
                sb3.recompute_advantages(model)  # noqa: B023

        times = in_turn([lambda: sb3.recompute_advantages(model), patched, critic], args.repeats)  # noqa: B023
        row(f"{n_steps} x {n_envs}", *(f"{x / 1e3:.2f} ms" for x in times))


def transfer(args: Args) -> None:
    rows('`device="cuda"`: there and back', "n_steps x n_envs", "stock", "cpu", "cuda")
    for n_steps, n_envs in [(128, 64), (128, 1024), (128, 4096), (512, 4096), (128, 16384), (512, 16384)]:
        buffer, *edge = filled(n_steps, n_envs)
        clock = time.perf_counter  # the device's time counts too
        times = [shortest(lambda: STOCK(buffer, *edge), args.repeats // 3 + 1, clock)]  # noqa: B023
        for device in ("cpu", "cuda"):
            with sb3.patched(device=device):
                times.append(shortest(lambda: buffer.compute_returns_and_advantage(*edge), args.repeats, clock))  # noqa: B023
        row(f"{n_steps} x {n_envs}", *(f"{x:.0f} us" for x in times))


def main(args: Args) -> None:
    torch.set_num_threads(1)  # the networks are tiny
    versions = f"Stable-Baselines3 {stable_baselines3.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {versions}; one thread")
    parts = dict(call=call, share=share, terminal=terminal, recompute=recompute, transfer=transfer)
    for part in args.parts:
        parts[part](args)


if __name__ == "__main__":
    main(tyro.cli(Args))
