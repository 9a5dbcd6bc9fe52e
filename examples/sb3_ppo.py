"""Stable-Baselines3 PPO on CartPole-v1, with its own advantage code and with rl_triton's, side by side.

    python examples/sb3_ppo.py                  # about two minutes on two cores
    python examples/sb3_ppo.py --device cuda

Trains twice from the same seed, prints what `compute_returns_and_advantage` costs in each run, how far the two
implementations differ on the same buffers and in the final parameters, and plots both learning curves.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule

from rl_triton.adapters import sb3, status

STOCK = RolloutBuffer.compute_returns_and_advantage
SOLVED = 475.0


@dataclass
class Args:
    device: Literal["cpu", "cuda"] = "cpu"
    """where the policy trains and rl_triton computes"""
    seed: int = 1
    total_timesteps: int = 100_000
    n_envs: int = 8
    n_steps: int = 32
    plot: Path = Path("runs/sb3_ppo.png")
    """where the learning curves go"""


class MeasuredBuffer(RolloutBuffer):
    """A rollout buffer as users write them: it calls super(), which the patch serves. Measures that call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds: list[float] = []
        self.largest_difference = 0.0

    def compute_returns_and_advantage(self, last_values, dones):
        start = time.perf_counter()
        super().compute_returns_and_advantage(last_values, dones)
        self.seconds.append(time.perf_counter() - start)

        ours = self.advantages.copy(), self.returns.copy()
        STOCK(self, last_values, dones)  # the same buffer through Stable-Baselines3's own code
        for mine, theirs in zip(ours, (self.advantages, self.returns), strict=True):
            self.largest_difference = max(self.largest_difference, float(np.abs(mine - theirs).max()))
        self.advantages[...], self.returns[...] = ours


@dataclass
class Run:
    name: str
    steps: np.ndarray
    returns: np.ndarray
    seconds: float
    gae_seconds: list[float]
    largest_difference: float
    parameters: dict[str, torch.Tensor]

    @property
    def final_return(self) -> float:
        """Mean over the last 100 episodes."""
        return float(self.returns[-100:].mean())


def train(name: str, args: Args) -> Run:
    """The hyperparameters are those of rl-baselines3-zoo for CartPole-v1."""
    env = make_vec_env("CartPole-v1", n_envs=args.n_envs, seed=args.seed)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=args.n_steps,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate=LinearSchedule(1e-3, 0.0, 1.0),
        clip_range=LinearSchedule(0.2, 0.0, 1.0),
        rollout_buffer_class=MeasuredBuffer,
        seed=args.seed,
        device=args.device,
    )
    episodes: list[tuple[int, float]] = []

    def record(local_variables, _):
        for info in local_variables["infos"]:
            if "episode" in info:
                episodes.append((model.num_timesteps, info["episode"]["r"]))
        return True

    start = time.perf_counter()
    model.learn(args.total_timesteps, callback=record, progress_bar=True)
    seconds = time.perf_counter() - start
    steps, returns = map(np.array, zip(*episodes, strict=True))
    buffer = model.rollout_buffer
    return Run(
        name,
        steps,
        returns,
        seconds,
        buffer.seconds,
        buffer.largest_difference,
        {key: value.cpu() for key, value in model.policy.state_dict().items()},
    )


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run, style in zip(runs, ({"linewidth": 4, "alpha": 0.4}, {"linewidth": 1.2}), strict=True):
        window = min(50, len(run.returns))
        mean = np.convolve(run.returns, np.ones(window) / window, mode="valid")
        axes.plot(run.steps[window - 1 :], mean, label=run.name, **style)
    axes.axhline(SOLVED, color="grey", linestyle=":", label=f"solved ({SOLVED:.0f})")
    axes.set(xlabel="environment steps", ylabel="return (mean of 50 episodes)", title="PPO on CartPole-v1, one seed")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(args: Args) -> int:
    torch.set_num_threads(1)  # the networks are tiny
    console = Console()
    runs = []
    for name, patched in (("Stable-Baselines3", False), ("with rl_triton", True)):
        console.print(f"[bold]{name}[/bold]")
        with sb3.patched(device=args.device) if patched else contextlib.nullcontext():
            runs.append(train(name, args))
    stock, ours = runs
    drift = max((stock.parameters[key] - ours.parameters[key]).abs().max().item() for key in stock.parameters)
    plot(runs, args.plot)

    table = Table("", stock.name, ours.name, title=f"PPO on CartPole-v1, {args.n_steps} x {args.n_envs}, {args.device}")
    table.add_row("mean return, last 100 episodes", *(f"{run.final_return:.1f}" for run in runs))
    table.add_row("time of learn()", *(f"{run.seconds:.1f} s" for run in runs))
    table.add_row(
        "compute_returns_and_advantage, median", *(f"{np.median(run.gae_seconds) * 1e6:.0f} us" for run in runs)
    )
    table.add_row("its share of learn()", *(f"{100 * sum(run.gae_seconds) / run.seconds:.2f} %" for run in runs))
    table.add_row("largest difference on the same buffers", "", f"{ours.largest_difference:.2g}")
    table.add_row("largest difference of final parameters", "", f"{drift:.2g}")
    console.print(table)
    for name, counts in status().items():
        console.print(f"{name}: served {counts['served']}, fallen back {counts['fallen_back'] or 0}")
    console.print(f"Learning curves: {args.plot}")

    failures = [
        f"{run.name}: mean return {run.final_return:.1f} < {SOLVED}" for run in runs if run.final_return < SOLVED
    ]
    if args.device == "cpu" and drift != 0.0:
        failures.append(f"the final parameters differ by {drift:.2g}; on the CPU they must be identical")
    for failure in failures:
        console.print(f"[red]{failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
