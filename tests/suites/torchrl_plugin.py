"""pytest plugin: TorchRL's own tests with one family of its functions served by rl_triton.

    RL_TRITON_FAMILY=loop|vec|none RL_TRITON_REPORT=report.json pytest -p torchrl_plugin objectives/test_values.py

The families are patched one at a time, because many of those tests compare the loops with the vectorised forms: with
both served they would compare us with ourselves. Patching happens before the test modules bind the functions. Calls
are counted here, by wrappers over the patch, and not by the patch itself.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path

import torch

from rl_triton.adapters import status
from rl_triton.adapters import torchrl as adapter

VECTORISED = "vec_"
BOTH = ("vtrace_advantage_estimate", "reward2go")

calls: Counter[str] = Counter()
outcomes: dict[str, str] = {}
skipped: Counter[str] = Counter()


def _in_family(name: str, family: str) -> bool:
    return family != "none" and (name in BOTH or name.startswith(VECTORISED) == (family == "vec"))


def _counting(label, function):
    @functools.wraps(function)
    def counted(*args, **kwargs):
        if not torch.compiler.is_compiling():
            calls[label] += 1
        return function(*args, **kwargs)

    return counted


def pytest_configure(config):
    for target in adapter._targets():
        if _in_family(target.name, os.environ["RL_TRITON_FAMILY"]):
            target.on()
            setattr(target.owner, target.name, _counting(target.label, target.installed))


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = "passed" if hasattr(report, "wasxfail") else report.outcome
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_sessionfinish(session, exitstatus):
    patched = {label: counts for label, counts in status().items() if counts["active"]}
    Path(os.environ["RL_TRITON_REPORT"]).write_text(
        json.dumps({"outcomes": outcomes, "skipped": skipped, "status": patched, "calls": calls}, indent=1)
    )
