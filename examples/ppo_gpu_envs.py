"""PPO on thousands of environments that live on the device: observations, rewards and flags never leave it.

    python examples/ppo_gpu_envs.py                                     # cart-pole swing-up, 4096 environments
    python examples/ppo_gpu_envs.py --env-id hopper --num-steps 32
    python examples/ppo_gpu_envs.py --env-id brax-ant --norm-obs --reward-scale 0.1 --gamma 0.97    # pip install brax
    python examples/ppo_gpu_envs.py --no-cuda --num-envs 256 --num-steps 32 --hidden 64 --total-timesteps 3000000

The last line is for a CPU and takes a few minutes on two cores: one seed was upright in all of the last 200 steps; with
2500000 steps, the hopper went 25 m in an episode (a random policy: 0.4 m) and did not fall.

Two batched environments with real dynamics are built in, as torch operations: a continuous cart-pole that starts
hanging and is to swing up and balance, and a planar hopper, a body with a springy leg, a foot of its own mass, friction
and contact. Both end in failures (terminated) and in a time limit (truncated), and start anew within the step.

`--credit` says what computes the advantages: `rl_triton`, the plain `loop` over steps, or `compiled_loop`, the same
under torch.compile. Prints where the time of an update goes, tests the policy at the end, and writes the curve.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributions.normal import Normal
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
    env_id: str = "cartpole-swingup"
    """cartpole-swingup, hopper, or brax-NAME"""
    credit: Literal["rl_triton", "loop", "compiled_loop"] = "rl_triton"
    """what computes advantages and returns"""
    compile: Literal["none", "default", "reduce-overhead"] = "none"
    """torch.compile for the policy, the environment's step, the loss and a compiled loop; reduce-overhead replays
    CUDA graphs"""
    total_timesteps: int = 60_000_000
    num_envs: int = 4096
    num_steps: int = 24
    """steps of each environment in a rollout"""
    learning_rate: float = 1e-3
    anneal_lr: bool = True
    reward_scale: float = 1.0
    """for the learner; the curve shows the task's own returns"""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 5
    norm_adv: bool = True
    clip_coef: float = 0.2
    ent_coef: float = 0.002
    vf_coef: float = 1.0
    max_grad_norm: float = 1.0
    target_kl: float | None = 0.02
    """an update stops at the epoch whose approximate KL divergence is larger"""
    hidden: int = 128
    """units in each of two layers of actor and critic"""
    norm_obs: bool = False
    """networks see observations by their mean and standard deviation so far; the built-in ones are scaled by hand"""
    eval_envs: int = 256
    """episodes that test the policy at the end; 0: no test"""
    max_minutes: float | None = None
    """stop training then, and test the policy that is there"""
    runs: Path = Path("runs")
    """tensorboard logs, the learning curve (PNG) and the results (JSON) go here"""


class BatchedEnv:
    """Environments as rows of one state tensor. An episode that ends begins anew within the same step."""

    state_size: int
    observation_size: int
    action_size: int
    time_limit: int
    physics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(self, num_envs: int, device: torch.device, varied: bool = True) -> None:
        self.num_envs, self.device = num_envs, device
        self.varied = varied
        """For training: episodes begin in more states than the task's, and not all at once."""
        self.state = torch.zeros(num_envs, self.state_size, device=device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def initial(self) -> torch.Tensor:
        """States in which episodes begin."""
        raise NotImplementedError

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def judge(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reward and whether the episode is over, in the state that the action led to."""
        raise NotImplementedError

    def reset(self) -> torch.Tensor:
        self.state.copy_(self.initial())
        self.steps.zero_()
        if self.varied:
            self.steps.random_(0, self.time_limit)  # as if they had run for a while: time limits spread out
        return self.observe(self.state)

    def transition(self, state: torch.Tensor, steps: torch.Tensor, action: torch.Tensor, fresh: torch.Tensor):
        """One step, without side effects, so that it compiles whole. fresh: the states in which episodes begin."""
        action = action.clamp(-1.0, 1.0)
        reached, steps = self.physics(state, action), steps + 1
        reward, terminated = self.judge(reached, action)
        truncated = (steps >= self.time_limit) & ~terminated
        done = terminated | truncated
        final_obs = self.observe(reached)
        state, steps = torch.where(done[:, None], fresh, reached), torch.where(done, 0, steps)
        obs = torch.where(done[:, None], self.observe(state), final_obs)
        return state, steps, obs, reward, terminated, truncated, final_obs

    def step(self, action: torch.Tensor):
        """What gymnasium's vector environments return under same-step autoreset; nothing waits for the device."""
        state, steps, obs, reward, terminated, truncated, final_obs = self.transition(
            self.state, self.steps, action, self.initial()
        )
        self.state.copy_(state)
        self.steps.copy_(steps)
        return obs, reward, terminated, truncated, {"final_obs": final_obs}


class CartPoleSwingUp(BatchedEnv):
    """A pole on a cart (Florian 2007, without friction), pushed by up to 10 N. The angle is 0 where the pole is up.

    State: x, dx/dt, angle, d angle/dt. Terminates where the cart leaves its track. 10 s at 50 steps a second, each one
    step of the classical Runge-Kutta method.
    """

    state_size, observation_size, action_size, time_limit = 4, 5, 1, 500
    FORCE, TRACK, DT = 10.0, 2.4, 0.02
    GRAVITY, CART, POLE, HALF = 9.81, 1.0, 0.1, 0.5  # m/s^2, kg, kg, m
    UPRIGHT = 0.2

    def initial(self) -> torch.Tensor:
        state = torch.randn(self.num_envs, 4, device=self.device) * 0.05
        hanging = state[:, 2] + math.pi
        if self.varied:  # every other episode begins at any angle
            anywhere = (torch.rand_like(hanging) * 2.0 - 1.0) * math.pi
            hanging = torch.where(torch.rand_like(hanging) < 0.5, anywhere, hanging)
        state[:, 2] = hanging
        return state

    def derivative(self, state: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
        _, speed, angle, spin = state.unbind(-1)
        sin, cos = angle.sin(), angle.cos()
        total = self.CART + self.POLE
        push = (force + self.POLE * self.HALF * spin.square() * sin) / total
        turn = (self.GRAVITY * sin - cos * push) / (self.HALF * (4.0 / 3.0 - self.POLE * cos.square() / total))
        return torch.stack([speed, push - self.POLE * self.HALF * turn * cos / total, spin, turn], dim=-1)

    def physics(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        force, dt = self.FORCE * action[:, 0], self.DT
        a = self.derivative(state, force)
        b = self.derivative(state + dt / 2 * a, force)
        c = self.derivative(state + dt / 2 * b, force)
        d = self.derivative(state + dt * c, force)
        return state + dt / 6 * (a + 2 * b + 2 * c + d)

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        x, speed, angle, spin = state.unbind(-1)
        return torch.stack([x / self.TRACK, speed / 3.0, angle.cos(), angle.sin(), spin / 5.0], dim=-1)

    def judge(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, angle, spin = state.unbind(-1)
        up = (1.0 + angle.cos()) / 2.0
        centred = 1.0 - 0.5 * (x / self.TRACK).square().clamp(max=1.0)
        calm = (1.0 + (-(spin / 5.0).square()).exp()) / 2.0
        return up * centred * calm - 0.01 * action[:, 0].square(), x.abs() > self.TRACK

    def energy(self, state: torch.Tensor) -> torch.Tensor:
        _, speed, angle, spin = state.unbind(-1)
        rod = self.POLE * self.HALF**2 * 4.0 / 3.0
        kinetic = (self.CART + self.POLE) * speed**2 / 2 + self.POLE * self.HALF * speed * spin * angle.cos()
        return kinetic + rod * spin**2 / 2 + self.POLE * self.GRAVITY * self.HALF * angle.cos()

    def is_upright(self) -> torch.Tensor:
        return self.state[:, 2].cos() > math.cos(self.UPRIGHT)


class Hopper(BatchedEnv):
    """A body on one springy leg, in the plane: after Raibert's hopper (1986).

    Body and foot are masses of their own. The leg between them is a spring and damper whose rest length the first
    action moves; the second is the torque between body and leg. The foot meets the ground with a spring and damper,
    and sticks or slides by Coulomb's law. Symplectic Euler steps of 2 ms, ten for each action; 10 s an episode, which
    terminates where the hopper falls.

    State: body x, z, pitch and their rates, then foot x, z and their rates.
    """

    state_size, observation_size, action_size, time_limit = 10, 10, 2, 500
    GRAVITY, BODY, INERTIA, FOOT = 9.81, 5.0, 0.3, 0.5  # m/s^2, kg, kg m^2, kg
    LEG, STROKE, STIFFNESS, DAMPING = 0.5, 0.12, 1500.0, 20.0  # m, m, N/m, N s/m
    TORQUE, HIP_RANGE, HIP_STOP, HIP_DAMPING = 12.0, 0.9, 60.0, 0.3  # N m, rad, N m/rad, N m s
    GROUND, GROUND_DAMPING, FRICTION = 2.0e4, 100.0, 0.9  # N/m, N s/m
    DT, SUBSTEPS = 0.002, 10
    LOWEST, TILT = 0.28, 0.8  # m, rad: beyond, it has fallen
    SPEED = 2.0
    """m/s, up to which speed is rewarded"""

    def initial(self) -> torch.Tensor:
        state = torch.randn(self.num_envs, 10, device=self.device) * 0.02
        state[:, 1] += self.LEG + 0.1
        state[:, 6] = state[:, 0] + 0.02 * state[:, 6]
        state[:, 7] = state[:, 1] - self.LEG
        state[:, 8:] = state[:, 3:5]
        return state

    def leg(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Its direction from body to foot, its length and angle (0: straight down), and their rates."""
        dx, dz = state[:, 6] - state[:, 0], state[:, 7] - state[:, 1]
        dvx, dvz = state[:, 8] - state[:, 3], state[:, 9] - state[:, 4]
        length = (dx.square() + dz.square()).sqrt().clamp(min=1e-3)
        ex, ez = dx / length, dz / length
        return ex, ez, length, torch.atan2(dx, -dz), ex * dvx + ez * dvz, (ex * dvz - ez * dvx) / length

    def forces(self, state: torch.Tensor, action: torch.Tensor):
        """Force of the leg on the foot (x, z) and torque on the body; the reaction acts on the body."""
        ex, ez, length, angle, stretch, turn = self.leg(state)
        push = self.STIFFNESS * (self.LEG + self.STROKE * action[:, 0] - length) - self.DAMPING * stretch
        hip = angle - state[:, 2]
        over = hip - hip.clamp(-self.HIP_RANGE, self.HIP_RANGE)
        torque = self.TORQUE * action[:, 1] - self.HIP_STOP * over - self.HIP_DAMPING * (turn - state[:, 5])
        across = torque / length
        return push * ex - across * ez, push * ez + across * ex, -torque

    def substep(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        dt = self.DT
        x, z, pitch, vx, vz, spin, foot_x, foot_z, foot_vx, foot_vz = state.unbind(-1)
        fx, fz, torque = self.forces(state, action)
        depth = (-foot_z).clamp(min=0.0)
        normal = torch.where(depth > 0.0, (self.GROUND * depth - self.GROUND_DAMPING * foot_vz).clamp(min=0.0), 0.0)
        # Friction is what stops the foot in this step, as far as Coulomb's law lets it.
        stopping = -(foot_vx * self.FOOT / dt + fx)
        limit = self.FRICTION * normal
        friction = torch.maximum(torch.minimum(stopping, limit), -limit)
        vx, vz = vx - dt * fx / self.BODY, vz - dt * (fz / self.BODY + self.GRAVITY)
        spin = spin + dt * torque / self.INERTIA
        foot_vx = foot_vx + dt * (fx + friction) / self.FOOT
        foot_vz = foot_vz + dt * ((fz + normal) / self.FOOT - self.GRAVITY)
        moved = (x + dt * vx, z + dt * vz, pitch + dt * spin, vx, vz, spin)
        return torch.stack([*moved, foot_x + dt * foot_vx, foot_z + dt * foot_vz, foot_vx, foot_vz], dim=-1)

    def physics(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        for _ in range(self.SUBSTEPS):
            state = self.substep(state, action)
        return state

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        _, _, length, angle, stretch, turn = self.leg(state)
        _, z, pitch, vx, vz, spin, _, foot_z, _, _ = state.unbind(-1)
        parts = (z - self.LEG, pitch, vx / 2, vz / 2, spin / 5, (length - self.LEG) * 4, angle - pitch, stretch / 5)
        return torch.stack([*parts, turn / 10, (foot_z * 5).clamp(-1.0, 1.0)], dim=-1)

    def judge(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fallen = (state[:, 1] < self.LOWEST) | (state[:, 2].abs() > self.TILT)
        forward = (state[:, 3] / self.SPEED).clamp(-1.0, 1.0)
        upright = 1.0 - (state[:, 2] / self.TILT).square().clamp(max=1.0)
        return forward + 0.5 * upright - 0.05 * action.square().sum(-1), fallen


class Brax:
    """An environment of Brax. JAX and torch look at the same device memory, through DLPack."""

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        try:
            import jax
            from brax import envs
            from brax.envs.wrappers.training import AutoResetWrapper, EpisodeWrapper, VmapWrapper
        except ImportError as error:
            raise ImportError("--env-id brax-NAME needs Brax: pip install brax") from error

        class KeepFinal(envs.base.Wrapper):
            """Keeps the observation that a restart replaces."""

            def reset(self, rng):
                state = self.env.reset(rng)
                return state.replace(info=state.info | {"final_obs": state.obs})

            def step(self, state, action):
                state = self.env.step(state, action)
                return state.replace(info=state.info | {"final_obs": state.obs})

        self.time_limit, self.num_envs, self.device = 1000, num_envs, device
        env = EpisodeWrapper(envs.get_environment(name, backend="spring"), self.time_limit, action_repeat=1)
        env = AutoResetWrapper(KeepFinal(VmapWrapper(env)))
        self.observation_size, self.action_size = env.observation_size, env.action_size
        self.jax, self.key, self.count = jax, jax.random.PRNGKey(seed), num_envs
        self._reset, self._step = jax.jit(env.reset), jax.jit(env.step)

    def _torch(self, x) -> torch.Tensor:
        return torch.from_dlpack(x).to(self.device)

    def reset(self) -> torch.Tensor:
        self.key, key = self.jax.random.split(self.key)
        self.state = self._reset(self.jax.random.split(key, self.count))
        return self._torch(self.state.obs).clone()

    def step(self, action: torch.Tensor):
        action = self.jax.dlpack.from_dlpack(action.clamp(-1.0, 1.0).contiguous())
        self.state = state = self._step(self.state, action)
        truncated = self._torch(state.info["truncation"]) != 0
        terminated = (self._torch(state.done) != 0) & ~truncated
        final_obs = self._torch(state.info["final_obs"])
        return self._torch(state.obs).clone(), self._torch(state.reward).clone(), terminated, truncated, {
            "final_obs": final_obs
        }  # fmt: skip


ENVIRONMENTS = {"cartpole-swingup": CartPoleSwingUp, "hopper": Hopper}
GOALS = {"brax-ant": 2000.0}
"""Returns of 1000 steps. An ant that only stays on its legs gets 1000; the rest is the way that it goes."""


def compiled(function: Callable, mode: str) -> Callable:
    """Under torch.compile. What a CUDA graph returns is copied, since its next replay writes over it."""
    if mode == "none":
        return function
    graph = torch.compile(function, mode=mode)
    if mode != "reduce-overhead":
        return graph

    def replay(*args, **kwargs):
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(x.clone() for x in graph(*args, **kwargs))

    return replay


def make_env(args: Args, num_envs: int, device: torch.device, *, varied: bool, compile: str):
    if args.env_id.startswith("brax-"):
        return Brax(args.env_id.removeprefix("brax-"), num_envs, device, args.seed)
    if args.env_id not in ENVIRONMENTS:
        raise ValueError(f"--env-id must be {', '.join(ENVIRONMENTS)} or brax-NAME, got {args.env_id!r}")
    env = ENVIRONMENTS[args.env_id](num_envs, device, varied)
    env.transition = compiled(env.transition, compile)
    return env


class Agent(nn.Module):
    def __init__(self, observation_size: int, action_size: int, hidden: int, norm_obs: bool) -> None:
        super().__init__()

        def network(outputs: int, scale: float) -> nn.Sequential:
            sizes = (observation_size, hidden, hidden, outputs)
            layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
            for layer in layers:
                nn.init.orthogonal_(layer.weight, scale if layer is layers[-1] else 2**0.5)
                nn.init.zeros_(layer.bias)
            return nn.Sequential(layers[0], nn.ELU(), layers[1], nn.ELU(), layers[2])

        self.actor, self.critic = network(action_size, 0.01), network(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(action_size))
        self.norm_obs = norm_obs
        self.register_buffer("mean", torch.zeros(observation_size))
        self.register_buffer("std", torch.ones(observation_size))
        self.register_buffer("seen", torch.zeros(()))

    @torch.no_grad()
    def observe(self, obs: torch.Tensor) -> None:
        """Take observations, [..., size], into their mean and standard deviation (Chan, Golub & LeVeque 1979)."""
        obs = obs.flatten(0, -2)
        seen, delta = self.seen + len(obs), obs.mean(0) - self.mean
        squares = self.seen * self.std.square() + len(obs) * obs.var(0, correction=0)
        squares += delta.square() * self.seen * len(obs) / seen
        self.mean += delta * len(obs) / seen
        self.std.copy_((squares / seen).sqrt().clamp(min=1e-3))
        self.seen.copy_(seen)

    def scaled(self, obs: torch.Tensor) -> torch.Tensor:
        return ((obs - self.mean) / self.std).clamp(-10.0, 10.0) if self.norm_obs else obs

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(self.scaled(obs)).squeeze(-1)

    def best(self, obs: torch.Tensor) -> torch.Tensor:
        """The policy's mean action."""
        return self.actor(self.scaled(obs))

    def policy(self, obs: torch.Tensor) -> Normal:
        mean = self.best(obs)
        return Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Action, its log-probability and the value. noise: from the standard normal distribution."""
        policy = self.policy(obs)
        action = policy.mean + policy.stddev * noise
        return action, policy.log_prob(action).sum(-1), self.value(obs)


def loop(rewards, values, *, terminated, truncated, bootstrap_values, last_values, valid, time_dim, gamma, lambda_):
    """Generalized advantage estimation as a loop over steps, one kernel an operation."""
    assert valid is None
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
    return advantages, advantages + values


CREDIT = {"rl_triton": rlt.gae, "loop": loop}


def credit_of(args: Args) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if args.credit != "compiled_loop":
        return CREDIT[args.credit]
    return compiled(loop, "default" if args.compile == "none" else args.compile)


class Clock:
    """Seconds by phase. Waits for the device at each phase's end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}
        self.wait()
        self.last = time.perf_counter()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lap(self, phase: str) -> None:
        self.wait()
        now = time.perf_counter()
        self.seconds.setdefault(phase, []).append(now - self.last)
        self.last = now

    def medians(self) -> dict[str, float]:
        """Of an update's phases, without the first updates, which compile."""
        return {
            phase: float(np.median(x[min(len(x) - 1, max(5, len(x) // 10)) :])) for phase, x in self.seconds.items()
        }


class Loss:
    """PPO's clipped loss on a minibatch."""

    def __init__(self, agent: Agent, args: Args) -> None:
        self.agent, self.args = agent, args

    def __call__(self, obs, actions, old_log_probs, advantages, returns):
        args = self.args
        policy = self.agent.policy(obs)
        log_ratio = policy.log_prob(actions).sum(-1) - old_log_probs
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
        policy_loss = -torch.minimum(advantages * ratio, advantages * clipped).mean()
        value_loss = 0.5 * (self.agent.value(obs) - returns).square().mean()
        entropy = policy.entropy().sum(-1).mean()
        loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
        divergence = ((ratio - 1.0) - log_ratio).mean()
        return loss, torch.stack([policy_loss, value_loss, entropy, divergence]).detach()


def train(args: Args, device: torch.device, writer: SummaryWriter):
    env = make_env(args, args.num_envs, device, varied=True, compile=args.compile)
    agent = Agent(env.observation_size, env.action_size, args.hidden, args.norm_obs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=device.type == "cuda")
    loss_of = Loss(agent, args)
    act = compiled(agent.act, args.compile)
    if args.compile != "none":
        loss_of = torch.compile(loss_of, mode=args.compile)
    credit = credit_of(args)
    recorder = Recorder("SAME_STEP")
    clock = Clock(device)

    T, N = args.num_steps, args.num_envs
    batch_size = T * N
    iterations = max(1, args.total_timesteps // batch_size)
    observations = torch.zeros(T, N, env.observation_size, device=device)
    actions = torch.zeros(T, N, env.action_size, device=device)
    log_probs = torch.zeros(T, N, device=device)
    values = torch.zeros(T, N, device=device)
    running = torch.zeros(N, device=device)  # the return of each episode so far
    finished = torch.zeros(2, device=device)  # sum of the returns of finished episodes, and their number
    curve: list[tuple[int, float, float]] = []
    obs = env.reset()
    start = time.perf_counter()
    bar = tqdm(range(iterations), unit="update", disable=None)
    for iteration in bar:
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - iteration / iterations)
        clock.last = time.perf_counter()
        finished.zero_()
        for t in range(T):
            with torch.no_grad():
                observations[t] = obs
                actions[t], log_probs[t], values[t] = act(observations[t], torch.randn_like(actions[t]))
                obs, rewards, terminated, truncated, infos = env.step(actions[t])
            recorder.step(obs, args.reward_scale * rewards, terminated, truncated, infos)
            done = terminated | truncated
            running += rewards
            finished += torch.stack([torch.where(done, running, 0.0).sum(), done.sum()])
            running.masked_fill_(done, 0.0)
        with torch.no_grad():
            last_values = agent.value(obs)
        window = recorder.window(values, last_values, agent.value)
        clock.lap("rollout")

        advantages, returns = credit(
            window.rewards, values, **window.boundary, gamma=args.gamma, lambda_=args.gae_lambda
        )
        clock.lap("credit")

        batch = tuple(x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, returns))
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            for rows in order.chunk(args.num_minibatches):
                if args.compile == "reduce-overhead":  # a graph for the loss, one for its gradients
                    torch.compiler.cudagraph_mark_step_begin()
                optimizer.zero_grad()
                loss, figures = loss_of(*(x[rows] for x in batch))
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and figures[3] > args.target_kl:
                break
        if args.norm_obs:  # behind the update, whose ratios begin at 1
            agent.observe(observations)
        clock.lap("optimisation")

        steps, seconds = (iteration + 1) * batch_size, time.perf_counter() - start
        total, episodes = finished.tolist()
        if episodes:
            curve.append((steps, seconds, total / episodes))
            writer.add_scalar("charts/episodic_return", total / episodes, steps)
            bar.set_postfix({"return": f"{total / episodes:.1f}", "steps/s": f"{steps / seconds:,.0f}"})
        for name, x in zip(("policy_loss", "value_loss", "entropy", "approx_kl"), figures.tolist(), strict=True):
            writer.add_scalar(f"losses/{name}", x, steps)
        writer.add_scalar("charts/SPS", steps / seconds, steps)
        if args.max_minutes is not None and seconds > 60.0 * args.max_minutes:
            break
    bar.close()
    return agent, curve, clock, time.perf_counter() - start


@torch.no_grad()
def episodes_of(args: Args, act: Callable[[torch.Tensor], torch.Tensor], device: torch.device):
    """One episode of each of `eval_envs` environments: for each whether it fell, how far it came, upright steps."""
    env = make_env(args, args.eval_envs, device, varied=False, compile="none")
    obs = env.reset()
    alive = torch.ones(args.eval_envs, dtype=torch.bool, device=device)
    fell = torch.zeros_like(alive)
    total = torch.zeros(args.eval_envs, device=device)
    distance, upright = torch.zeros_like(total), torch.zeros_like(total)
    for t in range(env.time_limit):
        obs, rewards, terminated, truncated, _ = env.step(act(obs))
        total += torch.where(alive, rewards, 0.0)
        fell |= alive & terminated
        if isinstance(env, BatchedEnv):
            distance = torch.where(alive & ~terminated & ~truncated, env.state[:, 0], distance)
        alive &= ~(terminated | truncated)
        # The last 200 steps whose states are there: after the very last one, the next episode has begun.
        if isinstance(env, CartPoleSwingUp) and env.time_limit - 201 <= t < env.time_limit - 1:
            upright += alive & env.is_upright()
    return {"return": total, "fell": fell.float(), "distance": distance, "upright": upright / 200}


def evaluate(args: Args, agent: Agent, device: torch.device) -> tuple[dict[str, float], list[str]]:
    """The final policy's mean actions, beside uniformly random ones; and what is short of the goal."""
    trained = episodes_of(args, agent.best, device)
    size = agent.log_std.shape[0]
    chance = episodes_of(args, lambda obs: torch.rand(len(obs), size, device=device) * 2 - 1, device)
    results = {"return": trained["return"].mean().item(), "random_return": chance["return"].mean().item()}
    failures = []
    if args.env_id in GOALS and results["return"] < GOALS[args.env_id]:
        failures.append(f"a return of {results['return']:.0f}, less than {GOALS[args.env_id]:.0f}")
    if args.env_id == "cartpole-swingup":
        results["upright"] = trained["upright"].mean().item()
        if results["upright"] < 0.8:
            failures.append(f"upright in {results['upright']:.0%} of the last 200 steps, less than 80 %")
    elif args.env_id == "hopper":
        results |= {"distance": trained["distance"].mean().item(), "falls": trained["fell"].mean().item()}
        results["random_distance"] = chance["distance"].abs().mean().item()
        if results["distance"] < 5 * results["random_distance"]:
            failures.append(f"{results['distance']:.1f} m, less than five times {results['random_distance']:.1f} m")
        if results["falls"] > 0.1:
            failures.append(f"falls in {results['falls']:.0%} of the episodes, more than 10 %")
    return results, failures


def plot(curve: list[tuple[int, float, float]], args: Args, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, _, returns = zip(*curve, strict=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(steps, returns)
    title = f"PPO on {args.env_id}, {args.num_steps} x {args.num_envs}, credit by {args.credit}"
    axes.set(xlabel="environment steps", ylabel="return of finished episodes", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(args: Args) -> int:
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the networks are tiny
    name = f"{args.env_id}__{args.exp_name}__{args.credit}__{args.seed}__{int(time.time())}"
    folder = args.runs / name
    writer = SummaryWriter(str(folder))
    rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")

    agent, curve, clock, seconds = train(args, device, writer)
    results, failures = evaluate(args, agent, device) if args.eval_envs else ({}, [])
    medians = clock.medians()
    update = sum(medians.values())
    stored = {"args": {key: str(x) if isinstance(x, Path) else x for key, x in asdict(args).items()}}
    stored |= {"device": str(device), "seconds": seconds, "phases": medians, "results": results}
    stored |= {"updates": len(clock.seconds["credit"]), "failures": failures, "curve": curve}
    (folder / "results.json").write_text(json.dumps(stored))
    if curve:
        plot(curve, args, folder / "curve.png")
    writer.close()

    console = Console()
    table = Table("phase of an update", "median", "share", title=name)
    for phase, x in medians.items():
        table.add_row(phase, f"{x * 1e3:.3f} ms", f"{x / update:.2%}")
    console.print(table)
    console.print(f"share of credit assignment in an update: {medians['credit'] / update:.2%} ({args.credit})")
    console.print(", ".join([f"{seconds:.0f} s", *(f"{key} {x:.3g}" for key, x in results.items())]))
    console.print(f"curve and results: {folder}", soft_wrap=True)
    for failure in failures:
        console.print(f"[red]{failure}")
    if results and not failures and args.env_id in {*ENVIRONMENTS, *GOALS}:
        console.print("solved")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
