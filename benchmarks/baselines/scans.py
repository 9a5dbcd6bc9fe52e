"""Every op vectorised over time in PyTorch, to be compiled by Inductor.

The recurrences are scanned by log-doubling (Hillis & Steele 1986) over pairs (a, b) that stand for y -> a + b y, with
selection where b is 0, so that the results are right next to NaN and inf as ours are. Arithmetic is float32 for 16-bit
inputs. Arguments are those of the public functions, with `dim`, the time axis, always given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

Tensor = torch.Tensor
Scan = Callable[[Tensor, Tensor, int, bool], Tensor]


def _shift(x: Tensor, d: int, dim: int, reverse: bool, fill: float) -> Tensor:
    """x d steps later (reverse) or earlier, `fill` beyond the edge."""
    n_steps = x.shape[dim]
    kept = x.narrow(dim, d if reverse else 0, n_steps - d)
    padding = [0, 0] * (x.dim() - 1 - dim) + ([0, d] if reverse else [d, 0])
    return pad(kept, padding, value=fill)


def _times(b: Tensor, a: Tensor) -> Tensor:
    """b a, reading a only where b is not 0."""
    return b * torch.where(b == 0, b, a)


def doubling(a: Tensor, b: Tensor, dim: int, reverse: bool) -> Tensor:
    """y[t] = a[t] + b[t] y[t±1], y = 0 beyond the edge."""
    n_steps, d = a.shape[dim], 1
    while d < n_steps:
        a = a + _times(b, _shift(a, d, dim, reverse, 0.0))
        b = b * _shift(b, d, dim, reverse, 1.0)
        d *= 2
    return a


def _composed(before: tuple[Tensor, Tensor], step: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    (a, b), (a_step, b_step) = before, step
    return a_step + _times(b_step, a), b * b_step


def inductor_scan(a: Tensor, b: Tensor, dim: int, reverse: bool) -> Tensor:
    """The same by PyTorch's own associative_scan, which Inductor lowers to one kernel; a prototype, CUDA only."""
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(_composed, (a, b), dim=dim, reverse=reverse, combine_mode="pointwise")[0]


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [x if x is None or x.dtype in (torch.float32, torch.float64) else x.float() for x in tensors]


def _decay(cut: Tensor, factor: float, like: Tensor) -> Tensor:
    """`factor`, in the precision of `like`; 0 where cut."""
    return torch.full_like(like, factor).masked_fill(cut, 0.0)


def _edge(x: Tensor, dim: int, value: bool) -> Tensor:
    last = torch.full_like(x.narrow(dim, 0, 1), value)
    return torch.cat([x.narrow(dim, 0, x.shape[dim] - 1), last], dim)


def _successors(
    values: Tensor | None,
    like: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    bootstrap_values: Tensor | None,
    last_values: Tensor,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """v' and where the scan is cut: at ends of episodes and at the window's edge. Without values, v' is right where it
    is cut."""
    last = last_values.unsqueeze(dim)
    source = torch.zeros_like(like) if values is None else values
    v_next = torch.cat([source.narrow(dim, 1, like.shape[dim] - 1), last], dim)
    cut = terminated
    if truncated is not None:
        v_next = torch.where(truncated, bootstrap_values, v_next)
        cut = cut | truncated
    return torch.where(terminated, 0.0, v_next), _edge(cut, dim, True)


def gae(
    rewards, values, terminated, *, last_values, gamma, lambda_, dim, truncated=None, bootstrap_values=None,
    scan: Scan = doubling,
):  # fmt: skip
    dtype = rewards.dtype
    r, v, boot, last = _wide(rewards, values, bootstrap_values, last_values)
    v_next, cut = _successors(v, r, terminated, truncated, boot, last, dim)
    advantages = scan(r + gamma * v_next - v, _decay(cut, gamma * lambda_, r), dim, True)
    return advantages.to(dtype), (advantages + v).to(dtype)


def td_lambda_returns(
    rewards, values, terminated, *, last_values, gamma, lambda_, dim, truncated=None, bootstrap_values=None,
    scan: Scan = doubling,
):  # fmt: skip
    r, v, boot, last = _wide(rewards, values, bootstrap_values, last_values)
    v_next, cut = _successors(v, r, terminated, truncated, boot, last, dim)
    alpha = r + gamma * torch.where(cut, v_next, (1 - lambda_) * v_next)
    return scan(alpha, _decay(cut, gamma * lambda_, r), dim, True).to(rewards.dtype)


def discounted_returns(
    rewards, terminated, *, last_values, gamma, dim, truncated=None, bootstrap_values=None, scan: Scan = doubling
):
    r, boot, last = _wide(rewards, bootstrap_values, last_values)
    v_next, cut = _successors(None, r, terminated, truncated, boot, last, dim)
    alpha = r + gamma * torch.where(cut, v_next, 0.0)
    return scan(alpha, _decay(cut, gamma, r), dim, True).to(rewards.dtype)


def n_step_returns(
    rewards, values, terminated, *, n, last_values, gamma, dim, truncated=None, bootstrap_values=None,
    scan: Scan | None = None,
):  # fmt: skip
    """No scan: n shifts."""
    r, v, boot, last = _wide(rewards, values, bootstrap_values, last_values)
    v_next, cut = _successors(v, r, terminated, truncated, boot, last, dim)
    returns = r + gamma * v_next
    for _ in range(n - 1):
        returns = r + gamma * torch.where(cut, v_next, _shift(returns, 1, dim, True, 0.0))
    return returns.to(rewards.dtype)


def vtrace(
    rewards, values, terminated, *, log_rhos, last_values, gamma, lambda_, dim, truncated=None, bootstrap_values=None,
    scan: Scan = doubling,
):  # fmt: skip
    dtype = rewards.dtype
    r, v, boot, last, log_w = _wide(rewards, values, bootstrap_values, last_values, log_rhos)
    v_next, cut = _successors(v, r, terminated, truncated, boot, last, dim)
    w = log_w.exp()
    clipped = torch.where(w > 1, 1.0, w)
    delta = clipped * (r + gamma * v_next - v)
    targets = v + scan(delta, torch.where(cut, 0.0, gamma * lambda_ * clipped), dim, True)
    x_next = torch.where(cut, v_next, _shift(targets, 1, dim, True, 0.0))
    return targets.to(dtype), (clipped * (r + gamma * x_next - v)).to(dtype)


def retrace(
    rewards, q_values, terminated, *, log_rhos, next_q_values, next_policy_probs, gamma, lambda_, dim, truncated=None,
    scan: Scan = doubling,
):  # fmt: skip
    dtype = rewards.dtype
    r, q, log_w, next_q, next_probs = _wide(rewards, q_values, log_rhos, next_q_values, next_policy_probs)
    expected = torch.where(next_probs == 0, 0.0, next_probs * next_q).sum(-1)
    expected = torch.where(terminated, 0.0, expected)
    cut = _edge(terminated if truncated is None else terminated | truncated, dim, True)
    w = log_w.exp()
    clipped = torch.where(w > 1, 1.0, w)
    decay = torch.where(cut, 0.0, gamma * lambda_ * _shift(clipped, 1, dim, True, 0.0))
    targets = q + scan(r + gamma * expected - q, decay, dim, True)
    x_next = torch.where(cut, expected, _shift(targets, 1, dim, True, 0.0))
    return targets.to(dtype), (clipped * (r + gamma * x_next - q)).to(dtype)


def eligibility_traces(x, done, *, gamma, lambda_, dim, scan: Scan = doubling):
    (wide,) = _wide(x)
    return scan(wide, _shift(_decay(done, gamma * lambda_, wide), 1, dim, False, 0.0), dim, False).to(x.dtype)


def episodic_cumsum(x, done, *, dim, scan: Scan = doubling):
    (wide,) = _wide(x)
    return scan(wide, _shift(_decay(done, 1.0, wide), 1, dim, False, 0.0), dim, False).to(x.dtype)


def affine_scan(alpha, beta, *, dim, scan: Scan = doubling):
    a, b = _wide(alpha, beta)
    return scan(a, b, dim, True).to(alpha.dtype)


def normalize_advantages(advantages, *, dim, scan: Scan | None = None):
    """The line that every PPO script has; `dim` is not used."""
    (x,) = _wide(advantages)
    return ((x - x.mean()) / (x.std() + 1e-8)).to(advantages.dtype)


SCANS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        gae, td_lambda_returns, discounted_returns, n_step_returns, vtrace, retrace, eligibility_traces,
        episodic_cumsum, affine_scan, normalize_advantages,
    )
}  # fmt: skip
