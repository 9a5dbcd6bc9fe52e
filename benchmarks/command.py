"""The command line of programs that measure a few shapes and append rows."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import append

Shapes = tuple[tuple[int, int], ...]


def parser(doc: str, name: str, shapes: Shapes, seconds: float) -> argparse.ArgumentParser:
    """doc: of the program, whose first paragraph is its description. name: of its rows in benchmarks/results."""
    p = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--shapes", nargs="+", type=_shape, default=shapes, metavar="ROWSxSTEPS")
    p.add_argument("--seconds", type=float, default=seconds, help=f"of timing a call by one clock (default {seconds})")
    p.add_argument("--commit", help="of the code, where the checkout has no git history")
    p.add_argument("--out", type=Path, help=f"default: benchmarks/results/{name}.jsonl")
    p.add_argument("--table", action="store_true", help="measure nothing: make the table of the stored rows")
    return p


def _shape(text: str) -> tuple[int, int]:
    rows, steps = map(int, text.split("x"))
    return rows, steps


def store(name: str, rows: Iterable[dict[str, Any]], args: argparse.Namespace) -> None:
    """Append each row as soon as it is measured."""
    for row in rows:
        append(name, [row | ({"commit": args.commit} if args.commit else {})], args.out)
