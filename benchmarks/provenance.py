"""What a stored result was measured on."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMPILED = ROOT / "build" / "compiled"  # what compilers cache, kept between runs


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def digest() -> str:
    """Of the code that was measured."""
    joined = hashlib.sha256()
    for path in sorted((ROOT / "core_kernels").rglob("*.py")):
        joined.update(path.read_bytes())
    return joined.hexdigest()[:16]


def provenance(device: str) -> dict[str, Any]:
    """Machine, versions, code and date, for a row of results."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    cuda = torch.device(device).type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        if cuda
        else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": _output("git", "rev-parse", "--short", "HEAD") or None,
        "digest": digest(),
        "date": datetime.date.today().isoformat(),
    }


def ptxas() -> str | None:
    """Version of the assembler that Triton uses at this moment; its code can differ in speed from another's."""
    try:
        from triton import knobs

        return str(knobs.nvidia.ptxas.version)
    except (ImportError, AttributeError, RuntimeError):  # older versions, or without the NVIDIA tools
        return None


def commits(rows: Iterable[dict[str, Any]]) -> str:
    """Of the code that rows were measured with."""
    names = list(dict.fromkeys(str(row["commit"]) for row in rows))
    return f"commit{'s' if len(names) > 1 else ''} {', '.join(names)}"


def append(name: str, rows: list[dict[str, Any]], path: Path | None = None) -> None:
    """Add rows to benchmarks/results/NAME.jsonl, or to `path`."""
    path = path or RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def stored(name: str, path: Path | None = None) -> list[dict[str, Any]]:
    """The rows of benchmarks/results/NAME.jsonl, or of `path`."""
    path = path or RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
