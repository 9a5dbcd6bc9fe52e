"""pytest plugin: TorchRL's own tests with one family of its functions served by rl_triton. `torchrl_run.py` runs it.

    git clone https://github.com/pytorch/rl && cd rl/test
    PYTHONPATH=RL_TRITON/tests/suites python -m pytest -p rl_triton_torchrl_suite -q objectives/test_values.py \
        --rlt-family loop --rlt-report report.json

The Python loops and the vectorised forms are patched one family at a time, because many of TorchRL's tests compare one
with the other: with both served they would compare us with ourselves. Patching happens before the test modules bind the
functions. Calls are counted here too, by wrappers over the patch, so that the patch's own count can be held against it.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_triton.adapters import status, torchrl

_IN_BOTH = ("vtrace_advantage_estimate", "reward2go")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rl_triton")
    group.addoption("--rlt-family", choices=("none", "loop", "vec"), required=True, help="which functions are served")
    group.addoption("--rlt-report", type=Path, required=True, help="where to write what happened")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Record(config.getoption("--rlt-family"), config.getoption("--rlt-report")))


class Record:
    """What the run did, test by test."""

    def __init__(self, family: str, report: Path) -> None:
        self.report = report
        self.outcomes: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        for target in torchrl._targets():
            if family != "none" and (target.name in _IN_BOTH or target.name.startswith("vec_") == (family == "vec")):
                target.on()
                setattr(target.owner, target.name, self._counting(target.label, target.installed))

    def _counting(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.calls[label] += 1
            return function(*args, **kwargs)

        return counted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # one outcome a test; setup and teardown if they fail
            self.outcomes[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self) -> None:
        counted = {
            label: {"calls": self.calls[label], "served": entry["served"], "fallen_back": entry["fallen_back"]}
            for label, entry in status().items()
            if entry["active"]
        }
        record = {"outcomes": self.outcomes, "skipped": self.skipped, "functions": counted}
        self.report.write_text(json.dumps(record, indent=1))
