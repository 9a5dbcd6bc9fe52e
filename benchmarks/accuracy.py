"""Accuracy of every op against float64, beside a plain loop in the same precision.

    python -m benchmarks.accuracy                  # this machine's CPU backend
    python -m benchmarks.accuracy --device cuda    # the kernels
    python -m benchmarks.accuracy --table          # docs/accuracy.md from the stored rows

Over V in {N(0,1), 10 + N, 1000 + N}, λ in {0, .1, .5, .95, 1}, γ in {.9, .99, 1} and T in {16, 128, 4096, 131072}, each
op's largest and RMS error must be at most twice those of the loop. Exits with 1 where they are not. All combinations of
V, λ and γ are rows of one loop, so that the loop can be plain Python.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import rl_triton as rlt
from benchmarks.provenance import ROOT, append, digest, provenance, stored
from rl_triton import reference

VALUES_AT = (0.0, 10.0, 1000.0)
LAMBDAS = (0.0, 0.1, 0.5, 0.95, 1.0)
GAMMAS = (0.9, 0.99, 1.0)
STEPS = (16, 128, 4096, 131072)
DTYPES = (torch.float32, torch.bfloat16)
COMBINATIONS = list(itertools.product(VALUES_AT, LAMBDAS, GAMMAS))
LIMIT = 2.0


class Op(NamedTuple):
    name: str
    arguments: Callable[[dict[str, torch.Tensor]], dict[str, Any]]
    takes_lambda: bool = True


def _pick(*names: str) -> Callable[[dict[str, torch.Tensor]], dict[str, Any]]:
    return lambda window: {name: window[name] for name in names}


_ENDS = ("rewards", "terminated", "truncated")
_FLAGS = (*_ENDS, "bootstrap_values", "last_values")


def _retrace(window: dict[str, torch.Tensor]) -> dict[str, Any]:
    given = _pick(*_ENDS, "log_rhos")(window)
    return given | {"q_values": window["values"], "expected_next_q": window["bootstrap_values"]}


OPS = (
    Op("gae", _pick(*_FLAGS, "values")),
    Op("td_lambda_returns", _pick(*_FLAGS, "values")),
    Op("discounted_returns", _pick(*_FLAGS), takes_lambda=False),
    Op("n_step_returns", lambda window: _pick(*_FLAGS, "values")(window) | {"n": 5}, takes_lambda=False),
    Op("vtrace", _pick(*_FLAGS, "values", "log_rhos")),
    Op("retrace", _retrace),
    Op("eligibility_traces", lambda window: {"x": window["rewards"], "done": window["terminated"]}),
    Op("episodic_cumsum", lambda window: {"x": window["rewards"], "done": window["terminated"]}),
)


def make_window(n_steps: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """One window whose rows are the combinations, `n` rows each, in float64 but with numbers of `dtype`."""
    n = max(2, 8192 // n_steps)
    generator = torch.Generator().manual_seed(n_steps)
    rows = n * len(COMBINATIONS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(rows, n_steps, generator=generator) < p

    at = torch.tensor([v for v, _, _ in COMBINATIONS], dtype=torch.float64).repeat_interleave(n)
    window = {
        "rewards": normal(rows, n_steps),
        "values": at[:, None] + normal(rows, n_steps),
        "bootstrap_values": at[:, None] + normal(rows, n_steps),
        "last_values": at + normal(rows),
        "log_rhos": 0.3 * normal(rows, n_steps),
    }
    window = {name: x.to(dtype).double() for name, x in window.items()}
    return window | {"terminated": chance(0.003), "truncated": chance(0.003)}, n


def factors(op: Op, n: int) -> dict[str, torch.Tensor]:
    """γ and λ of every row, for the loops."""
    if op.name == "episodic_cumsum":
        return {}
    columns = {"gamma": [g for _, _, g in COMBINATIONS], "lambda_": [x for _, x, _ in COMBINATIONS]}
    if not op.takes_lambda:
        columns.pop("lambda_")
    return {name: torch.tensor(c, dtype=torch.float64).repeat_interleave(n)[:, None] for name, c in columns.items()}


def tensors(x: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x) if isinstance(x, tuple) else (x,)


def run_op(op: Op, window: dict[str, torch.Tensor], n: int, layout: str, dtype: torch.dtype, device: str) -> Any:
    """The op as users call it, one combination at a time, with float γ and λ."""
    placed = {}
    for name, x in window.items():
        x = x.to(device=device, dtype=x.dtype if x.dtype == torch.bool else dtype)
        placed[name] = x.t().contiguous() if layout == "TN" and x.dim() == 2 else x
    parts: list[tuple[torch.Tensor, ...]] = []
    for k, (_, lambda_, gamma) in enumerate(COMBINATIONS):
        rows = slice(k * n, (k + 1) * n)
        part = {name: x[:, rows] if layout == "TN" and x.dim() == 2 else x[rows] for name, x in placed.items()}
        options: dict[str, Any] = {"time_dim": 0 if layout == "TN" else 1}
        if op.name != "episodic_cumsum":
            options["gamma"] = gamma
            if op.takes_lambda:
                options["lambda_"] = lambda_
        results = tensors(getattr(rlt, op.name)(**op.arguments(part), **options))
        parts.append(tuple((y.t() if layout == "TN" else y).double().cpu() for y in results))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def errors(actual: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, RMS) error of each combination."""
    error = (actual - exact).abs().reshape(len(COMBINATIONS), -1)
    return error.amax(dim=1), error.square().mean(dim=1).sqrt()


def multiple(ours: torch.Tensor, loop: torch.Tensor) -> torch.Tensor:
    """How often ours contains the loop's: 0 where ours is exact, NaN where it is NaN."""
    return torch.where(ours == 0, 0.0, ours / loop)


def measure(device: str, ops: tuple[Op, ...]) -> Iterator[dict[str, Any]]:
    """A row for each op, result, dtype, layout and T."""
    backend = "triton" if torch.device(device).type == "cuda" else "cpu"
    total = len(DTYPES) * len(STEPS) * len(ops)
    where = provenance(device)
    with tqdm(total=total, desc=f"accuracy, {backend}", unit="op") as progress:
        for dtype, n_steps in itertools.product(DTYPES, STEPS):
            window, n = make_window(n_steps, dtype)
            for op in ops:
                loop_arguments = op.arguments(window) | factors(op, n)
                exact = tensors(getattr(reference, op.name)(**loop_arguments))
                loop = tensors(getattr(reference, op.name)(**loop_arguments, dtype=torch.float32))
                loop = tuple(x.to(dtype).double() for x in loop)
                for layout in ("NT", "TN"):
                    ours = run_op(op, window, n, layout, dtype, device)
                    for name, y, want, plain in zip(names(op), ours, exact, loop, strict=True):
                        (largest, rms), (loop_largest, loop_rms) = errors(y, want), errors(plain, want)
                        ratio = torch.maximum(multiple(largest, loop_largest), multiple(rms, loop_rms))
                        worst = int(ratio.argmax())
                        yield {
                            "op": op.name,
                            "result": name,
                            "dtype": str(dtype).removeprefix("torch."),
                            "layout": layout,
                            "backend": backend,
                            "T": n_steps,
                            "rows": n,
                            "max_error": largest.max().item(),
                            "rms_error": rms.max().item(),
                            "loop_max_error": loop_largest.max().item(),
                            "loop_rms_error": loop_rms.max().item(),
                            "worst_ratio_to_loop": ratio[worst].item(),
                            "worst_at": dict(zip(("V", "lambda", "gamma"), COMBINATIONS[worst], strict=True)),
                            **where,
                        }
                progress.update()


def names(op: Op) -> tuple[str, ...]:
    results = {"gae": rlt.GAE._fields, "vtrace": rlt.VTrace._fields, "retrace": rlt.Retrace._fields}
    return results.get(op.name, ("returns" if "returns" in op.name else "result",))


def table() -> str:
    """docs/accuracy.md: of each op, dtype, layout and backend the largest errors over all T, and the loop's."""
    latest: dict[tuple, dict[str, Any]] = {}
    for row in stored("accuracy"):
        key = tuple(row[k] for k in ("op", "result", "dtype", "layout", "backend", "T"))
        latest[key] = row  # rows are appended: the last one counts
    lines = [
        "# Accuracy",
        "",
        "Generated by `python -m benchmarks.accuracy --table` from `benchmarks/results/accuracy.jsonl`.",
        "",
        "Errors against a float64 loop, beside those of a plain float32 loop (rounded to the dtype of the result).",
        "Each is the largest over V in {N(0,1), 10 + N, 1000 + N}, λ in {0, .1, .5, .95, 1}, γ in {.9, .99, 1} and",
        "T in {16, 128, 4096, 131072}. The last column is the worst case of any single combination: the largest",
        "multiple of the loop's maximum or RMS error; it must be at most 2.",
        "",
        "| op | result | dtype | layout | backend | max error | of the loop | RMS error | of the loop "
        "| worst multiple |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for key, row in latest.items():
        groups.setdefault(key[:-1], []).append(row)
    order = [op.name for op in OPS]
    for key, rows in sorted(groups.items(), key=lambda group: (order.index(group[0][0]), *group[0][1:])):
        figures = [max(row[k] for row in rows) for k in ("max_error", "loop_max_error", "rms_error", "loop_rms_error")]
        worst = max(row["worst_ratio_to_loop"] for row in rows)
        cells = [*key, *(f"{x:.2g}" for x in figures), f"{worst:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    current = digest()
    for row in {row["backend"]: row for row in latest.values()}.values():
        state = "the code as it stands" if row["digest"] == current else f"earlier code, digest {row['digest']}"
        lines.append(f"- {row['backend']}: {row['machine']}, torch {row['torch']}, {row['date']}, {state}.")
    over = sum(not row["worst_ratio_to_loop"] <= LIMIT for row in latest.values())
    lines += ["", f"{over} of {len(latest)} measurements are over the limit."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ops", nargs="+", choices=[op.name for op in OPS], help="these only")
    parser.add_argument("--table", action="store_true", help="write docs/accuracy.md from the stored rows")
    args = parser.parse_args()
    if args.table:
        (ROOT / "docs" / "accuracy.md").write_text(table())
        return 0
    rows = []
    for row in measure(args.device, tuple(op for op in OPS if not args.ops or op.name in args.ops)):
        append("accuracy", [row])  # at once: a run that is cut short keeps what it has measured
        rows.append(row)
    over = [row for row in rows if not row["worst_ratio_to_loop"] <= LIMIT]
    for row in sorted(over, key=lambda row: -row["worst_ratio_to_loop"])[:20]:
        print("over the limit:", {k: row[k] for k in ("op", "result", "dtype", "layout", "T", "worst_ratio_to_loop")},
              row["worst_at"])  # fmt: skip
    print(f"{len(rows)} rows measured; {len(over)} over the limit")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
