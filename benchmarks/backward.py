"""Gradients of gae and td_lambda_returns: ours with `differentiable=True`, in eager code and compiled, beside autograd
through the baselines.

    python -m benchmarks.backward            # rows go to benchmarks/results/backward.jsonl
    python -m benchmarks.backward --table    # writes the table of docs/torch.md

"forward and backward" is a call and `torch.autograd.grad` of its results, weighted at random, by rewards, values and
last_values; "backward" is the second half alone, on a graph that is kept. "on the device" is the time of its kernels,
behind one that sleeps until the host is ahead. Bytes are those of a backward pass that reads the weights and the flags
once and writes the gradients once. Nothing is timed whose gradients do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import config as functorch_config
from tqdm import tqdm

import rl_triton as rlt
from benchmarks import command, timing
from benchmarks.baselines import scans
from benchmarks.baselines.loops import loop, td_lambda_loop
from benchmarks.pages import rewrite
from benchmarks.provenance import ROOT, commits, provenance, stored

SHAPES = ((4096, 128), (4096, 2048), (16384, 2048))
GAMMA, LAMBDA = 0.99, 0.95
SECONDS = 0.5
MAX_LOOP_SIZE = 4096 * 2048  # the loop keeps a dozen tensors a step
Function = Callable[..., Any]
OPS = ("gae", "td_lambda_returns")


def _ours(op: str) -> Function:
    function = getattr(rlt, op)

    def call(rewards: Any, values: Any, terminated: Any, last_values: Any) -> Any:
        return function(
            rewards, values, terminated, last_values=last_values, gamma=GAMMA, lambda_=LAMBDA, differentiable=True
        )

    return call


def _loop(op: str) -> Function:
    function = {"gae": loop, "td_lambda_returns": td_lambda_loop}[op]

    def call(rewards: Any, values: Any, terminated: Any, last_values: Any) -> Any:
        return function(rewards, values, terminated.to(rewards.dtype), last_values, GAMMA, LAMBDA, 1)

    return call


def _scan(op: str) -> Function:
    function = scans.SCANS[op]

    def call(rewards: Any, values: Any, terminated: Any, last_values: Any) -> Any:
        return function(rewards, values, terminated, last_values=last_values, gamma=GAMMA, lambda_=LAMBDA, dim=1)

    return call


def _compiled(function: Function) -> Function:
    return torch.compile(function, fullgraph=True, dynamic=False)


WHO: dict[str, Callable[[str], Function]] = {
    "rl_triton": _ours,
    "rl_triton, compiled": lambda op: _compiled(_ours(op)),
    "eager loop": _loop,
    "compiled scan": lambda op: _compiled(_scan(op)),
}


class Gradients:
    """One subject on one set of tensors."""

    def __init__(self, op: str, function: Function, shape: tuple[int, int], device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=generator) for _ in range(4)]
        rewards, values, *weights = (x.to(device=device, dtype=dtype) for x in tensors)
        self.weights = weights if op == "gae" else weights[:1]  # one for each result
        last_values = torch.randn(shape[0], generator=generator).to(device=device, dtype=dtype)
        self.terminated = (torch.rand(shape, generator=generator) < 0.01).to(device)
        self.leaves = tuple(x.requires_grad_() for x in (rewards, values, last_values))
        self.function = function

    def forward(self) -> tuple[torch.Tensor, ...]:
        rewards, values, last_values = self.leaves
        results = self.function(rewards, values, self.terminated, last_values)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.weights)

    def backward(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        results = self.forward()
        return lambda: torch.autograd.grad(results, self.leaves, self.weights, retain_graph=True)


def check(op: str, function: Function, device: str) -> None:
    """Gradients against autograd through the loop in float64."""
    actual = Gradients(op, function, (64, 100), device, torch.float32).both()
    expected = Gradients(op, _loop(op), (64, 100), device, torch.float64).both()
    for x, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-4)


def copy_of(n_bytes: int, device: str, seconds: float) -> timing.Times:
    """Moving as many bytes: half of them read, half written."""
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timing.device_time([lambda: target.copy_(source)], seconds, capture=True)[0]


def measure(device: str, shapes: command.Shapes, seconds: float) -> Iterator[dict[str, Any]]:
    where = provenance(device)
    functorch_config.donated_buffer = False  # a graph that is kept gives no buffer away
    cases = [
        (op, shape, who)
        for op in OPS
        for shape in shapes
        for who in WHO
        if who != "eager loop" or shape[0] * shape[1] <= MAX_LOOP_SIZE
    ]
    for op, shape, who in tqdm(cases, desc="gradients", unit="case"):
        torch._dynamo.reset()
        function = WHO[who](op)
        check(op, function, device)
        subject = Gradients(op, function, shape, device, torch.float32)
        n_bytes = sum(x.numel() * x.element_size() for x in (*subject.weights, *subject.leaves, subject.terminated))
        row: dict[str, Any] = {"op": op, "who": who, "N": shape[0], "T": shape[1], "bytes": n_bytes}
        for name, call in (("both", subject.both), ("backward", subject.backward())):
            for clock in (timing.single, timing.amortised):
                times = clock([call], lambda _: timing.synchronize(device), seconds)
                row |= times.columns(f"{name}_{clock.__name__}")
        if torch.device(device).type == "cuda":
            # No graph: a backward pass runs on the stream of its forward pass, which is not being captured.
            on_device, row["backward_device_method"] = timing.device_time([subject.backward()], seconds, capture=False)
            row |= on_device.columns("backward_device")
            row |= copy_of(n_bytes, device, seconds).columns("copy")
        yield row | where


def table() -> str:
    lines = [
        "| op | N x T | who | forward and backward | backward | on the device | of a copy's speed |",
        "|---|---|---|---|---|---|---|",
    ]
    latest = {(row["op"], row["N"], row["T"], row["who"]): row for row in stored("backward")}
    for (op, n, n_steps, who), row in latest.items():
        columns = [f"{row[name]:,.0f} us" for name in ("both_single_us", "backward_single_us")]
        if row.get("backward_device_method", "events, host included") == "events, host included":
            columns += ["", ""]
        else:
            share = row["copy_us"] / row["backward_device_us"]
            columns += [f"{row['backward_device_us']:,.1f} us", f"{100 * share:.0f} %"]
        lines.append(f"| {op} | {n} x {n_steps} | {who} | {' | '.join(columns)} |")
    last = list(latest.values())[-1]
    where = (
        f"{last['machine']}, torch {last['torch']}, Triton {last['triton']}, {last['date']}, {commits(latest.values())}"
    )
    return "\n".join([*lines, "", f"{where}; medians of single calls."])


def main() -> int:
    args = command.parser(__doc__, "backward", SHAPES, SECONDS).parse_args()
    if args.table:
        rewrite(ROOT / "docs" / "torch.md", "backward", table())
        return 0
    command.store("backward", measure(args.device, tuple(args.shapes), args.seconds), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
