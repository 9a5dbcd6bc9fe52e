"""What the installed TorchRL computes, seen on a few numbers: its source may change, its results may not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from rl_triton import reference
from rl_triton.adapters._patching import framework_function
from rl_triton.adapters.torchrl import _functionals

_GAMMA, _LAMBDA = 0.9, 0.8
_RHO, _C = 1.1, 0.9  # bars of V-trace


def functions(stock: ModuleType, version: str) -> dict[str, Callable[..., Any]]:
    """What stands in for each of TorchRL's functions.

    Raises:
        RuntimeError: one of them computes other numbers than the equations that the adapter knows.
    """
    served = dict(_functionals.NAMES)
    right, across_truncations = _expected()
    vtrace = "vtrace_advantage_estimate"
    for name in served:
        results = _results(framework_function(getattr(stock, name)), name)
        if _same(results, right[name]):
            continue
        if name != vtrace or not _same(results, across_truncations):
            raise RuntimeError(
                f"TorchRL {version}: {stock.__name__}.{name} does not compute what rl_triton.adapters.torchrl knows; "
                "TorchRL is left as it is"
            )
        served[vtrace] = _functionals.vtrace_across_truncations
    return served


def _data() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (3, 9, 1)
    names = ("reward", "state_value", "next_state_value", "log_pi", "log_mu")
    data = {name: torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for name in names}
    terminated = torch.rand(shape, generator=generator, device="cpu") < 0.2
    truncated = torch.rand(shape, generator=generator, device="cpu") < 0.3
    return data | {"done": terminated | truncated, "terminated": terminated}


def _results(function: Callable[..., Any], name: str) -> tuple[torch.Tensor, ...]:
    given: dict[str, Any] = dict(_data())
    if name == "reward2go":
        given = {key: given[key] for key in ("reward", "done")}
    elif "vtrace" in name:
        given |= {"rho_thresh": _RHO, "c_thresh": _C}
    else:
        del given["log_pi"], given["log_mu"]
        if "advantage" not in name:
            del given["state_value"]
        if "td1" not in name:
            given["lmbda"] = _LAMBDA
    with torch.no_grad():
        result = function(gamma=_GAMMA, **given)
    return result if isinstance(result, tuple) else (result,)


def _expected() -> tuple[dict[str, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """The results by the equations, and those of V-trace before TorchRL 0.14."""
    data = _data()
    reward, value, next_value, log_pi, log_mu, done, terminated = data.values()
    ends: dict[str, Any] = dict(truncated=done, next_values=next_value, time_dim=-2)
    gae = reference.gae(reward, value, terminated, gamma=_GAMMA, lambda_=_LAMBDA, **ends)
    td_lambda = reference.td_lambda_returns(reward, None, terminated, gamma=_GAMMA, lambda_=_LAMBDA, **ends)
    td1 = reference.discounted_returns(reward, terminated, gamma=_GAMMA, **ends)
    to_go = reference.discounted_returns(reward, done, gamma=_GAMMA, last_values=None, time_dim=-2)
    log_rhos = log_pi - log_mu
    targets, advantages = reference.vtrace(
        reward, value, terminated, log_rhos=log_rhos, gamma=_GAMMA, rho_bar=_RHO, c_bar=_C, **ends
    )
    following = torch.cat([targets[:, 1:], next_value[:, -1:]], 1)
    one_step = reward + _GAMMA * torch.where(terminated, 0.0, following) - value
    return {
        "generalized_advantage_estimate": gae,
        "vec_generalized_advantage_estimate": gae,
        "td_lambda_return_estimate": (td_lambda,),
        "vec_td_lambda_return_estimate": (td_lambda,),
        "td1_return_estimate": (td1,),
        "vec_td1_return_estimate": (td1,),
        "vtrace_advantage_estimate": (advantages, targets),
        "reward2go": (to_go,),
    }, (log_rhos.exp().clamp_max(_RHO) * one_step, targets)


def _same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.allclose(x.double(), y, rtol=1e-4, atol=1e-4) for x, y in zip(a, b, strict=True))
