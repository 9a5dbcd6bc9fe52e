"""Calls of every public function for the tests of what surrounds a call: compilers, tracers, graphs, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import rl_triton as rlt


class Call(NamedTuple):
    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    """Whatever is no tensor."""

    def __call__(self, **changes: Any) -> Any:
        return self.function(**(self.tensors | self.options | changes))


def flat(x: Any) -> list[torch.Tensor]:
    """The tensors of a result, in their order."""
    return [x] if isinstance(x, torch.Tensor) else [leaf for part in x for leaf in flat(part)]


class _Window:
    """Draws tensors of one window."""

    def __init__(self, n_rows: int, n_steps: int, device: str, dtype: torch.dtype, seed: int) -> None:
        self.shape = (n_rows, n_steps)
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def x(self, *more: int, scale: float = 1.0) -> torch.Tensor:
        y = torch.randn((*self.shape, *more), generator=self.generator, dtype=torch.float64)
        return (scale * y).to(self.dtype).to(self.device)

    def rows(self) -> torch.Tensor:
        return self.x()[:, 0].contiguous()

    def flags(self, density: float = 0.1) -> torch.Tensor:
        return (torch.rand(self.shape, generator=self.generator) < density).to(self.device)

    def probs(self, n: int) -> torch.Tensor:
        return self.x(n).softmax(-1)

    def actions(self, n: int) -> torch.Tensor:
        return torch.randint(n, self.shape, generator=self.generator).to(self.device)

    def values(self) -> dict[str, torch.Tensor]:
        return {"rewards": self.x(), "values": self.x(), "terminated": self.flags()}

    def cut(self) -> dict[str, torch.Tensor]:
        return {"truncated": self.flags(), "bootstrap_values": self.x(), "last_values": self.rows()}

    def cases(self) -> dict[str, Call]:
        edge = {"last_values": self.rows()}
        rewards = {"rewards": self.x(), "terminated": self.flags()}
        q = rewards | {"q_values": self.x()}
        next_q = {"next_q_values": self.x(3), "next_policy_probs": self.probs(3)}
        of_actions = {"policy_probs": self.probs(3), "behavior_probs": self.probs(3), "actions": self.actions(3)}
        gammas = {"gamma": self.x().sigmoid(), "lambda_": torch.tensor(0.9, dtype=self.dtype, device=self.device)}
        traced = {"x": self.x(), "done": self.flags()}
        turned = {
            k: v.t() for k, v in (self.values() | {"truncated": self.flags(), "bootstrap_values": self.x()}).items()
        }
        return {
            "gae": Call(rlt.gae, self.values() | edge, {"gamma": 0.97, "lambda_": 0.9}),
            "gae, truncated": Call(rlt.gae, self.values() | self.cut(), {}),
            "gae, time first": Call(rlt.gae, turned | edge, {"time_dim": 0}),
            "gae, valid": Call(rlt.gae, self.values() | self.cut() | {"valid": self.flags(0.8)}, {}),
            "gae, start flags": Call(
                rlt.gae, self.values() | edge | {"last_done": self.flags()[:, 0].contiguous()}, {"flags_at": "start"}
            ),
            "gae, next values": Call(rlt.gae, self.values() | {"next_values": self.x()}, {}),
            "gae, tensor factors": Call(rlt.gae, self.values() | edge | gammas, {}),
            "gae, carry": Call(rlt.gae, self.values() | edge | {"carry": self.rows()}, {"return_carry": True}),
            "td_lambda_returns": Call(rlt.td_lambda_returns, self.values() | self.cut(), {"lambda_": 0.8}),
            "discounted_returns": Call(rlt.discounted_returns, rewards | self.cut(), {}),
            "discounted_returns, carry": Call(rlt.discounted_returns, rewards | edge, {"return_carry": True}),
            "n_step_returns": Call(rlt.n_step_returns, self.values() | self.cut(), {"n": 3}),
            "vtrace": Call(rlt.vtrace, self.values() | self.cut() | {"log_rhos": self.x(scale=0.3)}, {"rho_bar": 1.2}),
            "vtrace, log probs": Call(
                rlt.vtrace,
                self.values() | edge | {"target_log_probs": self.x(), "behavior_log_probs": self.x()},
                {"pg_rho_bar": 0.9, "return_carry": True},
            ),
            "retrace": Call(rlt.retrace, q | {"expected_next_q": self.x(), "log_rhos": self.x(scale=0.3)}, {}),
            "retrace, actions": Call(rlt.retrace, q | next_q | of_actions, {"lambda_": 0.9, "return_carry": True}),
            "retrace, tree backup": Call(
                rlt.retrace,
                q | next_q | {"policy_probs": self.x().sigmoid(), "truncated": self.flags()},
                {"trace": "tree_backup"},
            ),
            "eligibility_traces": Call(rlt.eligibility_traces, traced | {"initial": self.rows()}, {}),
            "eligibility_traces, replacing": Call(
                rlt.eligibility_traces,
                {"x": self.x(2), "done": self.flags()} | gammas,
                {"kind": "replacing", "return_final": True},
            ),
            "episodic_cumsum": Call(rlt.episodic_cumsum, traced, {"flags_at": "start"}),
            "affine_scan": Call(
                rlt.affine_scan, {"alpha": self.x(), "beta": self.x().sigmoid(), "initial": self.rows()}, {}
            ),
            "affine_scan, forward": Call(rlt.affine_scan, {"alpha": self.x()}, {"beta": 0.9, "reverse": False}),
        }  # fmt: skip


def calls(
    n_rows: int = 3, n_steps: int = 7, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Call]:
    """Some calls of every public scan, by name; among them every kind of argument."""
    return _Window(n_rows, n_steps, device, dtype, seed).cases()


NAMES = tuple(calls())
# One of each function.
FUNCTIONS = tuple(name for name in NAMES if "," not in name)
