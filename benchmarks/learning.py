"""The examples at full size: learning curves, where the time of an update goes, and what a faster step is worth.

    python -m benchmarks.learning run --plan envs breakdown amdahl --out results --minutes 9
    python -m benchmarks.learning run --plan pong --out results --cores 0-23 --shared --parallel 6 --gpu 0,1
    python -m benchmarks.learning run --plan pong --out try --only loop-1 -- --total-timesteps 100000
    python -m benchmarks.learning store results/learning.tar.xz
    python -m benchmarks.learning report        # plots, and the tables of docs/ppo.md

`run` starts the runs of the plans one after the other, or --parallel of them side by side, each in a process of its own
with its share of the cores (those that differ in nothing but --credit, and are compared by their times, in one). With
--shared all have all of the cores, and twice their share of emulators' threads, which work while other runs wait for a
GPU. What follows `--` goes to every run. All that is to be kept is in one archive in the folder --out, written anew
whenever a run is done. `store` appends it to benchmarks/results/learning.jsonl.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import RESULTS, ROOT, append, provenance

WORK = ROOT / "build" / "learning"
ARCHIVE = "learning.tar.xz"
ROLLOUT = RESULTS / "pong_rollout.npz"
START_SECONDS = 45.0
"""Of the time that a run may take, for what is not training: imports, compilation, the test of the policy."""
CURVE_POINTS = 300

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    plan: str
    name: str
    example: str
    options: tuple[str, ...]
    credits: tuple[str, ...] = ()
    """Runs with these ways to assign credit in turn, in one process; empty: one run, as the options say."""

    def command(self, folder: Path, minutes: float, threads: int) -> list[str]:
        script = ROOT / "examples" / f"{self.example}.py"
        given = [*self.options, "--runs", str(folder)]
        if self.example != "impala_vtrace":  # short, and does not stop by time
            given += ["--max-minutes", f"{minutes:.3f}"]
        if self.example == "ppo_atari":
            given += ["--threads", str(threads)]
        if self.credits:
            return [sys.executable, "-m", "benchmarks.in_turn", str(script), "credit", *self.credits, "--", *given]
        return [sys.executable, str(script), *given]


def options(**given: Any) -> tuple[str, ...]:
    """{"env_id": "hopper"} as a command line."""
    return tuple(text for key, x in given.items() for text in (f"--{key.replace('_', '-')}", str(x)))


CREDITS = ("rl_triton", "compiled_loop", "loop")
ROUNDS = 3
"""So often each of them in turn: a host is slower now and faster then, and what is compared is to have met it alike."""
TASKS = {"cartpole": "cartpole-swingup", "hopper": "hopper"}
LENGTHS = (24, 16, 32)
"""T; what a plan that runs out of time has measured is the first."""


def pong() -> Iterator[Job]:
    for seed in (1, 2, 3):
        for credit in ("rl_triton", "loop"):
            yield Job("pong", f"pong-{credit}-{seed}", "ppo_atari", options(credit=credit, seed=seed))


def envs() -> Iterator[Job]:
    for steps in LENGTHS:
        for task, env_id in TASKS.items():
            updates = 500 if task == "cartpole" else 400
            given = options(env_id=env_id, num_steps=steps, total_timesteps=updates * steps * 4096)
            yield Job("envs", f"{task}-T{steps}", "ppo_gpu_envs", given)


def _timed(plan: str, name: str, updates: int, num_envs: int, num_steps: int, **given: Any) -> Job:
    """Of every way to assign credit, updates whose time is measured: all epochs of them, and no test."""
    size = dict(num_envs=num_envs, num_steps=num_steps, total_timesteps=updates * num_envs * num_steps)
    return Job(plan, name, "ppo_gpu_envs", options(**size, **given, eval_envs=0, target_kl=None), CREDITS * ROUNDS)


def breakdown() -> Iterator[Job]:
    for steps in LENGTHS:
        for task, env_id in TASKS.items():
            yield _timed("breakdown", f"{task}-T{steps}", 20, 4096, steps, env_id=env_id)
            if steps == LENGTHS[0]:
                name = f"{task}-T{steps}-graphs"
                yield _timed("breakdown", name, 20, 4096, steps, env_id=env_id, compile="reduce-overhead")


def amdahl() -> Iterator[Job]:
    large = dict(env_id=TASKS["cartpole"], compile="reduce-overhead", num_envs=16384, num_steps=128)
    yield _timed("amdahl", "small", 12, **large, hidden=32, update_epochs=1, num_minibatches=4)
    yield _timed("amdahl", "large", 12, **large, hidden=256, update_epochs=5, num_minibatches=4)


def brax() -> Iterator[Job]:
    given = options(env_id="brax-ant", num_steps=16, total_timesteps=20_000_000, learning_rate=5e-4, num_minibatches=8)
    yield Job("brax", "brax-ant", "ppo_gpu_envs", (*given, *options(gamma=0.97, reward_scale=0.1), "--norm-obs"))


def impala() -> Iterator[Job]:
    yield Job("impala", "impala", "impala_vtrace", ())


PLANS: dict[str, Callable[[], Iterator[Job]]] = {x.__name__: x for x in (pong, envs, breakdown, amdahl, brax, impala)}


@dataclass(frozen=True)
class Slot:
    """What a run gets of the machine."""

    cores: tuple[int, ...]
    """Empty: all."""
    gpu: str | None
    threads: int
    """Of the emulators; 0: the run's own choice."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ) | ({} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu})

    def pin(self) -> None:
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def slots(parallel: int, cores: str | None, gpu: str | None, shared: bool) -> list[Slot]:
    """Raises ValueError: fewer cores than runs side by side."""
    chosen: list[int] = []
    if cores is not None:
        first, _, last = cores.partition("-")
        chosen = list(range(int(first), int(last or first) + 1))
        if len(chosen) < parallel:
            raise ValueError(f"--cores must be at least {parallel}, one for each of --parallel, got {cores}")
    gpus = [None] if gpu is None else gpu.split(",")
    shares = [tuple(int(x) for x in share) for share in np.array_split(chosen, parallel)]
    threads = [len(share) for share in shares]
    if shared:
        shares, threads = [tuple(chosen)] * parallel, [2 * share for share in threads]
    return [Slot(shares[i], gpus[i % len(gpus)], threads[i]) for i in range(parallel)]


@dataclass
class Run:
    """A job under way."""

    job: Job
    slot: Slot
    folder: Path
    process: subprocess.Popen
    began: float
    parallel: int

    @classmethod
    def start(cls, job: Job, slot: Slot, minutes: float, parallel: int, extra: Sequence[str]) -> Run:
        folder = WORK / job.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*job.command(folder, minutes, slot.threads), *extra],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=slot.environment(),
                preexec_fn=slot.pin,
                start_new_session=True,
            )
        return cls(job, slot, folder, process, time.monotonic(), parallel)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def rows(self) -> list[Row]:
        """What it came to: the example's results, and the end of what it printed for those that are not there."""
        same = {"plan": self.job.plan, "example": self.job.example, "cores": len(self.slot.cores) or os.cpu_count()}
        same |= {"parallel": self.parallel, "wall_seconds": time.monotonic() - self.began}
        written = sorted(self.folder.glob("*/results.json"), key=lambda path: path.stat().st_mtime)
        results = [json.loads(path.read_text()) for path in written]
        if results and "runs" in results[0]:
            named = dict(each(self.job.name, results[0]))
        elif not self.job.credits:
            named = {self.job.name: next(iter(results), None)}
        else:
            named = {
                f"{self.job.name}-{credit}": pooled([x for x in results if x["args"]["credit"] == credit])
                for credit in dict.fromkeys(self.job.credits)
            }
        failed = {"failed": f"exit {self.process.returncode}", "log": (self.folder / "log").read_text()[-3000:]}
        return [same | {"name": name} | (failed if result is None else result) for name, result in named.items()]


def each(name: str, result: Row) -> Iterator[tuple[str, Row]]:
    """The runs that one process did, by name."""
    for kind, group in result["runs"].items():
        for seed, one in enumerate(group, result["args"]["seed"]):
            share = np.median(one.pop("credit_seconds")) / np.median(one.pop("update_seconds"))
            args = result["args"] | {"kind": kind, "seed": seed}
            summed = {"args": args, "device": result["device"], "share": share}
            yield f"{name}-{kind}-{seed}", one | summed | {"final_return": float(np.mean(one["returns"][-100:]))}


def pooled(results: Sequence[Row]) -> Row | None:
    """Runs that differ in nothing, as one: the medians of their phases."""
    if not results:
        return None
    phases = {phase: float(np.median([x["phases"][phase] for x in results])) for phase in results[0]["phases"]}
    totals = {name: sum(x[name] for x in results) for name in ("seconds", "updates") if name in results[0]}
    return results[-1] | totals | {"phases": phases, "rounds": len(results)}


def pack(out: Path, rows: Sequence[Row]) -> None:
    """Written beside and moved, so that there is a whole archive at any time."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:xz") as archive:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        entry = tarfile.TarInfo("rows.jsonl")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
        for row in rows:
            for rollout in sorted((WORK / row["name"]).glob("*/rollout.pt")):
                archive.add(rollout, f"rollouts/{row['name']}.pt")
    os.replace(part, out / ARCHIVE)


def run(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60.0 * args.minutes
    waiting = [job for plan in args.plan for job in PLANS[plan]() if re.search(args.only, job.name)]
    free = slots(args.parallel, args.cores, args.gpu, args.shared)
    where = provenance("cuda" if torch.cuda.is_available() else "cpu") | (
        {"commit": args.commit} if args.commit else {}
    )
    running: list[Run] = []
    rows: list[Row] = []

    def say(text: str) -> None:
        left = deadline - time.monotonic()
        print(f"[{left:5.0f} s left, {len(rows)} done, {len(waiting)} to do] {text}", flush=True)

    def finish(done: Run) -> None:
        running.remove(done)
        free.append(done.slot)
        for row in done.rows():
            rows.append(row | where)
            say(f"{row['name']}: {summary(rows[-1])}")
        pack(args.out, rows)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`
    try:
        while waiting or running:
            for done in [x for x in running if x.process.poll() is not None]:
                finish(done)
            left = deadline - time.monotonic()
            while free and waiting and left > 1.5 * args.start_seconds:
                job = waiting.pop(0)
                minutes = (left - args.start_seconds) / 60.0
                running.append(Run.start(job, free.pop(0), minutes, args.parallel, args.options))
                say(f"{job.name} started")
            if left < 0 or (waiting and not running):
                break
            time.sleep(0.2)
    finally:
        for late in [*running]:
            late.stop()
            finish(late)
    if waiting:
        say("no time for " + ", ".join(job.name for job in waiting))
    return 1 if waiting or any("failed" in row for row in rows) else 0


def summary(row: Row) -> str:
    if "failed" in row:
        return f"failed, {row['failed']}: {row['log'][-400:]}"
    if row["plan"] == "pong":
        return f"{row['final_return']:.1f} after {row['total_steps']:,} steps, {row['steps_per_second']:,.0f} a second"
    if row["plan"] == "impala":
        return f"{row['final_return']:.1f} after {row['args']['total_timesteps']:,} steps, {row['seconds']:.0f} s"
    phases = ", ".join(f"{phase} {1e3 * x:.2f} ms" for phase, x in row["phases"].items())
    results = ", ".join(f"{key} {x:.3g}" for key, x in row["results"].items())
    return "; ".join(x for x in (f"{row['seconds']:.0f} s", phases, results, *row["failures"]) if x)


def thinned(curve: Sequence[Sequence[float]]) -> list[list[float]]:
    """At most CURVE_POINTS of its points, evenly in steps, the last one among them."""
    if len(curve) > CURVE_POINTS:
        steps = [point[0] for point in curve]
        places = np.searchsorted(steps, np.linspace(steps[0], steps[-1], CURVE_POINTS), side="right") - 1
        curve = [curve[i] for i in np.unique(places)]
    return [[float(f"{x:.6g}") for x in point] for point in curve]


def compact(row: Row) -> Row:
    """As it is stored: a curve of [step, return], of Pong and CartPole the mean of 100 games."""
    row = dict(row)
    if "failed" in row:
        return row
    # Where it ran is no property of the run.
    row["args"] = {key: x for key, x in row["args"].items() if key not in ("runs", "resume")}
    if row["plan"] in ("pong", "impala"):
        steps, returns = row.pop("steps"), row.pop("returns")
        window = min(100, len(returns))
        means = np.convolve(returns, np.ones(window) / window, mode="valid") if window else []
        row |= {"games": len(returns), "curve": list(zip(steps[window - 1 :], map(float, means), strict=True))}
    else:
        row["curve"] = [(steps, score) for steps, _, score in row["curve"]]
    return row | {"curve": thinned(row["curve"])}


def store(archive: Path, rows_path: Path | None, rollout_path: Path, commit: str | None) -> list[Row]:
    """Append the rows of an archive; keep the rollout of its first run of Pong."""
    with tarfile.open(archive) as packed:
        rows = [json.loads(line) for line in packed.extractfile("rows.jsonl").read().splitlines()]
        rollouts = sorted(name for name in packed.getnames() if name.startswith("rollouts/"))
        if rollouts:
            window = torch.load(io.BytesIO(packed.extractfile(rollouts[0]).read()), map_location="cpu")
            rollout_path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(rollout_path, **{key: x.numpy() for key, x in window.items() if x is not None})
    rows = [compact(row) | ({"commit": commit} if commit else {}) for row in rows]
    append("learning", rows, rows_path)
    return rows


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = p.add_subparsers(dest="command", required=True)
    r = commands.add_parser("run", help="launch the runs of some plans")
    r.add_argument("--plan", nargs="+", choices=PLANS, required=True)
    r.add_argument("--only", default="", metavar="REGEX", help="of the plans' runs, those with such a name")
    r.add_argument("--out", type=Path, required=True, help=f"folder of {ARCHIVE}")
    r.add_argument("--minutes", type=float, default=60.0, help="for all of them (default 60)")
    r.add_argument("--start-seconds", type=float, default=START_SECONDS, help="of a run's time, not for training")
    r.add_argument("--parallel", type=int, default=1, help="runs side by side (default 1)")
    r.add_argument("--cores", metavar="A-B", help="which the runs share; default: all for each")
    r.add_argument("--shared", action="store_true", help="every run may use all of --cores")
    r.add_argument("--gpu", metavar="K[,K]", help="taken in turn; default: as CUDA_VISIBLE_DEVICES says")
    r.add_argument("--commit", help="of the code, where the checkout has no git history")
    r.add_argument("options", nargs="*", help="behind --, for every run")
    s = commands.add_parser("store", help="append an archive's rows to benchmarks/results/learning.jsonl")
    s.add_argument("archive", type=Path)
    s.add_argument("--commit", help="of the code that ran, where its rows do not say")
    commands.add_parser("report", help="plots and the tables of docs/ppo.md")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "run":
        return run(args)
    if args.command == "store":
        rows = store(args.archive, None, ROLLOUT, args.commit)
        print(f"{len(rows)} rows, {sum('failed' in row for row in rows)} of runs that failed")
        return 0
    from benchmarks.learning_report import write

    write(ROOT, RESULTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
