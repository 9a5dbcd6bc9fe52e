"""IMPALA's actor and learner on CartPole-v1: actors act with an old policy, with and without V-trace's correction.

    python examples/impala_vtrace.py                    # three seeds of each, a minute or two on two cores
    python examples/impala_vtrace.py --lag 0            # on-policy: both are the same algorithm
    python examples/impala_vtrace.py --credit loop

In a distributed run, trajectories reach the learner after it has moved on. Here the actor's parameters are those of the
learner `lag` updates ago, exactly, so that a run can be repeated. `corrected` weighs each step by the ratio of the two
policies (Espeholt et al. 2018); `uncorrected` takes the trajectories for the learner's own. Prints the share of credit
assignment in an update and plots both learning curves.

Measured on a CPU, mean return of the last 100 episodes for seeds 1, 2 and 3: 450, 462, 466 corrected; 131, 10, 20
uncorrected. The lag and the learning rate are chosen so that the policies do differ: at half the learning rate CartPole
forgives the lag, and the uncorrected learner, which clips no ratio, is often the faster one.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
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
    """the first of the seeds"""
    seeds: int = 3
    """runs of each kind"""
    cuda: bool = False
    """use a GPU where there is one"""
    env_id: str = "CartPole-v1"
    """any environment with vectors as observations and discrete actions"""
    credit: Literal["rl_triton", "loop"] = "rl_triton"
    """what computes targets and advantages"""
    lag: int = 20
    """updates by which the actors' policy is older than the learner's"""
    total_timesteps: int = 600_000
    """of each run"""
    num_envs: int = 32
    num_steps: int = 32
    learning_rate: float = 2e-3
    anneal_lr: bool = True
    gamma: float = 0.99
    reward_scale: float = 0.02
    """for the learner; keeps values near 1"""
    rho_bar: float = 1.0
    c_bar: float = 1.0
    ent_coef: float = 0.02
    vf_coef: float = 2.0
    max_grad_norm: float = 0.5
    runs: Path = Path("runs")
    """tensorboard logs, the learning curves (PNG) and the results (JSON) go here"""


class Agent(nn.Module):
    def __init__(self, observation_size: int, actions: int) -> None:
        super().__init__()

        def network(outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )

        self.actor, self.critic = network(actions), network(1)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs).squeeze(-1)

    def policy(self, obs: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs), validate_args=False)


def loop(
    rewards, values, *, terminated, truncated, bootstrap_values, last_values, valid, time_dim, log_rhos, gamma, rho_bar,
    c_bar,
):  # fmt: skip
    """V-trace as a loop over steps: Espeholt et al. 2018, equation 1 and section 4.2."""
    assert time_dim == 0
    ratios = log_rhos.exp()
    rhos, cs = ratios.clamp(max=rho_bar), ratios.clamp(max=c_bar)
    targets, advantages = torch.zeros_like(values), torch.zeros_like(values)
    following = beyond = last_values
    ahead = torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        cut = terminated[t] if truncated is None else terminated[t] | truncated[t]
        ends_in = torch.zeros_like(following)
        if truncated is not None:
            ends_in = torch.where(terminated[t], ends_in, bootstrap_values[t])
        following, beyond = torch.where(cut, ends_in, following), torch.where(cut, ends_in, beyond)
        ahead = rhos[t] * (rewards[t] + gamma * following - values[t]) + gamma * cs[t] * torch.where(cut, 0.0, ahead)
        advantages[t] = rhos[t] * (rewards[t] + gamma * beyond - values[t])
        targets[t] = values[t] + ahead
        following, beyond = values[t], targets[t]
    if valid is not None:  # a reset row stands behind the end of an episode, so nobody read it above
        targets, advantages = torch.where(valid, targets, 0.0), torch.where(valid, advantages, 0.0)
    return targets, advantages


CREDIT = {"rl_triton": rlt.vtrace, "loop": loop}


@dataclass
class Run:
    steps: list[int]
    returns: list[float]
    credit_seconds: list[float]
    update_seconds: list[float]
    """of the learner, the credit in it"""
    seconds: float = 0.0
    largest_ratio: float = 0.0

    @property
    def final_return(self) -> float:
        """Mean over the last 100 episodes."""
        return float(np.mean(self.returns[-100:]))


def train(args: Args, corrected: bool, seed: int, writer: SummaryWriter, device: torch.device) -> Run:
    torch.manual_seed(seed)
    envs = gym.make_vec(args.env_id, num_envs=args.num_envs)
    envs.action_space.seed(seed)
    size, actions_of = envs.single_observation_space.shape[0], envs.single_action_space.n
    agent, actor = Agent(size, actions_of).to(device), Agent(size, actions_of).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    history: deque[dict[str, torch.Tensor]] = deque(maxlen=args.lag + 1)
    recorder = Recorder(envs.metadata["autoreset_mode"])
    credit = CREDIT[args.credit]
    name = "corrected" if corrected else "uncorrected"

    T, N = args.num_steps, args.num_envs
    observations = torch.zeros(T + 1, N, size, device=device)
    actions = torch.zeros(T, N, dtype=torch.int64, device=device)
    behavior_log_probs = torch.zeros(T, N, device=device)
    obs, _ = envs.reset(seed=seed)
    running = np.zeros(N)
    run = Run([], [], [], [])
    start = time.perf_counter()
    updates = max(1, args.total_timesteps // (T * N))
    bar = tqdm(range(updates), desc=f"{name}, seed {seed}", unit="update", disable=None)
    for update in bar:
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / updates)
        history.append({key: x.clone() for key, x in agent.state_dict().items()})
        actor.load_state_dict(history[0])

        for t in range(T):  # the actor
            observations[t] = torch.as_tensor(obs, dtype=torch.float32)
            with torch.no_grad():
                policy = actor.policy(observations[t])
                actions[t] = policy.sample()
                behavior_log_probs[t] = policy.log_prob(actions[t])
            obs, rewards, terminated, truncated, infos = envs.step(actions[t].cpu().numpy())
            recorder.step(obs, args.reward_scale * rewards, terminated, truncated, infos)
            running += rewards
            for i in np.nonzero(terminated | truncated)[0]:
                run.steps.append((update * T + t + 1) * N)
                run.returns.append(float(running[i]))
                running[i] = 0.0
        observations[T] = torch.as_tensor(obs, dtype=torch.float32)

        begin = time.perf_counter()  # the learner
        policy, values = agent.policy(observations[:T]), agent.value(observations)
        log_probs = policy.log_prob(actions)
        with torch.no_grad():
            log_rhos = log_probs - behavior_log_probs if corrected else torch.zeros_like(log_probs)
        window = recorder.window(values[:T], values[T], agent.value)
        before = time.perf_counter()
        targets, advantages = credit(
            window.rewards,
            values[:T].detach(),
            **window.boundary,
            log_rhos=log_rhos,
            gamma=args.gamma,
            rho_bar=args.rho_bar,
            c_bar=args.c_bar,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        run.credit_seconds.append(time.perf_counter() - before)
        kept = slice(None) if window.valid is None else window.valid
        policy_loss = -(log_probs * advantages)[kept].mean()
        value_loss = 0.5 * (targets - values[:T])[kept].square().mean()
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * policy.entropy()[kept].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        run.largest_ratio = max(run.largest_ratio, float(log_rhos.max().exp()))
        run.update_seconds.append(time.perf_counter() - begin)

        if run.returns:
            recent = float(np.mean(run.returns[-100:]))
            writer.add_scalar(f"{name}/episodic_return/seed_{seed}", recent, (update + 1) * T * N)
            bar.set_postfix({"return": f"{recent:.0f}"})
    run.seconds = time.perf_counter() - start
    envs.close()
    return run


def plot(runs: dict[str, list[Run]], args: Args, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    grid = np.linspace(0, args.total_timesteps, 200)
    for name, group in runs.items():
        smoothed = []
        for run in group:
            window = min(100, len(run.returns))
            mean = np.convolve(run.returns, np.ones(window) / window, mode="valid")
            smoothed.append(np.interp(grid, run.steps[window - 1 :], mean))
        (line,) = axes.plot(grid, np.mean(smoothed, axis=0), label=f"{name} ({len(group)} seeds)")
        axes.fill_between(grid, np.min(smoothed, axis=0), np.max(smoothed, axis=0), color=line.get_color(), alpha=0.2)
    axes.set(
        xlabel="environment steps",
        ylabel="return (mean of 100 episodes)",
        title=f"{args.env_id}, actors {args.lag} updates behind; mean and range of the seeds",
    )
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(args: Args) -> int:
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the networks are tiny
    name = f"{args.env_id}__{args.exp_name}__{args.credit}__{args.seed}__{int(time.time())}"
    folder = args.runs / name
    writer = SummaryWriter(str(folder))
    rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    runs = {
        kind: [
            train(args, kind == "corrected", seed, writer, device) for seed in range(args.seed, args.seed + args.seeds)
        ]
        for kind in ("corrected", "uncorrected")
    }
    writer.close()
    plot(runs, args, folder / "curves.png")
    stored = {"args": {key: str(x) if isinstance(x, Path) else x for key, x in asdict(args).items()}}
    stored |= {"device": str(device), "runs": {kind: [asdict(run) for run in group] for kind, group in runs.items()}}
    (folder / "results.json").write_text(json.dumps(stored))

    console = Console()
    table = Table("", *runs, title=f"V-trace on {args.env_id}, actors {args.lag} updates behind")
    groups = list(runs.values())
    table.add_row(
        "mean return, last 100 episodes", *(" ".join(f"{run.final_return:.0f}" for run in group) for group in groups)
    )
    table.add_row("largest ratio of the policies", *(f"{max(r.largest_ratio for r in group):.3g}" for group in groups))
    table.add_row("time of a run", *(f"{np.mean([run.seconds for run in group]):.1f} s" for group in groups))
    console.print(table)
    every = [run for group in groups for run in group]
    credit, update = (
        np.median([x for run in every for x in y(run)])
        for y in (lambda run: run.credit_seconds, lambda run: run.update_seconds)
    )
    console.print(f"share of credit assignment in the learner's update: {credit / update:.2%} ({args.credit})")
    console.print(f"curves and results: {folder}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
