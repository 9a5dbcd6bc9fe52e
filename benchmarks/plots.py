"""The three figures of the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.baselines import OURS, SUBJECTS
from benchmarks.cases import LAYOUTS, OPS, RATIO_SHAPES

if TYPE_CHECKING:
    from benchmarks.report import Measurements

# Okabe & Ito's palette, told apart by every kind of colour vision; beyond its eight, the marker tells.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
AXES = {"NT": "[N, T]", "TN": "[T, N]"}

Row = dict[str, Any]


def _style(names: list[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(names)
    }


def _plain(m: Measurements) -> Iterator[Row]:
    for row in m.rows:
        if "failed" not in row and row["dtype"] == "float32" and not row["truncated"]:
            yield row


def _save(figure: plt.Figure, m: Measurements, path: Path) -> None:
    figure.supxlabel(m.source(marked=False), fontsize=7, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plain_numbers(axis: Any, between: tuple[float, ...] = (2.0, 5.0)) -> None:
    """Of a logarithmic axis: 1, 10 and so on, and what is between, in full."""
    axis.set_major_locator(LogLocator(subs=(1.0, *between)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _speedup(m: Measurements, path: Path) -> None:
    """gae against each baseline, by shape."""
    rows = [row for row in _plain(m) if row["op"] == "gae" and row["who"] != OURS and m.speedup(row) is not None]
    if not rows:
        return
    style = _style([name for name in SUBJECTS if any(row["who"] == name for row in rows)])
    shapes = sorted({(row["N"] * row["T"], row["N"], row["T"]) for row in rows if row["who"] != "pufferlib"})
    figure, panels = plt.subplots(1, 2, figsize=(max(10, 1.0 * len(shapes) + 4), 5), sharey=True, layout="constrained")
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        for name, look in style.items():
            chosen = {
                (r["N"] * r["T"], r["N"], r["T"]): m.speedup(r)
                for r in rows
                if r["who"] == name and r["layout"] == layout
            }
            points = [(i, chosen[shape]) for i, shape in enumerate(shapes) if shape in chosen]
            if points:
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), linewidth=1, **look)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)
        axes.set_xticks(range(len(shapes)), [f"{n}x{t}" for _, n, t in shapes], rotation=45, ha="right")
        axes.set(title=f"gae, {AXES[layout]}", xlabel="rows x steps")
        axes.grid(axis="y", which="both", linewidth=0.3)
    panels[0].set_ylabel("time of the baseline / ours\n(full call, back to back)")
    handles, labels = [], []
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    _save(figure, m, path)


def _bandwidth(m: Measurements, path: Path) -> None:
    """Our kernels beside a copy, by traffic."""
    rows = [row for row in _plain(m) if row["who"] == OURS and "copy_fraction" in row]
    if not rows:
        return
    style = _style([op for op in OPS if any(row["op"] == op for row in rows)])
    figure, panels = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        for op, look in style.items():
            points = sorted(
                (r["bytes"] / 1e6, 100 * r["copy_fraction"]) for r in rows if (r["op"], r["layout"]) == (op, layout)
            )
            if points:
                axes.plot(*zip(*points, strict=True), label=op, linestyle="none", markersize=5, alpha=0.85, **look)
        axes.axhline(100, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis, between=(3.0,))
        axes.set_ylim(bottom=0)
        axes.set(title=AXES[layout], xlabel="bytes moved, MB")
        axes.grid(which="both", linewidth=0.3)
    panels[0].set_ylabel("speed relative to a copy of as many bytes, %")
    handles, labels = panels[0].get_legend_handles_labels()
    if not labels:
        handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    _save(figure, m, path)


def _host_device(m: Measurements, path: Path) -> None:
    """What of a call is the host's and what the device's."""
    shapes = [str(shape) for shape in RATIO_SHAPES]
    actions = {0, *(shape.actions for shape in RATIO_SHAPES)}
    rows = [row for row in _plain(m) if row["who"] == OURS and row["layout"] == "NT" and row["A"] in actions]
    known = {f"{row['N']}x{row['T']}" for row in rows}
    shapes = [shape for shape in shapes if shape in known] or sorted(known)[:2]
    if not shapes:
        return
    kinds = {
        "call, alone": "single_us",
        "call, back to back": "amortised_us",
        "back to back, out=": "out_amortised_us",
        "device": "device_us",
        "torch.add, back to back": "floor_amortised_us",
    }
    style = _style(list(kinds))
    figure, panels = plt.subplots(1, len(shapes), figsize=(11, 5), sharey=True, layout="constrained", squeeze=False)
    ops = list(OPS)[::-1]
    for axes, shape in zip(panels[0], shapes, strict=True):
        of_op = {row["op"]: row for row in rows if f"{row['N']}x{row['T']}" == shape}
        for label, column in kinds.items():
            points = [(of_op[op][column], i) for i, op in enumerate(ops) if column in of_op.get(op, {})]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, linestyle="none", markersize=7, **style[label])
        _log_microseconds(axes, ops)
        axes.set_title(f"[N, T], {shape}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=len(kinds))
    _save(figure, m, path)


def _log_microseconds(axes: Axes, ops: list[str]) -> None:
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(ops)), ops)
    axes.set_xlabel("microseconds a call")
    axes.grid(which="both", linewidth=0.3)


def draw(m: Measurements, folder: Path) -> None:
    """speedup.png, bandwidth.png and host_device.png, each where there are rows for it."""
    folder.mkdir(parents=True, exist_ok=True)
    _speedup(m, folder / "speedup.png")
    _bandwidth(m, folder / "bandwidth.png")
    _host_device(m, folder / "host_device.png")
