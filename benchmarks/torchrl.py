"""TorchRL's value functions, its loops and its vectorised forms, beside the same names under the adapter's patch.

    python -m benchmarks.torchrl            # rows go to benchmarks/results/torchrl.jsonl
    python -m benchmarks.torchrl --table    # the table of docs/torchrl.md from the stored rows

A call is what a user of TorchRL makes: its arguments, its allocations, its checks. "with gradients" is TD(λ) as Dreamer
uses it, forward and backward through values and rewards. Each is held against TorchRL's loop in float64: ours must
agree, and what TorchRL's own forms differ by is in the row (on a GPU the vectorised ones convolve in TF32 by default).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import command, timing
from benchmarks.pages import rewrite
from benchmarks.provenance import ROOT, commits, provenance, stored

SHAPES = ((64, 512), (4096, 128), (8, 4096), (16384, 32))
SECONDS = 0.3
TOLERANCE = 1e-5
FAMILIES = {"loop": "", "vectorised": "vec_"}
OPS = {
    "GAE": "{}generalized_advantage_estimate",
    "TD(λ)": "{}td_lambda_return_estimate",
    "TD(λ), with gradients": "{}td_lambda_return_estimate",
    "V-trace": "vtrace_advantage_estimate",
}
Call = Callable[[], Any]


def window(n: int, n_steps: int, device: str) -> dict[str, torch.Tensor]:
    """[n, n_steps, 1], one percent of the steps ending an episode, half of these in a terminal state."""
    generator = torch.Generator().manual_seed(0)
    names = ("value", "next_value", "reward", "log_pi", "log_mu")
    tensors = {name: torch.randn(n, n_steps, 1, generator=generator) for name in names}
    ends = torch.rand(n, n_steps, 1, generator=generator)
    tensors |= {"done": ends < 0.01, "terminated": ends < 0.005}
    return {name: x.to(device) for name, x in tensors.items()}


def call_of(op: str, function: Callable[..., Any], x: dict[str, torch.Tensor]) -> Call:
    ends = {"done": x["done"], "terminated": x["terminated"]}
    if op == "GAE":
        return lambda: function(0.99, 0.95, x["value"], x["next_value"], x["reward"], **ends)
    if op == "V-trace":
        return lambda: function(0.99, x["log_pi"], x["log_mu"], x["value"], x["next_value"], x["reward"], **ends)
    if op == "TD(λ)":
        return lambda: function(0.99, 0.95, x["next_value"], x["reward"], **ends)
    next_value, reward = (x[name].clone().requires_grad_() for name in ("next_value", "reward"))

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        returns = function(0.99, 0.95, next_value, reward, **ends)
        return torch.autograd.grad(returns.sum(), (next_value, reward))

    return forward_and_backward


def measure(device: str, shapes: command.Shapes, seconds: float) -> Iterator[dict[str, Any]]:
    from torchrl.objectives.value import functional

    from rl_triton.adapters import status, torchrl

    where = provenance(device) | {name: importlib.metadata.version(name) for name in ("torchrl", "tensordict")}
    cases = [(shape, op, family) for shape in shapes for op in OPS for family in FAMILIES]
    cases = [case for case in cases if case[1] != "V-trace" or case[2] == "loop"]
    for shape, op, family in tqdm(cases, desc="TorchRL", unit="case"):
        name = OPS[op].format(FAMILIES[family])
        x = window(*shape, device)
        stock = call_of(op, getattr(functional, name), x)
        expected = call_of(op, getattr(functional, OPS[op].format("")), _in_float64(x))()
        with torchrl.patched():
            ours = call_of(op, getattr(functional, name), x)
            actual = ours()
            (entry,) = (e for label, e in status().items() if label.endswith(f"value.functional.{name}"))
            if entry["fallen_back"]:
                raise RuntimeError(f"{name} was not served: {entry['fallen_back']}")
            errors = {"rl_triton": largest_error(actual, expected), "torchrl": largest_error(stock(), expected)}
            if not errors["rl_triton"] < TOLERANCE:
                raise RuntimeError(f"{name}: an error of {errors['rl_triton']:.2g}, tolerated {TOLERANCE}")
            for who, call in (("rl_triton", ours), ("torchrl", stock)):
                times = timing.single([call], lambda _: timing.synchronize(device), seconds)
                peak = _peak_bytes(call, device)
                yield {
                    "op": op,
                    "family": family,
                    "function": name,
                    "B": shape[0],
                    "T": shape[1],
                    "who": who,
                    "error": errors[who],
                    **times.columns("single"),
                    "peak_bytes": peak,
                    **where,
                }


def _in_float64(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: y.double() if y.is_floating_point() else y for name, y in x.items()}


def largest_error(actual: Any, expected: Any) -> float:
    """Of any result or gradient, over the largest entry of what it should be."""
    pairs = zip(_tensors(actual), _tensors(expected), strict=True)
    return max(float((y - want).abs().max() / want.abs().max()) for y, want in pairs)


def _tensors(x: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x) if isinstance(x, tuple) else (x,)


def _peak_bytes(call: Call, device: str) -> int | None:
    """What a call allocates at most, on top of its inputs."""
    if torch.device(device).type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def table() -> str:
    """Of each machine the latest row of each call."""
    rows = stored("torchrl")
    lines: list[str] = []
    for machine in dict.fromkeys(row["machine"] for row in rows):
        latest = {
            tuple(row[k] for k in ("B", "T", "op", "family", "who")): row for row in rows if row["machine"] == machine
        }
        lines += [
            "| B, T | call | TorchRL's | us | rl_triton, us | ratio | error of theirs, ours |",
            "|---|---|---|---|---|---|---|",
        ]
        for (b, t, op, family, who), row in latest.items():
            if who != "torchrl":
                continue
            our_row = latest[b, t, op, family, "rl_triton"]
            theirs, ours = row["single_us"], our_row["single_us"]
            errors = f"{row['error']:.0e}, {our_row['error']:.0e}" if "error" in row else ""
            cells = (f"{b}, {t}", op, family, f"{theirs:,.0f}", f"{ours:,.0f}", f"{theirs / ours:,.1f}x", errors)
            lines.append("| " + " | ".join(cells) + " |")
        last = list(latest.values())[-1]
        versions = ", ".join(f"{name} {last[name]}" for name in ("torchrl", "torch", "triton"))
        where = f"{machine}, {versions}, {last['date']}, {commits(latest.values())}"
        lines += ["", f"{where}; median of single calls.", ""]
    return "\n".join(lines)


def main() -> int:
    args = command.parser(__doc__, "torchrl", SHAPES, SECONDS).parse_args()
    if args.table:
        rewrite(ROOT / "docs" / "torchrl.md", "speed", table())
        return 0
    command.store("torchrl", measure(args.device, tuple(args.shapes), args.seconds), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
