"""pytest plugin: run Stable-Baselines3's or sb3-contrib's own tests with rl_triton patched in.

    git clone --branch TAG https://github.com/DLR-RM/stable-baselines3 && cd stable-baselines3
    rm -r stable_baselines3    # test what is installed, not the checkout
    PYTHONPATH=RL_TRITON/tests/suites python -m pytest -p rl_triton_sb3_suite -q tests \
        --rlt-suite sb3 --rlt-source TAG --rlt-report RL_TRITON/tests/suites/sb3.json

Loaded with `-p`, so before any test module imports Stable-Baselines3, and without a change to its tree. The run fails
unless the patch served calls, and if a call fell back for a reason that is not in EXPECTED.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_triton.adapters import sb3, status
from rl_triton.adapters.sb3 import _compute

PACKAGES = {"sb3": "stable-baselines3", "sb3_contrib": "sb3-contrib"}
GAE = "stable_baselines3.common.buffers.RolloutBuffer.compute_returns_and_advantage"
# Reasons for which a call may be left to Stable-Baselines3, and who brings it about.
EXPECTED = {
    "sb3": {},
    "sb3_contrib": {},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rl_triton")
    group.addoption("--rlt-suite", choices=PACKAGES, required=True, help="whose tests these are")
    group.addoption("--rlt-source", required=True, help="tag or commit that they are from")
    group.addoption("--rlt-report", type=Path, help="where to write the record")
    group.addoption("--rlt-terminal-values", choices=("single", "batched"), default="single")


def pytest_configure(config: pytest.Config) -> None:
    _compute.SHORT = 0  # tests have short rollouts: serve them all
    sb3.patch(terminal_values=config.getoption("--rlt-terminal-values"))
    config.pluginmanager.register(Record(config), "rl_triton_record")


def pytest_unconfigure(config: pytest.Config) -> None:
    sb3.unpatch()


class Record:
    """What the run did, test by test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.suite = config.getoption("--rlt-suite")
        self.outcomes: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.deselected: Counter[str] = Counter()
        self.failed: list[str] = []
        self.files: dict[str, Counter[str]] = {}
        self.served_before = 0
        self.adapter = _digest()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        options = [
            f"-{letter} {self.config.getoption(name)!r}" for letter, name in (("m", "markexpr"), ("k", "keyword"))
        ]
        self.deselected[" ".join(option for option in options if not option.endswith("''"))] += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # one outcome a test; setup and teardown if they fail
            self.outcomes[report.outcome] += 1
            file = self.files.setdefault(report.nodeid.split("::")[0], Counter())
            file[report.outcome] += 1
            if report.failed:
                self.failed.append(f"{report.nodeid} ({report.when})")
            if report.skipped:
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
                self.skipped[reason.removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            served = status()[GAE]["served"]
            self.files.setdefault(report.nodeid.split("::")[0], Counter())["served"] += served - self.served_before
            self.served_before = served

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["failed"] += 1
            self.failed.append(f"{report.nodeid} (collection)")

    def faults(self) -> list[str]:
        entry = status()[GAE]
        found = [f"failed: {name}" for name in self.failed]
        if not sb3.is_patched():
            found.append("the patch was lost during the run")
        if entry["served"] == 0:
            found.append("no call was served")
        unexpected = set(entry["fallen_back"]) - set(EXPECTED[self.suite])
        return found + [f"{entry['fallen_back'][reason]} calls fell back: {reason}" for reason in sorted(unexpected)]

    def not_run(self) -> list[str]:
        """Files of the suite that the command left out."""
        root = self.config.rootpath
        return sorted(name for path in (root / "tests").rglob("test_*.py")
                      if (name := path.relative_to(root).as_posix()) not in self.files)  # fmt: skip

    def report(self) -> dict[str, Any]:
        package = PACKAGES[self.suite]
        versions = {
            name: importlib.metadata.version(name) for name in (*PACKAGES.values(), "torch", "numpy", "gymnasium")
        }
        entry = status()[GAE]
        return {
            "package": package,
            "version": versions[package],
            "source": self.config.getoption("--rlt-source"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "passed": self.outcomes["passed"],
            "failed": self.failed,
            "skipped": dict(sorted(self.skipped.items())),
            "deselected": dict(self.deselected),
            "not_run": self.not_run(),
            "served": entry["served"],
            "fallen_back": entry["fallen_back"],
            "other_patches": {name: counts for name, counts in status().items() if name != GAE},
            "files": {name: dict(sorted(counts.items())) for name, counts in sorted(self.files.items())},
            "versions": {"python": platform.python_version(), **versions},
            "adapter": self.adapter,
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        target = self.config.getoption("--rlt-report")
        if target is not None:
            target.write_text(json.dumps(self.report(), indent=2) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("rl_triton")
        for name, counts in status().items():
            terminalreporter.write_line(f"{name}: served {counts['served']}, fallen back {counts['fallen_back'] or 0}")
        for fault in self.faults():
            terminalreporter.write_line(f"FAULT {fault}", red=True)


def _digest() -> str:
    """Of the code that was tested."""
    folder = Path(sb3.__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(folder.glob("*.py")), folder.parent / "_patching.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
