"""CleanRL: the loop that every script carries inline becomes one call, in the script's own names and order.

CleanRL is a collection of single-file scripts, so there is nothing to patch: a script calls these functions where its
loop was, and `python -m rl_triton.adapters.cleanrl SCRIPT.py` makes that edit. The tensors are CleanRL's: [T, N], time
first, with `dones[t]` set where row t starts an episode and `next_done` for the observation after the last row. They
are read where they are; no shifted copy is made. As in CleanRL, a time limit counts as a termination; where that
matters, `rl_triton.adapters.gymnasium` keeps the two apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import rl_triton as rlt
from rl_triton import _checks

__all__ = ["RNDGAE", "compute_gae", "compute_gae_rnd", "compute_q_lambda", "normalize_advantages"]


_DTYPES = _checks.FLOATS | _checks.INTEGERS


class RNDGAE(NamedTuple):
    """Result of `compute_gae_rnd`, in the order in which the script assigns it."""

    ext_advantages: torch.Tensor
    int_advantages: torch.Tensor
    ext_returns: torch.Tensor
    int_returns: torch.Tensor


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    next_value: torch.Tensor,
    next_done: torch.Tensor,
    gamma: float | torch.Tensor,
    gae_lambda: float | torch.Tensor,
    *,
    next_step_autoreset: bool = False,
) -> rlt.GAE:
    """Advantages and returns of a rollout, in place of the loop of CleanRL's PPO scripts.

        δ[t] = r[t] + γ V[t+1] (1 - dones[t+1]) - V[t]
        A[t] = δ[t] + γ λ (1 - dones[t+1]) A[t+1]
        returns[t] = A[t] + V[t]

    with `next_value` and `next_done` for row T, and A[T] = 0. float32 results on the CPU have the loop's bits; on a GPU
    they agree to 1e-5. A flag selects where the loop multiplies: a NaN beyond an episode's end does not come back
    across it.

    Args:
        rewards: [T, N], or [T, ...] with any batch shape; any strides, float or integer.
        values: V of the observation of each row, the shape of `rewards`.
        dones: flag at the start of a row: the row's observation is the first of an episode. Shape of `rewards`, any
            dtype, nonzero is true. Where a script keeps the flag of the observation after the last row as a row T,
            pass `dones[:-1]`, and `dones[-1]` as `next_done`.
        next_value: V of the observation after the last row: [N], [1, N] or [N, 1].
        next_done: whether that observation is the first of an episode: [N], [1, N] or [N, 1].
        gamma, gae_lambda: γ and λ.
        next_step_autoreset: rows with a flag are no transitions (EnvPool, gymnasium >= 1.0: the action was ignored, the
            observation is the last one of the old episode). They are skipped and give 0; leave rows with
            `dones != 0` out of the loss. Off by default, as in CleanRL, which trains on them.

    Returns:
        GAE(advantages, returns), of the shape of `rewards`, without an autograd graph.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit; the message names the argument.

    Source: Schulman et al. 2016 (arXiv 1506.02438), as CleanRL indexes it.
    """
    op = "compute_gae"
    dones = _per_step(op, "dones", dones, rewards, "next_done")
    return rlt.gae(
        rewards,
        _per_step(op, "values", values, rewards, "next_value"),
        dones,
        last_values=_per_row(op, "next_value", next_value, rewards),
        last_done=_per_row(op, "next_done", next_done, rewards),
        valid=dones == 0 if next_step_autoreset else None,
        gamma=_factor(op, "gamma", gamma, rewards),
        lambda_=_factor(op, "gae_lambda", gae_lambda, rewards),
        time_dim=0,
        flags_at="start",
    )


def compute_gae_rnd(
    rewards: torch.Tensor,
    curiosity_rewards: torch.Tensor,
    ext_values: torch.Tensor,
    int_values: torch.Tensor,
    dones: torch.Tensor,
    next_value_ext: torch.Tensor,
    next_value_int: torch.Tensor,
    next_done: torch.Tensor,
    gamma: float | torch.Tensor,
    int_gamma: float | torch.Tensor,
    gae_lambda: float | torch.Tensor,
) -> RNDGAE:
    """Both streams of random network distillation, in place of the loop of `ppo_rnd_envpool.py`.

    The extrinsic stream is `compute_gae`. The intrinsic one is not episodic (Burda et al. 2018, section 2.3): it reads
    no flags, and its returns run on across the ends of episodes; it has a γ of its own and shares λ.

    Args:
        rewards, ext_values, next_value_ext, gamma: the extrinsic stream.
        curiosity_rewards, int_values, next_value_int, int_gamma: the intrinsic stream, of the same shapes.
        dones, next_done: flags at the start of a row, read by the extrinsic stream only.
        gae_lambda: λ of both.

    Returns:
        RNDGAE(ext_advantages, int_advantages, ext_returns, int_returns), of the shape of `rewards`.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit; the message names the argument.

    Source: Burda et al. 2018 (arXiv 1810.12894).
    """
    op = "compute_gae_rnd"
    ext = compute_gae(
        rewards,
        _per_step(op, "ext_values", ext_values, rewards, "next_value_ext"),
        _per_step(op, "dones", dones, rewards, "next_done"),
        _per_row(op, "next_value_ext", next_value_ext, rewards),
        _per_row(op, "next_done", next_done, rewards),
        _factor(op, "gamma", gamma, rewards),
        _factor(op, "gae_lambda", gae_lambda, rewards),
    )
    curiosity_rewards = _per_step(op, "curiosity_rewards", curiosity_rewards, rewards)
    int_values = _per_step(op, "int_values", int_values, rewards, "next_value_int")
    never = torch.zeros((), dtype=torch.bool, device=curiosity_rewards.device).expand(curiosity_rewards.shape)
    intrinsic = rlt.gae(
        curiosity_rewards,
        int_values,
        never,  # one element, seen from every row
        last_values=_per_row(op, "next_value_int", next_value_int, curiosity_rewards),
        gamma=_factor(op, "int_gamma", int_gamma, rewards),
        lambda_=gae_lambda,
        time_dim=0,
    )
    return RNDGAE(ext.advantages, intrinsic.advantages, ext.returns, intrinsic.returns)


def compute_q_lambda(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    next_value: torch.Tensor,
    next_done: torch.Tensor,
    gamma: float | torch.Tensor,
    q_lambda: float | torch.Tensor,
) -> torch.Tensor:
    """Q(λ) targets, in place of the loop of CleanRL's PQN scripts.

        G[t] = r[t] + γ (1 - dones[t+1]) (λ G[t+1] + (1-λ) V[t+1]),   V = max_a Q
        G[T-1] = r[T-1] + γ (1 - next_done) next_value

    Args:
        rewards: [T, N], or [T, ...] with any batch shape.
        values: max_a Q of the observation of each row, the shape of `rewards`.
        dones: flag at the start of a row, as in `compute_gae`.
        next_value: max_a Q of the observation after the last row: [N], [1, N] or [N, 1].
        next_done: whether that observation is the first of an episode: [N], [1, N] or [N, 1].
        gamma, q_lambda: γ and λ.

    Returns:
        G, of the shape of `rewards`, without an autograd graph.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit; the message names the argument.

    Source: Gallici et al. 2024 (arXiv 2407.04811), as CleanRL writes it.
    """
    op = "compute_q_lambda"
    return rlt.td_lambda_returns(
        rewards,
        _per_step(op, "values", values, rewards, "next_value"),
        _per_step(op, "dones", dones, rewards, "next_done"),
        last_values=_per_row(op, "next_value", next_value, rewards),
        last_done=_per_row(op, "next_done", next_done, rewards),
        gamma=_factor(op, "gamma", gamma, rewards),
        lambda_=_factor(op, "q_lambda", q_lambda, rewards),
        time_dim=0,
        flags_at="start",
    )


def normalize_advantages(b_advantages: torch.Tensor) -> torch.Tensor:
    """PPG's normalisation over the full batch, in place of `(x - x.mean()) / (x.std() + 1e-8)`.

    The statistics are those of the whole tensor, with the unbiased standard deviation. A batch of one element, where
    the line gives NaN, gives 0. For minibatches, masks and several processes see `rl_triton.normalize_advantages`.

    Raises:
        TypeError: not a float tensor.
    """
    return rlt.normalize_advantages(b_advantages, unbiased=True, eps=1e-8)


def _tensor(op: str, name: str, x: object) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {x.dtype}, but a bool, integer or float dtype is needed: pass "
            f"{name}.to(torch.float32)"
        )
    return x


def _per_step(op: str, name: str, x: object, rewards: object, edge: str | None = None) -> torch.Tensor:
    """x, checked here where the library would name it otherwise than the script. `edge`: what takes a row T of it."""
    x, like = _tensor(op, name, x), _tensor(op, "rewards", rewards)
    if x.shape == like.shape and x.device == like.device:
        return x
    message = (
        f"{op}: {name} must have the shape and device of rewards, {list(like.shape)} on {like.device}, got "
        f"{list(x.shape)} on {x.device}"
    )
    if x.device != like.device:
        message += f"; pass {name}.to({str(like.device)!r})"
    elif x.shape == (*like.shape, 1):
        message += f"; pass {name}.squeeze(-1)"
    elif like.shape == (*x.shape, 1):
        message += f"; pass {name}.unsqueeze(-1)"
    elif x.dim() and x.shape[1:] == like.shape[1:] and x.dim() == like.dim():
        if len(x) != len(like) + 1:
            message += "; each needs one row a step"
        else:
            message += f"; it has a row more: pass {name}[:-1]" + (f", and {name}[-1] as {edge}" if edge else "")
    elif x.dim() == 2 and x.shape == like.shape[::-1]:
        message += f"; pass {name}.t() if it is [N, T]"
    raise ValueError(message)


def _factor(op: str, name: str, x: Any, rewards: torch.Tensor) -> Any:
    """x, checked here where the library would name it otherwise than the script."""
    if type(x) is not float:
        _checks.factor(op, name, x, "rewards", rewards)
    return x


def _per_row(op: str, name: str, x: object, rewards: object) -> torch.Tensor:
    """x with the batch shape of [T, ...] rewards, as a view; value heads leave a unit axis before or behind it."""
    x, like = _tensor(op, name, x), _tensor(op, "rewards", rewards)
    batch = like.shape[1:]
    if x.device != like.device:
        raise ValueError(f"{op}: {name} must be on the device of rewards, {like.device}, got {x.device}")
    if x.shape == batch:
        return x
    if x.shape == (1, *batch):
        return x[0]
    if x.shape == (*batch, 1):
        return x[..., 0]
    forms = ", ".join(str(list(shape)) for shape in dict.fromkeys(((*batch,), (1, *batch), (*batch, 1))))
    raise ValueError(
        f"{op}: {name} must have one entry for each environment, {forms} for rewards of shape {list(like.shape)}, got "
        f"{list(x.shape)}"
    )
