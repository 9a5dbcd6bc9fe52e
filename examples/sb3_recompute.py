"""PPO that estimates its advantages anew before each epoch, with the critic as it is then: one line in a buffer.

    python examples/sb3_recompute.py                  # about two minutes on two cores

Stable-Baselines3 estimates advantages once a rollout, and the later epochs follow a critic that is no longer there.
Trains on CartPole-v1 with and without, from the same seeds, and prints what the re-estimation costs with
Stable-Baselines3's own loop and with rl_triton.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from rl_triton.adapters import sb3


@dataclass
class Args:
    seeds: int = 3
    total_timesteps: int = 40_000
    n_envs: int = 4
    n_steps: int = 512
    n_epochs: int = 10


class RecomputingBuffer(RolloutBuffer):
    """PPO calls `get()` once an epoch; the first epoch has the advantages of the collector."""

    model = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []

    def get(self, batch_size=None):
        if self.generator_ready:
            start = time.perf_counter()
            sb3.recompute_advantages(self.model)
            self.seconds.append(time.perf_counter() - start)
        yield from super().get(batch_size)


class Introduce(BaseCallback):
    """Tells the buffer whose it is. Weakly, so that a saved buffer does not hold a model."""

    def _on_training_start(self):
        self.model.rollout_buffer.model = weakref.proxy(self.model)

    def _on_step(self):
        return True


@dataclass
class Run:
    final_return: float
    seconds: float
    recompute_seconds: list[float]


def train(args: Args, seed: int, *, recompute: bool, patched: bool) -> Run:
    env = make_vec_env("CartPole-v1", n_envs=args.n_envs, seed=seed)
    buffer_class = RecomputingBuffer if recompute else RolloutBuffer
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=args.n_steps,
        n_epochs=args.n_epochs,
        batch_size=256,
        rollout_buffer_class=buffer_class,
        seed=seed,
        device="cpu",
    )
    start = time.perf_counter()
    with sb3.patched() if patched else contextlib.nullcontext():
        model.learn(args.total_timesteps, callback=Introduce() if recompute else None)
    seconds = time.perf_counter() - start
    returns = [episode["r"] for episode in model.ep_info_buffer]
    return Run(float(np.mean(returns)), seconds, getattr(model.rollout_buffer, "seconds", []))


def main(args: Args) -> int:
    torch.set_num_threads(1)  # the networks are tiny
    console = Console(width=110)
    kinds = {
        "once a rollout": dict(recompute=False, patched=True),
        "each epoch, Stable-Baselines3's loop": dict(recompute=True, patched=False),
        "each epoch, rl_triton": dict(recompute=True, patched=True),
    }
    runs = {name: [train(args, seed, **kind) for seed in range(args.seeds)] for name, kind in kinds.items()}

    title = f"PPO on CartPole-v1, {args.n_steps} x {args.n_envs}, {args.total_timesteps} steps, {args.seeds} seeds"
    table = Table("advantages", "return, last 100 episodes", "learn()", "one re-estimation, median", title=title)
    for name, some in runs.items():
        each = [seconds for run in some for seconds in run.recompute_seconds]
        table.add_row(
            name,
            " ".join(f"{run.final_return:.0f}" for run in some),
            f"{np.mean([run.seconds for run in some]):.1f} s",
            f"{np.median(each) * 1e3:.2f} ms" if each else "",
        )
    console.print(table)
    _, stock, ours = runs.values()
    same = all(a.final_return == b.final_return for a, b in zip(stock, ours, strict=True))
    console.print("Both loops gave the same runs." if same else "[red]The two loops gave different runs.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
