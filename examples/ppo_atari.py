"""PPO on Atari, with ale-py's vector environment (the ROMs come with the package) and rl_triton's advantages.

    python examples/ppo_atari.py                              # Pong, three million steps
    python examples/ppo_atari.py --max-minutes 9              # stop there, with a checkpoint and results
    python examples/ppo_atari.py --resume runs/NAME           # go on where a run was stopped
    python examples/ppo_atari.py --env-id breakout --total-timesteps 10000000 --learning-rate 2.5e-4 --credit loop

ale-py resets at the next step: where an episode has ended, the next row's action is ignored and the row is no
transition. The recorder of rl_triton.adapters.gymnasium knows; such rows get no advantage and stay out of the loss, and
episodes that the frame limit cuts are bootstrapped from their last observation.

`--credit loop` computes the advantages in a plain loop over steps instead. Prints where the time of an update goes, how
far the two ways differ on the last rollout, and writes the learning curve.

Emulation takes most of the time, a millisecond or less for each step and core, so the settings spend gradients rather
than steps: 64 of them, on 128 transitions each, for every 2048. OpenAI's baselines take 16, on 256, per 1024. With
small minibatches (96 of 32 for every 1024) ChainerRL's PPO played Pong well after 350 thousand steps
(github.com/chainer/chainerrl/pull/126). The wider clip is that of CleanRL's search for the fastest Pong
(github.com/vwxyzjn/cleanrl/pull/100); the value loss is not clipped, which does not help (Andrychowicz et al. 2021).
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from rich.console import Console
from rich.table import Table
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import rl_triton as rlt
from rl_triton.adapters.gymnasium import Recorder


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    seed: int = 1
    cuda: bool = True
    """use a GPU where there is one"""
    env_id: str = "pong"
    """a game of ale-py (`pong`), or its name in gymnasium (`ALE/Pong-v5`, `PongNoFrameskip-v4`)"""
    credit: Literal["rl_triton", "loop"] = "rl_triton"
    """what computes advantages and returns"""
    total_timesteps: int = 3_000_000
    num_envs: int = 32
    num_steps: int = 64
    """steps of each environment in a rollout"""
    threads: int = 0
    """of the emulators; 0: one for each processor of the machine, also where the process may use only some"""
    learning_rate: float = 5e-4
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 16
    update_epochs: int = 4
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = False
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    max_frames: int = 108_000
    """of an episode, which is truncated there"""
    checkpoint_every: int = 100
    """updates between checkpoints"""
    max_minutes: float | None = None
    """stop training then, as if it were done; the run can be resumed"""
    resume: Path | None = None
    """the folder of a run; all arguments but --max-minutes are those in its args.json. Networks, optimiser, random
    numbers and curve go on exactly; the emulators begin new episodes"""
    runs: Path = Path("runs")
    """tensorboard logs, checkpoints, the learning curve (PNG) and the results (JSON) go here"""


def game_of(env_id: str) -> str:
    """ale-py's name of a game: PongNoFrameskip-v4 and ALE/Pong-v5 are pong, MsPacman is ms_pacman."""
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def make_envs(args: Args) -> AtariVectorEnv:
    return AtariVectorEnv(
        game_of(args.env_id),
        num_envs=args.num_envs,
        num_threads=args.threads,
        max_num_frames_per_episode=args.max_frames,
        life_loss_info=True,  # a lost life terminates for the learner, and the game goes on
        reward_clipping=False,  # clipped below; the curve shows the game's own score
    )


class Agent(nn.Module):
    """The network of Mnih et al. 2015, with a policy and a value head."""

    def __init__(self, actions: int) -> None:
        super().__init__()

        def layer(module: nn.Module, scale: float = 2**0.5) -> nn.Module:
            nn.init.orthogonal_(module.weight, scale)
            nn.init.zeros_(module.bias)
            return module

        self.network = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor, self.critic = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, frames: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        hidden = self.network(frames.float() / 255.0)
        return Categorical(logits=self.actor(hidden), validate_args=False), self.critic(hidden).squeeze(-1)

    def value(self, frames: torch.Tensor) -> torch.Tensor:
        return self(frames)[1]


def loop(rewards, values, *, terminated, truncated, bootstrap_values, last_values, valid, time_dim, gamma, lambda_):
    """Generalized advantage estimation as a loop over steps, one kernel an operation."""
    assert time_dim == 0
    advantages = torch.empty_like(values)
    ahead, following = torch.zeros_like(last_values), last_values
    for t in reversed(range(len(rewards))):
        cut = terminated[t]
        if truncated is not None:
            following = torch.where(truncated[t], bootstrap_values[t], following)
            cut = cut | truncated[t]
        error = rewards[t] + gamma * torch.where(terminated[t], 0.0, following) - values[t]
        advantages[t] = ahead = error + gamma * lambda_ * torch.where(cut, 0.0, ahead)
        following = values[t]
    # A reset row stands behind the end of an episode, so nobody read it above.
    return torch.where(valid, advantages, 0.0), torch.where(valid, advantages + values, 0.0)


CREDIT = {"rl_triton": rlt.gae, "loop": loop}


@dataclass
class Progress:
    """What a run has come to, and a checkpoint holds besides networks and random numbers."""

    iteration: int = 0
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    """at the end of each game"""
    returns: list[float] = field(default_factory=list)
    """of each game"""
    phases: dict[str, list[float]] = field(default_factory=dict)
    """seconds of each update, by phase"""
    largest_difference: float = float("nan")
    """between rl_triton and the loop, on the last rollout"""

    @property
    def final_return(self) -> float:
        """Mean over the last 100 games."""
        return float(np.mean(self.returns[-100:])) if self.returns else float("nan")


class Clock:
    """Seconds by phase. Waits for the device at each phase's end."""

    def __init__(self, device: torch.device, seconds: dict[str, list[float]]) -> None:
        self.device, self.seconds = device, seconds
        self.start()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.last = self.now()

    def lap(self, phase: str) -> None:
        now = self.now()
        self.seconds.setdefault(phase, []).append(now - self.last)
        self.last = now


def save(path: Path, agent: Agent, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Written beside and moved, so that a run that is killed meanwhile leaves the last checkpoint whole."""
    state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    state |= {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def load(path: Path, agent: Agent, optimizer: torch.optim.Optimizer, device: torch.device) -> Progress:
    state = torch.load(path, map_location=device, weights_only=True)
    agent.load_state_dict(state["agent"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([x.cpu() for x in state["cuda"]])
    return Progress(**state["progress"])


def train(args: Args, device: torch.device, folder: Path, writer: SummaryWriter) -> Progress:
    envs = make_envs(args)
    agent = Agent(int(envs.single_action_space.n)).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=device.type == "cuda")
    checkpoint = folder / "checkpoint.pt"
    progress = load(checkpoint, agent, optimizer, device) if args.resume else Progress()
    recorder = Recorder(envs.autoreset_mode)
    clock = Clock(device, progress.phases)
    credit = CREDIT[args.credit]

    T, N = args.num_steps, args.num_envs
    iterations = max(1, args.total_timesteps // (T * N))
    observations = torch.zeros((T, N, *envs.single_observation_space.shape), dtype=torch.uint8, device=device)
    actions = torch.zeros(T, N, dtype=torch.int64, device=device)
    log_probs, values = torch.zeros(T, N, device=device), torch.zeros(T, N, device=device)
    running = np.zeros(N)
    obs, _ = envs.reset(seed=args.seed + 1000 * progress.iteration)
    before = progress.seconds
    start = time.perf_counter()
    bar = tqdm(range(progress.iteration, iterations), initial=progress.iteration, total=iterations, disable=None)
    for iteration in bar:
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - iteration / iterations)
        clock.start()
        for t in range(T):
            observations[t] = torch.from_numpy(obs).to(device, non_blocking=True)
            with torch.no_grad():
                policy, values[t] = agent(observations[t])
                actions[t] = policy.sample()
                log_probs[t] = policy.log_prob(actions[t])
            obs, rewards, terminated, truncated, infos = envs.step(actions[t].cpu().numpy())
            recorder.step(obs, np.sign(rewards), terminated, truncated, infos)
            running += rewards
            for i in np.nonzero((terminated & (infos["lives"] == 0)) | truncated)[0]:
                progress.steps.append((iteration * T + t + 1) * N)
                progress.returns.append(float(running[i]))
                running[i] = 0.0
        with torch.no_grad():
            last_values = agent.value(torch.from_numpy(obs).to(device))
        window = recorder.window(values, last_values)
        clock.lap("rollout")

        estimate = dict(**window.boundary, gamma=args.gamma, lambda_=args.gae_lambda)
        advantages, returns = credit(window.rewards, values, **estimate)
        clock.lap("credit")

        kept = window.valid.flatten().nonzero().squeeze(-1)  # the transitions; reset rows are none
        batch = [x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, returns, values)]
        for _ in range(args.update_epochs):
            shuffled = kept[torch.randperm(len(kept), device=device)]
            for rows in shuffled.chunk(args.num_minibatches):
                loss, figures = loss_of(args, agent, *(x[rows] for x in batch))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        clock.lap("optimisation")

        progress.iteration = iteration + 1
        progress.seconds = before + time.perf_counter() - start
        steps = (iteration + 1) * T * N
        if progress.returns:
            writer.add_scalar("charts/episodic_return", progress.final_return, steps)
        for name, x in figures.items():
            writer.add_scalar(f"losses/{name}", x, steps)
        writer.add_scalar("charts/SPS", steps / progress.seconds, steps)
        bar.set_postfix({"return": f"{progress.final_return:.1f}", "steps/s": f"{steps / progress.seconds:,.0f}"})
        late = args.max_minutes is not None and time.perf_counter() - start > 60.0 * args.max_minutes
        last = late or progress.iteration == iterations
        if last:
            both = [function(window.rewards, values, **estimate) for function in CREDIT.values()]
            progress.largest_difference = max((a - b).abs().max().item() for a, b in zip(*both, strict=True))
            torch.save(window._asdict() | {"values": values}, folder / "rollout.pt")
        if last or progress.iteration % args.checkpoint_every == 0:
            save(checkpoint, agent, optimizer, progress)
        if last:
            break
    bar.close()
    envs.close()
    return progress


def loss_of(args: Args, agent: Agent, obs, actions, old_log_probs, advantages, returns, old_values):
    policy, values = agent(obs)
    log_ratio = policy.log_prob(actions) - old_log_probs
    ratio = log_ratio.exp()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -torch.minimum(advantages * ratio, advantages * clipped).mean()
    value_loss = (values - returns).square()
    if args.clip_vloss:
        near = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.maximum(value_loss, (near - returns).square())
    value_loss = 0.5 * value_loss.mean()
    entropy = policy.entropy().mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    divergence = ((ratio - 1.0) - log_ratio).mean()
    names = ("policy_loss", "value_loss", "entropy", "approx_kl")
    return loss, dict(zip(names, (x.detach() for x in (policy_loss, value_loss, entropy, divergence)), strict=True))


def plot(progress: Progress, args: Args, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    if progress.returns:
        window = min(100, len(progress.returns))
        mean = np.convolve(progress.returns, np.ones(window) / window, mode="valid")
        axes.plot(progress.steps[window - 1 :], mean)
    axes.set(
        xlabel="environment steps (4 frames each)",
        ylabel="score (mean of 100 games)",
        title=f"PPO on {game_of(args.env_id)}, {args.num_steps} x {args.num_envs}, credit by {args.credit}",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def stored(args: Args) -> dict[str, Any]:
    return {key: str(x) if isinstance(x, Path) else x for key, x in asdict(args).items()}


def main(args: Args) -> int:
    if args.resume is not None:
        folder = args.resume
        before = json.loads((folder / "args.json").read_text())
        args = Args(**before | {"runs": Path(before["runs"]), "resume": folder, "max_minutes": args.max_minutes})
    else:
        name = f"{game_of(args.env_id)}__{args.exp_name}__{args.credit}__{args.seed}__{int(time.time())}"
        folder = args.runs / name
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps(stored(args), indent=1))
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    writer = SummaryWriter(str(folder))
    rows = "\n".join(f"|{key}|{value}|" for key, value in stored(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    progress = train(args, device, folder, writer)
    writer.close()
    # Medians, without the first tenth of the updates, which compiles.
    medians = {phase: float(np.median(x[len(x) // 10 :])) for phase, x in progress.phases.items()}
    update = sum(medians.values())
    steps = progress.iteration * args.num_steps * args.num_envs
    results = {"args": stored(args), "device": str(device), "seconds": progress.seconds, "phases": medians}
    results |= {"steps_per_second": steps / progress.seconds, "final_return": progress.final_return}
    results |= {"total_steps": steps, "largest_difference": progress.largest_difference}
    results |= {"steps": progress.steps, "returns": progress.returns}
    (folder / "results.json").write_text(json.dumps(results))
    plot(progress, args, folder / "curve.png")

    console = Console()
    table = Table("phase of an update", "median", "share", title=folder.name)
    for phase, x in medians.items():
        table.add_row(phase, f"{x * 1e3:.3f} ms", f"{x / update:.2%}")
    console.print(table)
    console.print(f"share of credit assignment in an update: {medians['credit'] / update:.2%} ({args.credit})")
    console.print(
        f"largest difference between rl_triton and the loop on the last rollout: {progress.largest_difference:.2g}"
    )
    score = f"{progress.final_return:.1f} over the last {min(100, len(progress.returns))} games"
    console.print(f"{steps:,} steps, {steps / progress.seconds:,.0f} a second; mean score {score}")
    console.print(f"curve, checkpoint and results: {folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
