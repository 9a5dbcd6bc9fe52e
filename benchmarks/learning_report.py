"""Plots of the stored learning curves, and the tables of docs/ppo.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.pages import rewrite
from benchmarks.plots import COLOURS
from benchmarks.provenance import commits, stored
from benchmarks.report import table, times

PHASES = ("rollout", "credit", "optimisation")
CREDITS = ("loop", "compiled_loop", "rl_triton")
PONG_GOAL = 15.0
RESAMPLES = 10_000

Row = dict[str, Any]


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of each run the last row that has results, of GPUs if the plan has any."""
    on_gpu = {row["plan"] for row in rows if row["driver"] is not None}
    chosen: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["plan"] in on_gpu and row["driver"] is None:
            continue
        key = row["plan"], row["name"]
        if "failed" not in row or key not in chosen or "failed" in chosen[key]:
            chosen.pop(key, None)
            chosen[key] = row
    return list(chosen.values())


def of_plan(rows: Sequence[Row], plan: str) -> list[Row]:
    return [row for row in rows if row["plan"] == plan and "failed" not in row]


def source(rows: Sequence[Row]) -> str:
    last = rows[-1]
    versions = f"torch {last['torch']}, Triton {last['triton']}"
    if last["driver"] is None:
        return f"{last['machine']}, {versions}, {last['date']}, {commits(rows)}."
    return f"{last['machine']}, driver {last['driver']}, {versions}, {last['date']}, {commits(rows)}."


def company(rows: Sequence[Row]) -> str:
    """How many runs there were at once, and on how many cores of the host."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        kinds.setdefault((row["parallel"], row["cores"]), []).append(row["args"]["seed"])
    return "; ".join(
        f"seed{'s' if len(set(seeds)) > 1 else ''} {', '.join(map(str, sorted(set(seeds))))}: {parallel} runs side by "
        f"side, on {cores} of the host's cores"
        for (parallel, cores), seeds in kinds.items()
    )


def bootstrap_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of mean(a) - mean(b), runs drawn anew in each group (Efron & Tibshirani 1993)."""
    generator = np.random.default_rng(0)
    means = [generator.choice(x, (RESAMPLES, len(x))).mean(axis=1) for x in (a, b)]
    low, high = np.quantile(means[0] - means[1], (0.025, 0.975))
    return float(low), float(high)


def minutes(seconds: float) -> str:
    return f"{seconds / 60.0:.1f}"


def yes(good: bool) -> str:
    return "yes" if good else "**no**"


def pong_section(rows: Sequence[Row]) -> list[str]:
    runs = of_plan(rows, "pong")
    if not runs:
        return []
    runs = sorted(runs, key=lambda row: (row["args"]["credit"], row["args"]["seed"]))
    lines = []
    for row in runs:
        scores = [score for _, score in row["curve"]]
        reached = next((steps for steps, score in row["curve"] if score >= PONG_GOAL), None)
        lines.append(
            [
                f"`{row['args']['credit']}`",
                str(row["args"]["seed"]),
                f"{row['total_steps'] / 1e6:.2f} M",
                minutes(row["seconds"]),
                f"{row['steps_per_second']:,.0f}",
                f"{row['final_return']:.1f}" if scores else "",
                "not" if reached is None else f"{reached / 1e6:.2f} M",
                f"{row['largest_difference']:.1e}",
            ]
        )
    header = ["credit", "seed", "steps", "minutes", "steps/s", "score", f"{PONG_GOAL:.0f} at", "difference"]
    text = ["### Pong", "", "![score of each run](../benchmarks/results/pong.png)", "", *table(header, lines), ""]
    text += [
        "Score: the mean of the last 100 games. Difference: the largest between the advantages and returns of the two",
        f"settings on the run's last rollout. {company(runs).capitalize()}.",
    ]
    groups = {
        credit: [row["final_return"] for row in runs if row["args"]["credit"] == credit and row["games"]]
        for credit in ("rl_triton", "loop")
    }
    if all(groups.values()):
        low, high = bootstrap_interval(*groups.values())
        difference = np.mean(groups["rl_triton"]) - np.mean(groups["loop"])
        text += [
            f"`rl_triton` less `loop`, mean final scores of {len(groups['rl_triton'])} and {len(groups['loop'])} runs: "
            f"{difference:+.2f}, 95 % bootstrap interval {low:+.2f} to {high:+.2f}, which "
            f"{'holds' if low <= 0 <= high else '**does not hold**'} 0.",
        ]
    return [*text, "", source(runs), ""]


def envs_section(rows: Sequence[Row]) -> list[str]:
    runs = of_plan(rows, "envs") + of_plan(rows, "brax")
    if not runs:
        return []
    lines = []
    for row in sorted(runs, key=lambda row: (row["args"]["env_id"], row["args"]["num_steps"])):
        x = row["results"]
        if "upright" in x:
            outcome, chance = f"upright in {x['upright']:.0%} of the last 200 steps", ""
        elif "distance" in x:
            outcome, chance = f"{x['distance']:.1f} m, falls in {x['falls']:.0%}", f"{x['random_distance']:.1f} m"
        else:
            outcome, chance = "", ""
        lines.append(
            [
                f"`{row['args']['env_id']}`",
                str(row["args"]["num_steps"]),
                str(row["updates"]),
                f"{row['updates'] * row['args']['num_steps'] * row['args']['num_envs'] / 1e6:.1f} M",
                minutes(row["seconds"]),
                f"{x['return']:.0f} ({x['random_return']:.0f})",
                outcome + (f" ({chance})" if chance else ""),
                yes(not row["failures"]),
            ]
        )
    header = ["environment", "T", "updates", "steps", "minutes", "return (random)", "outcome (random)", "solved"]
    text = ["### Environments on the device", ""]
    text += [f"![returns]({'../benchmarks/results/' + name}.png)" for name in ("cartpole", "hopper")]
    if of_plan(rows, "brax"):
        text.append("![returns](../benchmarks/results/brax.png)")
    return [*text, "", *table(header, lines), "", source(runs), ""]


def update_seconds(row: Row) -> float:
    return sum(row["phases"][phase] for phase in PHASES)


def label(row: Row) -> str:
    """Of what is compared with one another."""
    args = row["args"]
    graphs = ", CUDA graphs" if args["compile"] == "reduce-overhead" else ""
    size = f"{args['num_envs']} x {args['num_steps']}, hidden {args['hidden']}"
    return f"{args['env_id']}, {size}{graphs}"


def grouped(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By label, then by what assigns credit."""
    groups: dict[str, dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(label(row), {})[row["args"]["credit"]] = row
    return {name: {c: found[c] for c in CREDITS if c in found} for name, found in sorted(groups.items())}


def breakdown_section(rows: Sequence[Row]) -> list[str]:
    groups = grouped(of_plan(rows, "breakdown"))
    if not groups:
        return []
    lines, slower, compared = [], [], 0
    for name, found in groups.items():
        for credit, row in found.items():
            whole = update_seconds(row)
            cells = [f"{1e3 * row['phases'][phase]:.2f}" for phase in PHASES]
            share = f"{row['phases']['credit'] / whole:.1%}"
            lines.append([name, f"`{credit}`", *cells, f"{1e3 * whole:.2f}", share])
            if "rl_triton" in found and credit != "rl_triton":
                compared += 1
                ours = found["rl_triton"]["phases"]["credit"]
                if ours > row["phases"]["credit"]:
                    slower.append(f"{name}: {credit} ({times(row['phases']['credit'] / ours)})")
    header = ["update", "credit", *(f"{phase}, ms" for phase in PHASES), "update, ms", "share of credit"]
    text = ["### Where the time of an update goes", "", "![phases](../benchmarks/results/breakdown.png)", ""]
    text += [
        *table(header, lines),
        "",
        "Medians over the updates of a run, without the first ones, which compile, and over the rounds in which the",
        "ways to assign credit take turns.",
    ]
    text.append(
        f"Another way to assign credit is faster than ours in {len(slower)} of {compared} comparisons"
        f"{': ' + '; '.join(slower) if slower else ''}."
    )
    return [*text, "", source(of_plan(rows, "breakdown")), ""]


def bound(share: float, speedup: float) -> float:
    """Amdahl 1967: how many times faster the whole gets where `share` of it is made `speedup` times faster."""
    return 1.0 / (1.0 - share * (1.0 - 1.0 / speedup))


def amdahl_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, found in grouped(of_plan(rows, "amdahl") + of_plan(rows, "breakdown")).items():
        ours = found.get("rl_triton")
        for credit, row in found.items():
            if ours is None or credit == "rl_triton":
                continue
            share = row["phases"]["credit"] / update_seconds(row)
            speedup = row["phases"]["credit"] / ours["phases"]["credit"]
            others, our_others = (update_seconds(x) - x["phases"]["credit"] for x in (row, ours))
            lines.append(
                [
                    name,
                    f"`{credit}`",
                    f"{1e3 * update_seconds(row):.1f}",
                    f"{share:.1%}",
                    f"{ours['phases']['credit'] / update_seconds(ours):.2%}",
                    times(speedup),
                    f"{update_seconds(row) / update_seconds(ours):.3f}x",
                    f"{others / our_others:.3f}x",
                    f"{bound(share, speedup):.3f}x",
                ]
            )
    if not lines:
        return []
    header = [
        "update",
        "instead of",
        "update, ms",
        "share before",
        "share after",
        "credit faster",
        "update faster",
        "other phases faster",
        "Amdahl",
    ]
    text = ["### What it is worth", "", *table(header, lines), ""]
    text.append(
        "Faster: how many times with `rl_triton`, measured. What assigns credit does not touch the other phases: where "
        "they differ from 1, a shared host did, and the update's figure is off by as much. Amdahl: what the formula "
        "gives for the whole update, from the shares alone."
    )
    return [*text, "", source(of_plan(rows, "amdahl") or of_plan(rows, "breakdown")), ""]


def impala_section(rows: Sequence[Row]) -> list[str]:
    runs = of_plan(rows, "impala")
    if not runs:
        return []
    lines = [
        [
            row["args"]["kind"],
            str(row["args"]["seed"]),
            f"{row['final_return']:.0f}",
            f"{row['largest_ratio']:.3g}",
            f"{row['seconds']:.0f}",
            f"{row['share']:.1%}",
        ]
        for row in sorted(runs, key=lambda row: (row["args"]["kind"], row["args"]["seed"]))
    ]
    args = runs[-1]["args"]
    header = [
        "",
        "seed",
        "return",
        "largest ratio of the policies",
        "seconds",
        "share of credit in the learner's update",
    ]
    text = ["### Actors that lag", "", "![returns](../benchmarks/results/impala.png)", ""]
    text += [
        *table(header, lines),
        "",
        f"{args['env_id']}, actors {args['lag']} updates behind the learner, {args['total_timesteps']:,} steps a run.",
        "Return: the mean of the last 100 episodes. `corrected` is V-trace; `uncorrected` takes the trajectories for",
        "the learner's own.",
    ]
    return [*text, "", source(runs), ""]


def failed_section(rows: Sequence[Row]) -> list[str]:
    failed = [row["name"] for row in rows if "failed" in row]
    return [f"Runs without results: {', '.join(failed)}.", ""] if failed else []


def tables(rows: Sequence[Row]) -> str:
    rows = latest(rows)
    sections = (pong_section, envs_section, impala_section, breakdown_section, amdahl_section, failed_section)
    lines = [line for section in sections for line in section(rows)]
    return "\n".join(lines).rstrip() or "Nothing has been measured yet."


def _curves(rows: Sequence[Row], name_of, title: str, ylabel: str, path: Path, goal: float | None = None) -> None:
    if not any(row["curve"] for row in rows):
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    names = list(dict.fromkeys(map(name_of, rows)))
    for row in rows:
        name = name_of(row)
        steps, returns = np.transpose(row["curve"]) if row["curve"] else ([], [])
        axes.plot(np.divide(steps, 1e6), returns, color=COLOURS[names.index(name)], linewidth=1, label=name)
    if goal is not None:
        axes.axhline(goal, color="black", linewidth=0.8, linestyle="--")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=8)
    axes.set(title=title, xlabel="environment steps, millions", ylabel=ylabel)
    axes.grid(linewidth=0.3)
    _save(figure, rows, path)


def _save(figure: plt.Figure, rows: Sequence[Row], path: Path) -> None:
    figure.supxlabel(source(rows), fontsize=6, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _breakdown(rows: Sequence[Row], path: Path) -> None:
    groups = grouped(rows)
    if not groups:
        return
    bars = [(name, credit, row) for name, found in groups.items() for credit, row in found.items()]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.28 * len(bars)), layout="constrained")
    left = np.zeros(len(bars))
    for phase, colour in zip(PHASES, COLOURS, strict=False):
        widths = np.array([1e3 * row["phases"][phase] for *_, row in bars])
        axes.barh(range(len(bars)), widths, left=left, color=colour, label=phase)
        left += widths
    axes.set_yticks(range(len(bars)), [f"{name}: {credit.replace('_', ' ')}" for name, credit, _ in bars], fontsize=6)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds an update, medians", title="Where the time of an update goes")
    axes.legend(fontsize=8)
    _save(figure, rows, path)


def draw(rows: Sequence[Row], folder: Path) -> None:
    """pong, cartpole, hopper, brax, impala and breakdown .png, each where there are rows for it."""
    rows = latest(rows)
    folder.mkdir(parents=True, exist_ok=True)
    runs = of_plan(rows, "pong")
    _curves(runs, lambda r: r["args"]["credit"], "PPO on Pong, a line a seed", "score, mean of 100 games",
            folder / "pong.png", PONG_GOAL)  # fmt: skip
    for task, env_id in (("cartpole", "cartpole-swingup"), ("hopper", "hopper"), ("brax", "brax-")):
        runs = [r for r in of_plan(rows, "envs") + of_plan(rows, "brax") if r["args"]["env_id"].startswith(env_id)]
        runs.sort(key=lambda row: row["args"]["num_steps"])
        if runs:
            _curves(runs, lambda r: f"T = {r['args']['num_steps']}", f"PPO on {runs[0]['args']['env_id']}",
                    "return of finished episodes", folder / f"{task}.png")  # fmt: skip
    runs = of_plan(rows, "impala")
    _curves(runs, lambda r: r["args"]["kind"], "Actors that lag behind the learner, a line a seed",
            "return, mean of 100 episodes", folder / "impala.png")  # fmt: skip
    _breakdown(of_plan(rows, "breakdown"), folder / "breakdown.png")


def write(root: Path, results: Path) -> None:
    """The tables of docs/ppo.md under `root`, and the plots beside the rows."""
    rows = stored("learning", results / "learning.jsonl")
    rewrite(root / "docs" / "ppo.md", "learning", tables(rows))
    draw(rows, results)
    print(f"{len(rows)} rows")
