"""pytest plugin of run.sh: what ran, on what, written to last_run.json."""

import datetime
import hashlib
import json
import subprocess
from collections import Counter
from pathlib import Path

import numba
import pytest
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
_outcomes: dict[str, str] = {}
_reasons: Counter = Counter()
_deselected = 0


def digest() -> str:
    """Of every file of the kernels, the adapters and the tests, as
    `cat $(find core_kernels adapters tests ... | LC_ALL=C sort) | sha256sum | cut -c1-16` computes it."""
    paths = []
    for folder in ("core_kernels", "adapters", "tests"):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and path.name != "last_run.json" and not {"suites", "__pycache__"} & set(parts[:-1]):
                paths.append("/".join(parts))
    joined = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.encode()):
        joined.update((ROOT / path).read_bytes())
    return joined.hexdigest()[:16]


def pytest_runtest_logreport(report):
    if report.failed:
        _outcomes[report.nodeid] = "failed"
    elif report.skipped:
        _outcomes[report.nodeid] = "skipped"
        _reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    elif report.when == "call":
        _outcomes.setdefault(report.nodeid, "passed")


def pytest_deselected(items):
    global _deselected
    _deselected += len(items)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist
        return
    options = session.config.option
    if options.keyword or options.markexpr or _deselected:
        return  # part of the suite is no record
    counts = Counter(_outcomes.values())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record = {
        "collected": len(_outcomes),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "skip_reasons": dict(sorted(_reasons.items())),
        "deselected": _deselected,
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numba": numba.__version__,
        "digest": digest(),
        "date": datetime.date.today().isoformat(),
        "exit_status": int(exitstatus),
    }
    path = ROOT / "tests" / "gpu" / "last_run.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{path.relative_to(ROOT)}: {json.dumps(record)}")
