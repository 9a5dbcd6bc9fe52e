"""The linear estimators with `differentiable=True`: their fused scan forward, its transpose backward, a launch each.

The transpose is linear too, and its transpose is the estimator, so the two functions here are each other's backward:
gradients of every order exist, and nothing is kept for them but the flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rl_triton import _backend, _plan
from rl_triton._algorithm import Algorithm
from rl_triton._autograd import Function
from rl_triton.boundaries import Successors

_LINEAR = ("discounted_returns", "gae", "td_lambda_returns")


def is_linear(
    algorithm: Algorithm, factors: Mapping[str, Any], boundary: Any, carry: tuple[Any, Any], return_carry: bool
) -> bool:
    """Whether a call is linear in its tensors, with constant coefficients and every step a transition. All others are
    tensor expressions around the scan (`_differentiable.py`)."""
    return (
        algorithm.name in _LINEAR
        and all(isinstance(factor, float) and math.isfinite(factor) for factor in factors.values())
        and boundary.valid is None
        and carry[0] is None
        and not return_carry
    )


def estimate(
    op: str,
    dim: int,
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    boundary: Successors,
    factors: Mapping[str, Any],
) -> tuple[torch.Tensor, ...]:
    """The results of a checked call that `is_linear`, with their graph."""
    given = rewards, values, boundary.last_values, boundary.bootstrap_values, boundary.next_values
    flags = boundary.terminated, boundary.truncated, boundary.last_done
    arguments = (*given, *flags, op, factors["gamma"], factors.get("lambda_", 1.0), dim)
    results = _Estimate.apply(*arguments)
    _plan.record(_plan.Node(_Estimate.apply_untransformed, arguments))
    return results


class _Estimate(Function):
    """The estimator. What it keeps: the flags."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rewards: torch.Tensor,
        values: torch.Tensor | None,
        last_values: torch.Tensor | None,
        bootstrap_values: torch.Tensor | None,
        next_values: torch.Tensor | None,
        terminated: torch.Tensor,
        truncated: torch.Tensor | None,
        last_done: torch.Tensor | None,
        op: str,
        gamma: float,
        lambda_: float,
        dim: int,
    ) -> tuple[torch.Tensor, ...]:
        import rl_triton as rlt

        options: dict[str, Any] = {
            "truncated": truncated,
            "bootstrap_values": bootstrap_values,
            "last_values": last_values,
            "next_values": next_values,
            "gamma": gamma,
            "time_dim": dim,
            "flags_at": "end" if last_done is None else "start",
            "last_done": last_done,
        }
        if op == "gae" and values is not None:
            return tuple(rlt.gae(rewards, values, terminated, lambda_=lambda_, **options))
        if op == "td_lambda_returns":
            return (rlt.td_lambda_returns(rewards, values, terminated, lambda_=lambda_, **options),)
        return (rlt.discounted_returns(rewards, terminated, **options),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *given, terminated, truncated, last_done, ctx.op, ctx.gamma, ctx.lambda_, ctx.dim = inputs
        ctx.save_for_backward(terminated, truncated, last_done)
        ctx.dtypes = tuple(None if x is None else x.dtype for x in given)
        ctx.backend = _backend.chosen()  # a backward may run in another thread, or after the `with` block
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * 12
        rewards, values, last_values, *successors = ctx.needs_input_grad[:5]
        terminated = ctx.saved_tensors[0]
        has_next_values = ctx.dtypes[4] is not None
        # With next values, those of the window's edge are not read; nor are, but by gae, the steps' own.
        nothing_last = last_values and has_next_values
        wanted = (
            rewards,
            values and (ctx.op == "gae" or not has_next_values),
            any(successors),
            last_values and not has_next_values,
        )
        found: tuple[torch.Tensor, ...] = ()
        if any(wanted):
            of_advantages, of_returns = grads if ctx.op == "gae" else (None, *grads)
            given = of_advantages, of_returns, *ctx.saved_tensors
            with _backend.backend(ctx.backend):
                found = _transpose(*given, ctx.op, ctx.gamma, ctx.lambda_, ctx.dim, has_next_values, *wanted)
        of_rewards, of_values, of_successors, of_last = _spread(found, wanted)
        if nothing_last:
            of_last = torch.zeros_like(terminated.select(ctx.dim, 0), dtype=ctx.dtypes[2])
        of_bootstrap, of_next = (None, of_successors) if has_next_values else (of_successors, None)
        ordered = of_rewards, of_values, of_last, of_bootstrap, of_next
        stored = [x if x is None or x.dtype == to else x.to(to) for x, to in zip(ordered, ctx.dtypes, strict=True)]
        return *stored, *(None,) * 7


class _Adjoint(Function):
    """The estimator's transpose; its transpose is the estimator. What it keeps: the flags."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        of_advantages: torch.Tensor | None,
        of_returns: torch.Tensor | None,
        terminated: torch.Tensor,
        truncated: torch.Tensor | None,
        last_done: torch.Tensor | None,
        op: str,
        gamma: float,
        lambda_: float,
        dim: int,
        has_next_values: bool,
        rewards: bool,
        values: bool,
        successors: bool,
        last_values: bool,
    ) -> tuple[torch.Tensor, ...]:
        from rl_triton.estimators.adjoint import adjoint

        return adjoint(
            terminated,
            of_advantages,
            of_returns,
            op=op,
            gamma=gamma,
            lambda_=lambda_,
            has_next_values=has_next_values,
            truncated=truncated,
            last_done=last_done,
            time_dim=dim,
            rewards=rewards,
            values=values,
            successors=successors,
            last_values=last_values,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, *flags, ctx.op, ctx.gamma, ctx.lambda_, ctx.dim, ctx.has_next_values, r, v, s, last = inputs
        ctx.wanted = r, v, s, last
        ctx.save_for_backward(*flags)
        ctx.backend = _backend.chosen()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * 14
        rewards, values, successors, last_values = _spread(grads, ctx.wanted)
        terminated, truncated, last_done = ctx.saved_tensors
        zero = torch.zeros_like(terminated.select(ctx.dim, 0), dtype=given[0].dtype).unsqueeze(ctx.dim)
        zero = zero.expand(terminated.shape)
        bootstrap_values = next_values = None
        if ctx.has_next_values:
            next_values = zero if successors is None else successors
        elif truncated is not None:
            bootstrap_values = zero if successors is None else successors
        with _backend.backend(ctx.backend):
            results = _Estimate.apply(
                zero if rewards is None else rewards,
                zero if values is None else values,
                last_values,
                bootstrap_values,
                next_values,
                terminated,
                truncated,
                last_done,
                ctx.op,
                ctx.gamma,
                ctx.lambda_,
                ctx.dim,
            )
        of_advantages, of_returns = results if ctx.op == "gae" else (None, *results)
        needed = ctx.needs_input_grad
        return of_advantages if needed[0] else None, of_returns if needed[1] else None, *(None,) * 12


def _transpose(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """`_Adjoint` of its arguments; where nothing records a graph, as in a gradient that is not differentiated again,
    without a node of its own."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return _Adjoint.apply(*arguments)
    return _Adjoint.forward(*arguments)


def _spread(found: tuple[Any, ...], wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    """Each in its place, None in those of what is not wanted."""
    rest = iter(found)
    return tuple([next(rest) if want else None for want in wanted])
