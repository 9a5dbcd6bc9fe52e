"""Compiles in several processes what a run will measure; the one that measures finds it in the compilers' caches."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch._inductor.config
from tqdm import tqdm

from benchmarks.baselines import OURS, SUBJECTS, Subject
from benchmarks.cases import OPS, Case, Shape, make_window

Task = tuple[dict[str, Any], str, str]


def case_of(key: dict[str, Any]) -> Case:
    """Of its key: a case holds functions, which cannot be sent to another process."""
    shape = Shape(key["N"], key["T"], key["A"] or Shape.actions)
    return Case(OPS[key["op"]], key["layout"], shape, key["dtype"], key["truncated"])


def _compile(task: Task) -> str:
    """Call the subject once on the case. Nothing where that fails: the run says so in its row."""
    key, who, device = task
    torch._inductor.config.compile_threads = 1  # there are as many processes as it is to take cores
    case = case_of(key)
    try:
        prepared = SUBJECTS[who].prepare(case, [case.op.arguments(make_window(case, device))])
        with prepared.scope():
            for calls in (prepared.calls, prepared.out_calls):
                if calls is not None:
                    calls[0]()
    except Exception as error:  # a baseline's compiler can raise anything
        return f"{case} {who}: {type(error).__name__}"
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # all processes share the device's memory
    return f"{case} {who}"


def tasks_of(planned: Iterable[tuple[Case, Sequence[Subject]]], device: str) -> list[Task]:
    """What of a plan is worth compiling ahead: ours and what torch.compile makes."""
    return [
        (case.key, subject.name, device)
        for case, subjects in planned
        for subject in subjects
        if subject.name == OURS or subject.name.startswith("compiled")
    ]


def compile_ahead(tasks: Sequence[Task], processes: int, deadline: float) -> int:
    """Compile until all is done or the time (of `time.monotonic`) is up. How many tasks were done."""
    done = 0
    if not tasks or deadline <= time.monotonic():
        return done
    with (
        multiprocessing.get_context("spawn").Pool(min(processes, len(tasks))) as pool,  # terminated on leaving
        tqdm(total=len(tasks), desc="compiling", disable=None) as progress,
    ):
        finished = pool.imap_unordered(_compile, tasks)
        while done < len(tasks):
            try:
                progress.set_postfix_str(finished.next(timeout=max(0.0, deadline - time.monotonic())))
            except multiprocessing.TimeoutError:
                break
            done += 1
            progress.update()
    return done
