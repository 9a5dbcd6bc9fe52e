"""TorchRL PPO on thousands of CartPoles, with TorchRL's advantages and with rl_triton's, side by side.

    python examples/torchrl_ppo.py                  # a few minutes on two cores
    python examples/torchrl_ppo.py --device cuda --n-envs 4096 --total-frames 20_971_520

Trains three times from the same seed: with TorchRL's default GAE, which is a Python loop over time; with its vectorised
one, which pads every episode to the longest; and with rl_triton patched in, which is one line. Prints what collecting,
advantages and the gradient steps cost in each run, the advantages' share of an update, and how far they differ on the
same batch; writes all that to results.json, update by update, and plots the learning curves. The CartPoles are one
tensor, on the device.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

import rl_triton
from rl_triton.adapters import status
from rl_triton.adapters import torchrl as adapter

SOLVED = 475.0
PHASES = ("collecting", "advantages", "gradient steps")
FLAGS = ("done", "terminated", "truncated")


@dataclass
class Args:
    device: Literal["cpu", "cuda"] = "cpu"
    """where the environments, the policy and the advantages are computed"""
    seed: int = 1
    total_frames: int = 327_680
    """environment steps of each run"""
    n_envs: int = 64
    n_steps: int = 128
    """steps of each environment between updates"""
    n_epochs: int = 8
    n_minibatches: int = 8
    learning_rate: float = 1e-3
    gamma: float = 0.99
    lmbda: float = 0.95
    credit: tuple[Literal["loop", "vectorized", "rl_triton"], ...] = ("loop", "vectorized", "rl_triton")
    """whose advantages: TorchRL's default, TorchRL's vectorised form, ours; a run for each"""
    out: Path = Path("runs/torchrl_ppo")
    """the folder of results.json and learning_curves.png"""


class CartPole(EnvBase):
    """A batch of poles on carts (Barto, Sutton and Anderson 1983) with the constants of Gymnasium's CartPole-v1: one
    point for each step, the end where the pole or the cart has gone too far, a time limit of 500 steps."""

    gravity, pole_mass, total_mass, half_length, force, dt = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
    max_angle, max_position, max_steps = 12 * math.pi / 180, 2.4, 500

    def __init__(self, n_envs: int, device: str) -> None:
        super().__init__(device=device, batch_size=[n_envs])
        self.observation_spec = Composite(
            observation=Unbounded((n_envs, 4)), steps=Unbounded((n_envs, 1), dtype=torch.int64), shape=(n_envs,)
        ).to(device)
        self.action_spec = Categorical(2, shape=(n_envs,), dtype=torch.int64).to(device)
        self.reward_spec = Unbounded((n_envs, 1)).to(device)
        flag = Categorical(2, shape=(n_envs, 1), dtype=torch.bool)
        self.done_spec = Composite({name: flag.clone() for name in FLAGS}, shape=(n_envs,)).to(device)

    def _set_seed(self, seed: int | None) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed or 0)

    def _reset(self, tensordict: TensorDict | None) -> TensorDict:
        """All anew; TorchRL keeps those that are to be reset."""
        shape = (*self.batch_size, 1)
        state = torch.rand(*self.batch_size, 4, device=self.device, generator=self.generator) * 0.1 - 0.05
        flags = {name: torch.zeros(shape, dtype=torch.bool, device=self.device) for name in FLAGS}
        steps = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return TensorDict({"observation": state, "steps": steps, **flags}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        position, velocity, angle, spin = tensordict["observation"].unbind(-1)
        push = torch.where(tensordict["action"] == 1, self.force, -self.force)
        pole = self.pole_mass * self.half_length
        pushed = (push + pole * spin.square() * angle.sin()) / self.total_mass
        inertia = self.half_length * (4 / 3 - self.pole_mass * angle.cos().square() / self.total_mass)
        turn = (self.gravity * angle.sin() - angle.cos() * pushed) / inertia
        drive = pushed - pole * turn * angle.cos() / self.total_mass
        state = torch.stack(
            [
                position + self.dt * velocity,
                velocity + self.dt * drive,
                angle + self.dt * spin,
                spin + self.dt * turn,
            ],
            -1,
        )
        steps = tensordict["steps"] + 1
        fallen = (state[:, :1].abs() > self.max_position) | (state[:, 2:3].abs() > self.max_angle)
        late = (steps >= self.max_steps) & ~fallen
        return TensorDict(
            {
                "observation": state,
                "steps": steps,
                "reward": torch.ones_like(state[:, :1]),
                "terminated": fallen,
                "truncated": late,
                "done": fallen | late,
            },
            self.batch_size,
            device=self.device,
        )


@dataclass
class Run:
    name: str
    frames: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    largest_difference: float = 0.0

    def milliseconds(self, phase: str) -> float:
        """Median over the updates."""
        return float(np.median(self.seconds[phase])) * 1e3

    @property
    def share(self) -> float:
        """Of the advantages in an update, which is advantages and gradient steps."""
        return self.milliseconds("advantages") / sum(map(self.milliseconds, PHASES[1:]))

    @property
    def final_return(self) -> float:
        """Mean over the episodes of the last five updates."""
        return float(np.mean(self.returns[-5:])) if self.returns else float("nan")


def mlp(n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out))


def train(name: str, args: Args, *, vectorized: bool, patched: bool) -> Run:
    torch.manual_seed(args.seed)
    environment = TransformedEnv(CartPole(args.n_envs, args.device), RewardSum())
    environment.set_seed(args.seed)
    logits = TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        logits,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        distribution_kwargs={"validate_args": False},  # reads the device's data on the host at every step
        return_log_prob=True,
    ).to(args.device)
    critic = ValueOperator(mlp(1), in_keys=["observation"]).to(args.device)
    advantages = GAE(
        gamma=args.gamma, lmbda=args.lmbda, value_network=critic, average_gae=True, vectorized=vectorized
    ).to(args.device)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.learning_rate)

    batch = args.n_envs * args.n_steps
    collector = Collector(
        environment,
        actor,
        frames_per_batch=batch,
        total_frames=args.total_frames,
        device=args.device,
        auto_register_policy_transforms=False,  # the policy has no state that would be reset
    )
    run, frames = Run(name), 0

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with tqdm(total=args.total_frames, desc=name, unit="step", unit_scale=True) as bar:
        start = now()
        for data in collector:
            collected = now()
            with adapter.patched() if patched else contextlib.nullcontext():
                advantages(data)
            estimated = now()
            if not run.seconds["advantages"]:
                run.largest_difference = compare(advantages, data)

            ready = now()
            flat = data.reshape(-1)
            for _ in range(args.n_epochs):
                for rows in torch.randperm(batch, device=args.device).chunk(args.n_minibatches):
                    losses = loss(flat[rows])
                    total = losses["loss_objective"] + losses["loss_critic"]
                    optimizer.zero_grad()
                    total.backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                    optimizer.step()
            updated = now()

            for phase, seconds in zip(PHASES, (collected - start, estimated - collected, updated - ready), strict=True):
                run.seconds[phase].append(seconds)
            frames += batch
            finished = data["next", "episode_reward"][data["next", "done"]]
            if len(finished):
                run.frames.append(frames)
                run.returns.append(finished.mean().item())
                bar.set_postfix({"return": f"{run.returns[-1]:.0f}"})
            bar.update(batch)
            start = now()
    collector.shutdown()
    return run


def compare(advantages: GAE, data: TensorDict) -> float:
    """How far advantages and targets are from those of TorchRL's loop, on the same batch."""
    again = data.exclude(*advantages.out_keys)
    before, advantages.vectorized = advantages.vectorized, False
    advantages(again)
    advantages.vectorized = before
    return max((again[key] - data[key]).abs().max().item() for key in advantages.out_keys)


def store(runs: list[Run], args: Args) -> None:
    """Everything that was measured, and where."""
    versions = {name: importlib.metadata.version(name) for name in ("torchrl", "tensordict", "torch")}
    results = {
        "args": {name: value for name, value in asdict(args).items() if name != "out"},
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "packages": versions | {"rl_triton": rl_triton.__version__},
        "runs": {
            run.name: {
                "final_return": run.final_return,
                "milliseconds": {phase: run.milliseconds(phase) for phase in PHASES},
                "share_of_update": run.share,
                "largest_difference": run.largest_difference,
                "curve": {"frames": run.frames, "returns": run.returns},
                "seconds": run.seconds,
            }
            for run in runs
        },
        "status": {name: counts for name, counts in status().items() if counts["served"] or counts["fallen_back"]},
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, costs) = plt.subplots(1, 2, figsize=(11, 4))
    for run, width in zip(runs, (6, 3, 1)[-len(runs) :], strict=True):  # where they coincide, all are seen
        curves.plot(np.array(run.frames) / 1e3, run.returns, label=run.name, linewidth=width, alpha=0.6)
    curves.axhline(SOLVED, color="grey", linestyle=":", label=f"solved ({SOLVED:.0f})")
    curves.set(
        xlabel="thousand environment steps",
        ylabel="mean return of finished episodes",
        title="PPO on CartPole, one seed",
    )
    curves.legend(loc="lower right")
    bottom = np.zeros(len(runs))
    for phase in PHASES:
        medians = np.array([run.milliseconds(phase) for run in runs])
        costs.bar([run.name for run in runs], medians, bottom=bottom, label=phase)
        bottom += medians
    costs.set(ylabel="ms, median", title="One iteration")
    costs.tick_params(axis="x", labelsize=7)
    costs.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(args: Args) -> int:
    torch.set_num_threads(1)  # the networks are tiny
    console = Console()
    settings = {
        "loop": ("TorchRL, default", {"vectorized": False, "patched": False}),
        "vectorized": ("TorchRL, vectorized", {"vectorized": True, "patched": False}),
        "rl_triton": ("rl_triton", {"vectorized": False, "patched": True}),
    }
    chosen = [settings[credit] for credit in dict.fromkeys(args.credit)]
    runs = [train(name, args, **setting) for name, setting in chosen]
    args.out.mkdir(parents=True, exist_ok=True)
    store(runs, args)
    plot(runs, args.out / "learning_curves.png")

    title = f"PPO on CartPole, {args.n_envs} environments x {args.n_steps} steps, {args.device}"
    table = Table("", *(run.name for run in runs), title=title)
    table.add_row("mean return, last 5 updates", *(f"{run.final_return:.1f}" for run in runs))
    for phase in PHASES:
        table.add_row(f"{phase}, median", *(f"{run.milliseconds(phase):.2f} ms" for run in runs))
    table.add_row("advantages' share of an update", *(f"{run.share:.2%}" for run in runs))
    table.add_row("difference from the loop, same batch", *(f"{run.largest_difference:.2g}" for run in runs))
    console.print(table)
    for name, counts in status().items():
        if counts["served"] or counts["fallen_back"]:
            console.print(f"{name}: served {counts['served']}, fallen back {counts['fallen_back'] or 0}")
    console.print(f"Results and learning curves: {args.out}")

    failures = [
        f"{run.name}: mean return {run.final_return:.1f} < {SOLVED}" for run in runs if not run.final_return >= SOLVED
    ]
    failures += [
        f"{run.name}: advantages differ by {run.largest_difference:.2g} on the same batch"
        for run in runs
        if not run.largest_difference < 1e-3
    ]
    for failure in failures:
        console.print(f"[red]{failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
