"""Speed of every op beside the baselines.

    python -m benchmarks.run                              # the headline tier on a GPU, the cpu tier without one
    python -m benchmarks.run --tier full --compile-ahead 8 # again and again: stored rows are skipped
    python -m benchmarks.run --shapes 4096x128 --ops gae  # one comparison, all headline baselines

A row a subject and case goes to benchmarks/results/speed.jsonl as soon as it is measured; docs/speed.md says what its
columns mean. Exits with 1 where a result is wrong or one of our calls fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import timing
from benchmarks.ahead import compile_ahead, tasks_of
from benchmarks.baselines import OURS, SUBJECTS, Prepared, Subject, our_bytes
from benchmarks.cases import (
    DTYPES,
    HEADLINE_SHAPES,
    LAYOUTS,
    OPS,
    RATIO_SHAPES,
    TIERS,
    Arguments,
    Case,
    Tier,
    make_window,
    parse_shape,
)
from benchmarks.gate import Gate, GateError
from benchmarks.provenance import COMPILED, append, provenance, ptxas, stored

CACHES = {"TRITON_CACHE_DIR": COMPILED / "triton", "TORCHINDUCTOR_CACHE_DIR": COMPILED / "inductor"}
ROW_SECONDS = 0.3
SUBJECT_LIMIT = 60.0

Row = dict[str, Any]


class OutOfTime(BaseException):
    """Not an Exception: compilers catch those and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block when the time is up (in the main thread, between two bytecodes)."""

    def expire(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 5.0)  # again, where a destructor swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def keep_compiled() -> None:
    """Compilers' caches in one folder, so that a later run finds them. Before anything is compiled."""
    for name, folder in CACHES.items():
        os.environ.setdefault(name, str(folder))
    # torch.compile names its own assembler to Triton when it is first used. Now, or kernels of ours from before and
    # after that moment would differ.
    with suppress(ImportError, AttributeError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()


def row_key(row: Row) -> tuple:
    """What a stored row is a measurement of; a row of the same key is not measured again."""
    names = ("op", "layout", "N", "T", "A", "dtype", "truncated", "who", "digest", "machine")
    return tuple(row.get(name) for name in names)


@dataclass
class Bench:
    """One run on one device."""

    device: str
    seconds: float
    where: Row

    def __post_init__(self) -> None:
        self.machine = timing.Machine(self.device, self.seconds)
        self.cuda = torch.device(self.device).type == "cuda"

    def tensors(self, case: Case) -> list[Arguments]:
        """Sets of arguments in different memory, enough of them to leave the cache cold."""
        first = case.op.arguments(make_window(case, self.device))
        n = self.machine.sets(our_bytes(case, first))
        sets = [first]
        for _ in range(n - 1):
            sets.append({k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in first.items()})
        timing.synchronize(self.device)
        return sets

    def measure(self, subject: Subject, case: Case, sets: Sequence[Arguments], gate: Gate) -> Row:
        """The columns of one row. Raises what the subject raises, or GateError."""
        prepared = subject.prepare(case, sets)
        with prepared.scope():
            columns: Row = {"outputs": list(prepared.outputs), "gate": "passed"}
            columns |= gate.check(prepared)
            columns |= self._host(prepared)
            columns |= self._device(subject, prepared)
        columns |= {"bytes": prepared.bytes_moved, "our_bytes": our_bytes(case, sets[0]), "sets": len(sets)}
        return columns

    def _host(self, prepared: Prepared) -> Row:
        wait = prepared.wait or self.machine.wait
        columns: Row = {}
        kinds = {"": prepared.calls, "out_": prepared.out_calls}
        for prefix, calls in kinds.items():
            if calls is not None:
                columns |= timing.single(calls, wait, self.seconds / 5).columns(f"{prefix}single")
                columns |= timing.amortised(calls, wait, self.seconds / 5).columns(f"{prefix}amortised")
        return columns

    def _device(self, subject: Subject, prepared: Prepared) -> Row:
        """Beside a copy of as many bytes; on the CPU the wall time stands for the device's."""
        n_bytes = prepared.bytes_moved
        copy = self.machine.copy_us(n_bytes)
        columns: Row = {"copy_us": round(copy, 3), "copy_gb_s": round(n_bytes / copy / 1e3, 1)}
        if not self.cuda or not subject.device_time:
            return columns
        calls = prepared.out_calls or prepared.calls
        times, method = timing.device_time(calls, self.seconds / 5, capture=subject.device_time == "graph")
        columns |= times.columns("device") | {"device_method": method}
        columns |= {"gb_s": round(n_bytes / times.median / 1e3, 1), "copy_fraction": round(copy / times.median, 4)}
        return columns

    def row(self, subject: Subject, case: Case, sets: Sequence[Arguments], gate: Gate, limit: float) -> Row:
        """A row of results, or of the reason why there are none."""
        row: Row = {**case.key, "who": subject.name}
        try:
            with time_limit(limit):
                row |= self.measure(subject, case, sets, gate)
                size = case.shape.rows, case.shape.steps
                row |= self.machine.floor(size, DTYPES[case.dtype], anew=subject.name == OURS)
        except GateError as error:
            row |= {"gate": "failed", "failed": str(error)}
        except OutOfTime:
            row["failed"] = f"no result within {limit:.0f} s"
        except Exception as error:  # a baseline's compiler can raise anything
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        row |= {"gate_against": gate.against, "gate_tolerance": gate.tolerance}
        return row | self.where | ({"ptxas": ptxas()} if self.cuda else {})


def can_wait(case: Case, subject: Subject) -> bool:
    """Whether it comes after everything else: a compiled scan takes far longer to compile than to measure."""
    ratio = case.op.name == "gae" and case.shape in HEADLINE_SHAPES
    ratio |= case.layout == "NT" and case.shape in RATIO_SHAPES
    return subject.name.startswith("compiled") and not (ratio and case.dtype == "float32" and not case.truncated)


def plan(
    tier: Tier, subjects: Sequence[Subject], device: str, where: Row, done: set[tuple]
) -> list[tuple[Case, list[Subject]]]:
    """(case, subjects to measure), what can wait last. Where ours is stored and a baseline is not, ours is measured
    again beside it, since times compare only within one run."""
    now, later = [], []
    for case in tier.cases():
        serving = [s for s in subjects if s.serves(case, device)]
        missing = [s for s in serving if row_key({**case.key, "who": s.name, **where}) not in done]
        ours = [s for s in serving if s.name == OURS and s not in missing]
        waiting = [s for s in missing if can_wait(case, s)]
        first = [s for s in missing if s not in waiting]
        if first:
            now.append((case, ours + first))
        if waiting:
            later.append((case, ours + waiting))
    return now + later


def line(case: Case, row: Row) -> str:
    """One row for people."""
    head = f"{case!s:45} {row['who']:25}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"[:180]
    text = f"{head} call {row['single_us']:9.1f} alone {row['amortised_us']:9.1f} back to back"
    if "device_us" in row:
        text += f"  device {row['device_us']:9.1f} us  {100 * row['copy_fraction']:3.0f} % of copy"
    return text


def run(
    bench: Bench, planned: Sequence[tuple[Case, list[Subject]]], deadline: float, limit: float, out: Path | None
) -> tuple[list[Row], bool]:
    """Measure, appending each row at once. The rows, and whether all was measured before the deadline."""
    rows: list[Row] = []
    total = sum(len(subjects) for _, subjects in planned)
    with tqdm(total=total, unit="row", smoothing=0.1, disable=None) as progress:  # a bar on terminals only
        for case, subjects in planned:
            if time.monotonic() > deadline:
                return rows, False
            try:
                sets = bench.tensors(case)
                gate = Gate(case, sets[0])
            except torch.OutOfMemoryError as error:
                tqdm.write(f"{case}: left out, {error}"[:180])
                progress.update(len(subjects))
                continue
            for subject in subjects:
                left = deadline - time.monotonic()
                row = bench.row(subject, case, sets, gate, min(limit, left))
                if time.monotonic() > deadline and row.get("failed", "").startswith("no result"):
                    return rows, False  # for want of time: the next run measures it
                append("speed", [row], out)
                rows.append(row)
                tqdm.write(f"[{len(rows)}/{total}] {line(case, row)}")
                progress.update()
    return rows, True


def chosen_tier(args: argparse.Namespace, cuda: bool) -> Tier:
    """The named tier, narrowed by the options. Shapes that are given stand beside the headline's ops and baselines."""
    tier = TIERS[args.tier or ("headline" if cuda else "cpu")]
    if args.shapes:
        tier = replace(tier if args.tier else TIERS["headline"], shapes=tuple(map(parse_shape, args.shapes)))
    changes = {"ops": args.ops, "baselines": args.baselines, "layouts": args.layouts, "dtypes": args.dtypes}
    tier = replace(tier, **{name: tuple(given) for name, given in changes.items() if given is not None})
    return tier if args.truncated is None else replace(tier, truncations=(args.truncated,))


def usable(names: Sequence[str], device: str) -> list[Subject]:
    """Ours and those baselines that can run here; says which cannot."""
    subjects = [SUBJECTS[OURS]]
    for name in names:
        reason = SUBJECTS[name].unusable(device)
        if reason is None:
            subjects.append(SUBJECTS[name])
        else:
            print(f"not measured: {name}: {reason}"[:2000])
    return subjects


def parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tier", choices=list(TIERS), help="default: headline on a GPU, cpu without one")
    p.add_argument("--device", default="cuda" if cuda else "cpu")
    p.add_argument("--ops", nargs="*", choices=list(OPS), help="only these")
    p.add_argument("--shapes", nargs="*", metavar="ROWSxSTEPS", help="in place of the tier's")
    p.add_argument("--baselines", nargs="*", choices=[s for s in SUBJECTS if s != OURS], help="in place of the tier's")
    p.add_argument("--layouts", nargs="*", choices=LAYOUTS)
    p.add_argument("--dtypes", nargs="*", choices=list(DTYPES))
    p.add_argument("--truncated", action=argparse.BooleanOptionalAction, help="only with, or only without")
    p.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="stop cleanly after (default 540)")
    p.add_argument("--row-seconds", type=float, default=ROW_SECONDS, help=f"timing of a row (default {ROW_SECONDS})")
    p.add_argument("--row-limit", type=float, default=SUBJECT_LIMIT, help="give up a row after so many seconds")
    p.add_argument(
        "--compile-ahead", type=int, default=0, metavar="PROCESSES",
        help="compile in so many processes first, for half of the budget at most; pays off for many rows",
    )  # fmt: skip
    p.add_argument("--again", action="store_true", help="measure what is stored already, too")
    p.add_argument("--commit", help="of the code, where the checkout has no git history")
    p.add_argument("--out", type=Path, help="default: benchmarks/results/speed.jsonl")
    p.add_argument("--pufferlib-cpp", type=Path, help="pufferlib/extensions/pufferlib.cpp of the 3.0.0 sdist")
    p.add_argument("--pufferlib-cuda", type=Path, help="pufferlib/extensions/cuda/pufferlib.cu of the same")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    args = parser().parse_args(argv)
    keep_compiled()
    if args.pufferlib_cpp and args.pufferlib_cuda:
        from benchmarks.baselines import pufferlib

        pufferlib.use(args.pufferlib_cpp, args.pufferlib_cuda)
    tier = chosen_tier(args, torch.device(args.device).type == "cuda")
    run_id = datetime.datetime.now().isoformat(timespec="seconds")
    where = {"run": run_id, "threads": torch.get_num_threads(), **provenance(args.device)}
    if args.commit:
        where["commit"] = args.commit
    rows_before = [] if args.again else stored("speed") + (stored("speed", args.out) if args.out else [])
    done = {row_key(row) for row in rows_before}
    subjects = usable(tier.baselines, args.device)
    planned = plan(tier, subjects, args.device, where, done)
    if args.compile_ahead:
        tasks = tasks_of(planned, args.device)
        n = compile_ahead(tasks, args.compile_ahead, start + args.budget / 2)
        print(f"compiled {n} of {len(tasks)} ahead in {time.monotonic() - start:.0f} s")
    bench = Bench(args.device, args.row_seconds, where)
    rows, finished = run(bench, planned, start + args.budget, args.row_limit, args.out)
    wrong = [r for r in rows if r.get("gate") == "failed" or (r["who"] == OURS and "failed" in r)]
    for row in wrong:
        print("wrong:", {k: row[k] for k in ("op", "layout", "N", "T", "who", "failed")})
    rest = "" if finished else "; the budget is used up, run again for the rest"
    print(f"{len(rows)} rows, {sum('failed' in r for r in rows)} without a result, {len(wrong)} wrong{rest}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
