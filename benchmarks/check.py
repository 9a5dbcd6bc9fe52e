"""Whether the kernels are as fast as they were: one shape an op, on a GPU.

    python -m benchmarks.check            # exits with 1 below 0.9 of the stored minimum of three runs
    python -m benchmarks.check --record   # measures three times and stores the throughputs for this GPU

Throughput is bytes moved over time on the device. Times of the host are left out: they differ by a factor of two
between two machines with the same GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import run as bench_run
from benchmarks.baselines import OURS, SUBJECTS
from benchmarks.cases import OPS, Case, parse_shape
from benchmarks.gate import Gate
from benchmarks.provenance import append, provenance, stored

SHAPE = parse_shape("16384x512")
ALLOWED = 0.9
RUNS = 3
SECONDS = 0.3
LIMIT = 60.0


def throughputs(device: str, where: dict[str, Any]) -> dict[str, float]:
    """GB/s of every op. Raises RuntimeError where a result is wrong or there is none."""
    bench = bench_run.Bench(device, SECONDS, where)
    measured = {}
    for op in OPS.values():
        case = Case(op, "NT", SHAPE)
        sets = bench.tensors(case)
        row = bench.row(SUBJECTS[OURS], case, sets, Gate(case, sets[0]), LIMIT)
        if "failed" in row:
            raise RuntimeError(f"{case}: {row['failed']}")
        measured[op.name] = row["gb_s"]
    return measured


def compare(measured: dict[str, float], recorded: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """A table, and whether every op is fast enough. Of each op the last record counts."""
    floors = {row["op"]: min(row["gb_s"]) for row in recorded}
    lines = [f"{'op':22} {'GB/s':>8} {'stored':>8} {'ratio':>6}"]
    good = True
    for op, speed in measured.items():
        if op not in floors:
            lines.append(f"{op:22} {speed:8.0f} {'none':>8}")
            continue
        ratio = speed / floors[op]
        good &= ratio >= ALLOWED
        lines.append(f"{op:22} {speed:8.0f} {floors[op]:8.0f} {ratio:6.2f}{'' if ratio >= ALLOWED else '  TOO SLOW'}")
    return lines, good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="store instead of comparing")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/check.jsonl")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.check: no CUDA device")
        return 2
    bench_run.keep_compiled()
    where = provenance("cuda")
    if args.record:
        rounds = [throughputs("cuda", where) for _ in range(RUNS)]
        rows = [{"op": op, "shape": str(SHAPE), "gb_s": [r[op] for r in rounds], **where} for op in OPS]
        append("check", rows, args.out)
        for row in rows:
            print(f"{row['op']:22} {' '.join(f'{x:8.0f}' for x in row['gb_s'])} GB/s")
        return 0
    recorded = [row for row in stored("check", args.out) if row["machine"] == where["machine"]]
    if not recorded:
        print(f"nothing is stored for {where['machine']}: python -m benchmarks.check --record")
        return 0
    lines, good = compare(throughputs("cuda", where), recorded)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
