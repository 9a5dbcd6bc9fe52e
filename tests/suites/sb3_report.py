"""The record of Stable-Baselines3's and sb3-contrib's own suites, as docs/sb3.md shows it.

python tests/suites/sb3_report.py     # rewrite that part of the page
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "sb3.md"
RECORDS = ("sb3.json", "sb3_contrib.json")
BEGIN, END = "<!-- suites:begin -->\n", "<!-- suites:end -->"


def records() -> list[dict]:
    return [json.loads((HERE / name).read_text()) for name in RECORDS]


def section() -> str:
    lines = [
        "| suite | tests of | run on | passed | failed | skipped | calls served | left to Stable-Baselines3 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records():
        fallen_back = record["fallen_back"]
        left = sum(fallen_back.values())
        reasons = "; ".join(f"{count}: {reason}" for reason, count in fallen_back.items())
        cells = (
            record["package"],
            f"`{record['source']}`, {len(record['files'])} files",
            f"{record['version']}, {record['date']}",
            record["passed"],
            len(record["failed"]),
            sum(record["skipped"].values()),
            record["served"],
            f"{left} ({reasons})" if left else 0,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    return re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + section() + END, page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
