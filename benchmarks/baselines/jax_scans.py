"""GAE in JAX, by a sequential and by an associative scan, on the tensors' own device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax


def _coefficients(rewards, values, terminated, last_values, truncated, bootstrap_values, *, gamma, lambda_, axis):
    edge = jnp.expand_dims(last_values, axis)
    v_next = jnp.concatenate([lax.slice_in_dim(values, 1, None, axis=axis), edge], axis)
    cut = terminated
    if truncated is not None:
        v_next = jnp.where(truncated, bootstrap_values, v_next)
        cut = cut | truncated
    v_next = jnp.where(terminated, 0.0, v_next)
    return rewards + gamma * v_next - values, jnp.where(cut, 0.0, gamma * lambda_).astype(rewards.dtype)


def _sequential(delta, decay, axis):
    def step(last, pair):
        delta, decay = pair
        last = delta + jnp.where(decay == 0, 0.0, decay * last)
        return last, last

    pair = tuple(jnp.moveaxis(x, axis, 0) for x in (delta, decay))
    _, advantages = lax.scan(step, jnp.zeros_like(pair[0][0]), pair, reverse=True)
    return jnp.moveaxis(advantages, 0, axis)


def _associative(delta, decay, axis):
    def composed(before, step):
        (a, b), (a_step, b_step) = before, step
        return a_step + jnp.where(b_step == 0, 0.0, b_step * a), b * b_step

    return lax.associative_scan(composed, (delta, decay), reverse=True, axis=axis)[0]


@functools.partial(jax.jit, static_argnames=("gamma", "lambda_", "axis", "scan"))
def _gae(tensors: tuple, gamma: float, lambda_: float, axis: int, scan: Callable) -> tuple:
    dtype = tensors[0].dtype
    wide = [x if x is None or x.dtype == bool else x.astype(jnp.float32) for x in tensors]
    delta, decay = _coefficients(*wide, gamma=gamma, lambda_=lambda_, axis=axis)
    advantages = scan(delta, decay, axis)
    return advantages.astype(dtype), (advantages + wide[1]).astype(dtype)


SCANS = {"jax_scan": _sequential, "jax_associative_scan": _associative}
_NAMES = ("rewards", "values", "terminated", "last_values", "truncated", "bootstrap_values")


def bind(name: str, arguments: dict[str, Any], axis: int) -> Callable[[], tuple]:
    """A call on JAX arrays that share the tensors' memory."""
    arrays = tuple(jax.dlpack.from_dlpack(arguments[k]) if k in arguments else None for k in _NAMES)
    static = {"gamma": arguments["gamma"], "lambda_": arguments["lambda_"], "axis": axis, "scan": SCANS[name]}
    return lambda: _gae(arrays, **static)


def wait(result: Any) -> None:
    jax.block_until_ready(result)


def to_torch(result: tuple, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies through the host, for the comparison."""
    return tuple(torch.from_numpy(np.array(x.astype(jnp.float32))).to(like.device, like.dtype) for x in result)


def unusable(device: str) -> str | None:
    """Why JAX cannot run on the device."""
    backend = jax.default_backend()
    wanted = "gpu" if torch.device(device).type == "cuda" else "cpu"
    return None if backend == wanted else f"JAX's backend is {backend}"
