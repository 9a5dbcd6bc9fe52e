"""Plots and tables from the stored rows.

    python -m benchmarks.report    # benchmarks/results/*.png, docs/speed.md and the table in README.md

Times are compared within one run only. Of each case the rows of the code as it stands are taken; where there are none,
those of the code that it was measured with last, and the tables say so.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.baselines import OURS, SUBJECTS
from benchmarks.cases import DTYPES, HEADLINE_SHAPES, LAYOUTS, OPS, RATIO_SHAPES, Case
from benchmarks.plots import AXES, draw
from benchmarks.provenance import RESULTS, ROOT, commits, digest, stored

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
FIGURES = {
    "speedup": "gae beside the baselines",
    "bandwidth": "kernels beside a copy",
    "host_device": "time of the host and of the device",
}
EARLIER = "†"
_CASE = ("op", "layout", "N", "T", "A", "dtype", "truncated")

Row = dict[str, Any]


def case_of(row: Row) -> tuple:
    return tuple(row[name] for name in _CASE)


@dataclass(frozen=True)
class Measurements:
    """The rows of one machine, of each case those of one version of the code; the last of each subject and case."""

    rows: tuple[Row, ...]
    now: str
    """Digest of the code as it stands."""

    def source(self, marked: bool = True) -> str:
        """Where the numbers come from, as a sentence. marked: cases of earlier code are."""
        last = self.rows[-1]
        current = [row for row in self.rows if row["digest"] == self.now]
        earlier = [row for row in self.rows if row["digest"] != self.now]
        where = f", where marked {EARLIER}" if marked and self.mixed else ""
        code = []
        if current:
            code.append(f"the code as it stands, {commits(current)}")
        if earlier:
            code.append(f"earlier code, {commits(earlier)}{where}")
        return f"{last['machine']}, torch {last['torch']}, Triton {last['triton']}, {last['date']}, {'; '.join(code)}."

    def mark(self, row: Row) -> str:
        """Behind the name of a case of earlier code, where others are of the code as it stands."""
        return f" {EARLIER}" if self.mixed and row["digest"] != self.now else ""

    @cached_property
    def mixed(self) -> bool:
        """Some are of the code as it stands, and some are not."""
        return len({row["digest"] == self.now for row in self.rows}) > 1

    @cached_property
    def _ours(self) -> dict[tuple, Row]:
        return {(case_of(row), row["run"]): row for row in self.rows if row["who"] == OURS}

    def ours_beside(self, row: Row) -> Row | None:
        """Our row of the same case and run."""
        return self._ours.get((case_of(row), row["run"]))

    def speedup(self, row: Row, column: str = "amortised_us") -> float | None:
        """How many times longer than ours the baseline takes."""
        ours = self.ours_beside(row)
        if ours is None or column not in row or column not in ours:
            return None
        return row[column] / ours[column]


def measurements(rows: Sequence[Row], cuda: bool) -> Measurements | None:
    """Of one kind of machine, GPUs or CPUs."""
    rows = [row for row in rows if (row["driver"] is not None) == cuda]
    if not rows:
        return None
    now = digest()
    machine = next((row for row in reversed(rows) if row["digest"] == now), rows[-1])["machine"]
    rows = [row for row in rows if row["machine"] == machine]
    version = {case_of(row): row["digest"] for row in rows}
    version |= {case_of(row): now for row in rows if row["digest"] == now}
    latest: dict[tuple, Row] = {}
    for row in rows:
        if row["digest"] == version[case_of(row)]:
            # Of ours the row of each run is kept: every baseline is compared with that of its own run.
            key = (*case_of(row), row["who"], row["run"] if row["who"] == OURS else None)
            latest.pop(key, None)
            latest[key] = row
    return Measurements(tuple(latest.values()), now)


def last_ours(m: Measurements, **wanted: Any) -> Row | None:
    """Our last row of a case that has results."""
    found = [
        row
        for row in m.rows
        if row["who"] == OURS and "failed" not in row and all(row[k] == x for k, x in wanted.items())
    ]
    return found[-1] if found else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(x) + " |" for x in (header, ["---"] * len(header), *rows)]


def micro(x: float | None) -> str:
    """Microseconds to three digits."""
    if x is None:
        return ""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def times(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}x" if x >= 100 else f"{x:.1f}x" if x >= 10 else f"{x:.2f}x"


def percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f} %"


def peers_table(m: Measurements) -> list[str]:
    """gae beside every baseline."""
    baselines = [row for row in m.rows if row["op"] == "gae" and row["who"] != OURS]
    names = [name for name in SUBJECTS if any(row["who"] == name for row in baselines)]
    lines = []
    for shape in HEADLINE_SHAPES:
        for layout in LAYOUTS:
            key = Case(OPS["gae"], layout, shape).key
            ours = last_ours(m, **key)
            if ours is None:
                continue
            of_case = {r["who"]: r for r in baselines if all(r[k] == x for k, x in key.items())}
            cells = []
            for name in names:
                row = of_case.get(name)
                cells.append("" if row is None else "failed" if "failed" in row else times(m.speedup(row)))
            lines.append([f"{shape} {layout}{m.mark(ours)}", micro(ours["amortised_us"]), *cells])
    header = ["`gae`, N x T", "us a call", *(name.replace("_", " ") for name in names)]
    return table(header, lines) if lines else []


def ops_table(m: Measurements) -> list[str]:
    """Every op at two shapes."""
    lines = []
    for shape in RATIO_SHAPES:
        for op in OPS.values():
            key = Case(op, "NT", shape).key
            ours = last_ours(m, **key)
            if ours is None:
                continue
            scans = [
                m.speedup(row)
                for row in m.rows
                if row["who"] == "compiled_scan" and all(row[k] == x for k, x in key.items())
            ]
            lines.append(
                [
                    f"`{op.name}` {shape}{m.mark(ours)}",
                    micro(ours["single_us"]),
                    micro(ours["amortised_us"]),
                    micro(ours.get("floor_amortised_us")),
                    micro(ours.get("device_us")),
                    percent(ours.get("copy_fraction")),
                    times(scans[-1]) if scans else "",
                ]
            )
    header = ["op, [N, T]", "alone", "back to back", "`torch.add`", "device", "of a copy's speed", "compiled scan"]
    return table(header, lines) if lines else []


def losses(m: Measurements) -> list[str]:
    """Every comparison in which a baseline's full call is faster."""
    lines, compared = [], 0
    for row in m.rows:
        ratio = m.speedup(row)
        if row["who"] == OURS or ratio is None:
            continue
        compared += 1
        if ratio < 1:
            case = f"`{row['op']}` {row['N']}x{row['T']} {row['layout']} {row['dtype']}{m.mark(row)}"
            lines.append(f"{case}: {row['who'].replace('_', ' ')} ({times(ratio)})")
    if not compared:
        return []
    shown = "; ".join(lines[:12]) + ("; the others are in docs/speed.md" if len(lines) > 12 else "")
    return [f"Faster than ours in {len(lines)} of {compared} comparisons{': ' + shown if lines else ''}."]


def pufferlib(m: Measurements) -> list[str]:
    """Ours against PufferLib's kernel, which is given its results' memory as ours is."""
    rows = [row for row in m.rows if row["who"] == "pufferlib" and "failed" not in row]
    if not rows:
        return []
    counts = []
    for words, column in (("on the device", "device_us"), ("in full calls with `out=`", "out_amortised_us")):
        ratios = sorted(x for x in (m.speedup(row, column) for row in rows) if x is not None)
        if ratios:
            faster = sum(x > 1 for x in ratios)
            counts.append(f"{words} ours is faster in {faster} of {len(ratios)} shapes ({times(ratios[0])} to "
                          f"{times(ratios[-1])})")  # fmt: skip
    return [
        "",
        f"Beside PufferLib's CUDA kernel, which computes advantages alone, {', '.join(counts)}"
        f"{max(map(m.mark, rows))}.",
    ]


def readme(gpu: Measurements | None, cpu: Measurements | None) -> str:
    """What stands between the markers."""
    lines: list[str] = []
    if gpu is None:
        lines.append("No speed has been measured on a GPU yet.")
    else:
        lines += [
            f"Measured on: {gpu.source()}",
            "Microseconds a full call, its allocations included; columns of baselines say how many times longer than",
            "ours they take, back to back.",
            "",
            *peers_table(gpu),
            "",
            *ops_table(gpu),
            "",
            *losses(gpu),
            *pufferlib(gpu),
        ]
    if cpu is not None:
        lines += ["", f"On a CPU, Stable-Baselines3's buffer: {cpu.source()}", "", *sb3_table(cpu)]
    lines += ["", "All rows: [docs/speed.md](docs/speed.md)."]
    return "\n".join(lines)


def sb3_table(m: Measurements) -> list[str]:
    lines = []
    for row in m.rows:
        if row["who"] != "sb3_patched" or "failed" in row:
            continue
        stock = [r for r in m.rows if r["who"] == "sb3" and case_of(r) == case_of(row) and r["run"] == row["run"]]
        if stock and "failed" not in stock[-1]:
            before = stock[-1]["single_us"]
            cells = [
                f"{row['T']} x {row['N']}{m.mark(row)}",
                micro(before),
                micro(row["single_us"]),
                times(before / row["single_us"]),
            ]
            lines.append(cells)
    return table(["n_steps x n_envs", "stock, us", "patched, us", "ratio"], lines) if lines else []


_COLUMNS = """
- who: ours (`rl_triton`) or a baseline, listed below. A row whose gate failed or that raised says why and has no times.
- alone: one call, synchronised before and after; median, with the 20 % and 80 % quantiles in brackets. back to back:
  wall time of many calls over their number. Both are full calls, which allocate their results; `out=`: into tensors
  that exist. Microseconds.
- device: time on the GPU for a call, into existing results where the op can. "graph": calls in a CUDA graph, events
  around a replay; "events": events around single launches behind a sleeping kernel; "host included": the host was the
  slower. Nothing is subtracted. The tensors change from call to call, so that inputs come from memory, not the cache.
- MB: each tensor that has to be read or written, once; of bootstrap values only the sectors that are read. The number
  in brackets is ours where a baseline's differs (flags as floats, advantages alone).
- of copy: speed relative to a copy that moves as many bytes, measured in the same run: whole pages, at most 805 MB,
  in proportion beyond, since PyTorch copies other sizes more slowly. (Rows with `copy_of` take those of neighbouring
  sizes: theirs had been one of the slow ones.)
- ratio: the baseline's time back to back over ours, in the same run.
- error: largest error of the compared rows against a float64 loop, relative to the results' RMS.
""".strip()


_DEVICE = (
    "Microseconds a call of ours spends on the device, and its speed relative to a copy that moves as many bytes. "
    "Truncated: with `truncated` and `bootstrap_values`."
)


def full_page(groups: Sequence[Measurements]) -> str:
    """docs/speed.md."""
    lines = ["# Speed", "", "Generated by `python -m benchmarks.report` from `benchmarks/results/speed.jsonl`.", ""]
    if not groups:
        return "\n".join([*lines, "Nothing has been measured yet.", "", _COLUMNS, ""])
    lines += [_COLUMNS, "", "Baselines:", ""]
    lines += [f"- `{s.name}`: {s.about}." for s in SUBJECTS.values() if s.name != OURS]
    header = ["case", "who", "alone", "back to back", "`out=` alone", "`out=` back to back"]
    header += ["device", "MB", "of copy", "ratio", "error"]
    for m in groups:
        compared = {case_of(row) for row in m.rows if row["who"] != OURS}
        rows = sorted(
            (row for row in m.rows if case_of(row) in compared),
            key=lambda row: (*map(str, (row["op"], row["dtype"], row["truncated"])), *_order(row)),
        )
        lines += ["", f"## {m.rows[-1]['machine']}", "", m.source(), ""]
        if any("device_us" in row for row in m.rows):
            lines += [f"![{words}](../benchmarks/results/{name}.png)" for name, words in FIGURES.items()] + [""]
            lines += ["### On the device, all shapes", "", _DEVICE, "", *device_table(m)]
            lines += ["", "### Beside the baselines", ""]
        lines += [*table(header, [_cells(m, row) for row in rows])]
    return "\n".join([*lines, ""])


def device_table(m: Measurements) -> list[str]:
    """Ours alone: a line an op and shape, a column a layout, dtype and kind of flags."""
    variants = list(itertools.product(LAYOUTS, DTYPES, (False, True)))
    cells: dict[tuple, dict[tuple, str]] = {}
    for row in m.rows:
        if row["who"] == OURS:
            line = cells.setdefault((list(OPS).index(row["op"]), row["A"], row["N"] * row["T"], row["N"]), {})
            measured = "device_us" in row
            text = f"{micro(row['device_us'])}, {percent(row['copy_fraction'])}" if measured else "failed"
            line[row["layout"], row["dtype"], row["truncated"]] = text + m.mark(row)
    shown = [v for v in variants if any(v in line for line in cells.values())]
    header = ["op, N x T", *(f"{AXES[layout]} {dtype}{' truncated' * cut}" for layout, dtype, cut in shown)]
    lines = []
    for (op, actions, steps, n), line in sorted(cells.items()):
        name = f"`{list(OPS)[op]}` {n}x{steps // n}" + f" A={actions}" * bool(actions)
        lines.append([name, *(line.get(v, "") for v in shown)])
    return table(header, lines)


def _order(row: Row) -> tuple:
    return row["A"], row["N"] * row["T"], row["N"], row["layout"], row["run"], list(SUBJECTS).index(row["who"])


def _cells(m: Measurements, row: Row) -> list[str]:
    case = f"`{row['op']}` {row['N']}x{row['T']} {row['layout']} {row['dtype']}"
    case += f" A={row['A']}" * bool(row["A"]) + " truncated" * row["truncated"] + m.mark(row)
    if "failed" in row:
        reason = " ".join(row["failed"].split()).replace("|", "/")[:120]
        return [case, row["who"], f"failed: {reason}", *[""] * 8]
    alone = f"{micro(row['single_us'])} ({micro(row['single_us_q20'])}-{micro(row['single_us_q80'])})"
    moved = f"{row['bytes'] / 1e6:.3g}"
    if row["bytes"] != row["our_bytes"]:
        moved += f" ({row['our_bytes'] / 1e6:.3g})"
    device = f"{micro(row['device_us'])} ({row['device_method']})" if "device_us" in row else ""
    who = row["who"]
    if len(row["outputs"]) < len(OPS[row["op"]].results):
        who += f" ({', '.join(row['outputs'])} alone)"
    return [
        case,
        who,
        alone,
        micro(row["amortised_us"]),
        micro(row.get("out_single_us")),
        micro(row.get("out_amortised_us")),
        device,
        moved,
        percent(row.get("copy_fraction")),
        "" if row["who"] == OURS else times(m.speedup(row)),
        f"{row['max_error']:.1e}",
    ]


def put_between(text: str, new: str) -> str:
    """README.md with its section on speed replaced. Raises ValueError where its markers are not there."""
    return pages.put_between(text, "speed", new)


def write(rows: Sequence[Row], root: Path, plots: Path) -> None:
    """README.md and docs/speed.md under `root`, the plots in `plots`."""
    gpu, cpu = (measurements(rows, cuda) for cuda in (True, False))
    page = root / "README.md"
    page.write_text(put_between(page.read_text(), readme(gpu, cpu)))
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "speed.md").write_text(full_page([m for m in (gpu, cpu) if m is not None]))
    best = gpu or cpu
    if best is not None:
        draw(best, plots)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=Path, help="default: benchmarks/results/speed.jsonl")
    args = parser.parse_args(argv)
    rows = stored("speed", args.rows)
    write(rows, ROOT, RESULTS)
    print(f"{len(rows)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
