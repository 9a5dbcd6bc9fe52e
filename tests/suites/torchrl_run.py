"""Run TorchRL's own tests without rl_triton, with its loops served, and with its vectorised forms served.

    git clone https://github.com/pytorch/rl
    python tests/suites/torchrl_run.py --tests rl/test --source TAG_OR_COMMIT    # about an hour on two cores

Each part of the suite runs three times, in processes of their own. Reports stay in --work, so that parts can
run one at a time; those that have all three are merged into tests/suites/torchrl.json and the table of docs/torchrl.md.
Fails while parts are missing, if a test that passes without rl_triton does not pass with it, if a call was neither
served nor handed back for a reason in EXPECTED, or if such a reason came up another number of times.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAMILIES = ("none", "loop", "vec")
PARTS = {
    "functions and estimators": ["objectives/test_values.py"],
    "under torch.compile": ["compile/test_compile_value.py"],
    "PPO, A2C, REINFORCE": ["objectives/test_ppo.py"],
    "MAPPO, IPPO": ["objectives/test_mappo.py"],
    "loss modules": ["objectives/test_loss_module.py"],
    "Dreamer": [  # no other test of the file calls a value function
        f"objectives/test_dreamer.py::TestDreamer::test_dreamer_{test}"
        for test in ("actor", "actor_tensordict_keys", "value")
    ],
    "DreamerV3": [  # likewise, of those that run without omegaconf: two do not
        f"objectives/test_dreamer_v3.py::TestDreamerV3::test_dreamer_v3_{test}"
        for test in (
            "actor_loss",
            "actor_loss_reinforce",
            "categorical_value_exposes_decoded_value",
            "continuation_lambda_and_weights",
            "reinforce_return_normalization",
            "replay_value_loss_nested_keys",
            "replay_value_target",
            "return_statistics_checkpoint",
            "slow_critic_checkpoint_and_online_bootstrap",
            "slow_critic_regularization_and_update",
            "value_loss_symlog_mse",
            "value_loss_sync_gamma",
            "value_loss_two_hot",
        )
    ],
    "rewards to go": ["transforms/test_reward_transforms.py::TestReward2Go", "test_postprocs.py::TestDensifyReward"],
}
# Tests of what is no longer so, with the reason; named from the root of TorchRL's sources, where its pytest.ini is.
_COMPILE = "test/compile/test_compile_value.py::TestValueFunctionCompile::test_vec_{}_estimate_fails_fullgraph"
DESELECTED = {
    _COMPILE.format(name): "asserts that the vectorised form cannot be compiled whole"
    for name in ("td_lambda_return", "generalized_advantage")
}
_ROLLING = "rolling_gamma=False"
_MISFIT = "arguments that rl_triton does not know"
_TRACED = "torch.compile traces the framework's own code (counted once a trace)"
# Calls that go to TorchRL's own code, as often as each reason comes up: by part, family and function.
EXPECTED: dict[str, dict[str, dict[str, dict[str, int]]]] = {
    "functions and estimators": {
        "loop": {
            "value.functional.td_lambda_return_estimate": {_ROLLING: 42},
            "value.functional.td1_return_estimate": {_ROLLING: 8},
        },
        "vec": {
            "value.functional.vec_generalized_advantage_estimate": {_MISFIT: 1},
            "value.functional.vec_td_lambda_return_estimate": {_ROLLING: 38},
            "value.functional.vec_td1_return_estimate": {_ROLLING: 8},
        },
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, required=True, help="the folder `test` of TorchRL's sources")
    parser.add_argument("--source", required=True, help="the tag or commit that it is from")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "torchrl_suite")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        for family in args.families:
            _run(args, part, family)
    missing = [
        f"{part} ({family})" for part in PARTS for family in FAMILIES if not _report(args, part, family).exists()
    ]
    merged, problems = _merge(args)
    (HERE / "torchrl.json").write_text(json.dumps(merged, indent=1) + "\n")
    write_table(merged)
    if missing:
        problems.append(f"still to run: {', '.join(missing)}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _report(args: argparse.Namespace, part: str, family: str) -> Path:
    return args.work / f"{re.sub('[^a-z0-9]+', '_', part.lower())}-{family}.json"


def _run(args: argparse.Namespace, part: str, family: str) -> None:
    report = _report(args, part, family)
    report.unlink(missing_ok=True)
    code = digest()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rl_triton_torchrl_suite", "-p", "no:cacheprovider"]
    command += [f"--deselect={test}" for test in DESELECTED]
    command += ["--rlt-family", family, "--rlt-report", str(report.resolve()), *PARTS[part]]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            command, cwd=args.tests, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
        )
    if not report.exists():
        raise SystemExit(f"{part} ({family}) did not run: see {log}")
    report.write_text(json.dumps(json.loads(report.read_text()) | {"adapters": code}, indent=1))
    print(f"{part} ({family}): {log.read_text().strip().splitlines()[-1]}", flush=True)


def _merge(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    parts: dict[str, Any] = {}
    problems: list[str] = []
    code = digest()
    for part, selected in PARTS.items():
        if not all(_report(args, part, family).exists() for family in FAMILIES):
            continue
        reports = {family: json.loads(_report(args, part, family).read_text()) for family in FAMILIES}
        stock = reports["none"]["outcomes"]
        problems += [
            f"{part} ({family}) ran with other code of the adapter; run it again"
            for family, report in reports.items()
            if family != "none" and report["adapters"] != code
        ]
        runs = {}
        for family, report in reports.items():
            outcomes = report["outcomes"]
            worse = [test for test, outcome in stock.items() if outcome == "passed" != outcomes.get(test)]
            problems += [f"{part} ({family}): {test} passes without rl_triton only" for test in worse]
            functions = {
                label.removeprefix("torchrl.objectives."): entry for label, entry in report["functions"].items()
            }
            problems += _problems(f"{part} ({family})", functions, EXPECTED.get(part, {}).get(family, {}))
            runs[family] = {
                "collected": len(outcomes),
                **{kind: Counter(outcomes.values())[kind] for kind in ("passed", "failed", "skipped")},
                "failed_tests": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
                "skipped_for": report["skipped"],
                "functions": {
                    label: entry for label, entry in functions.items() if entry["calls"] or entry["fallen_back"]
                },
            }
        parts[part] = {"tests": selected, "deselected": _deselected(selected), "runs": runs}
    packages = ("torchrl", "tensordict", "torch", "numba", "gymnasium")
    return {
        "source": args.source,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "adapters": code,
        "expected_fallbacks": EXPECTED,
        "not_run": [part for part in PARTS if part not in parts],
        "parts": parts,
    }, problems


def _deselected(selected: list[str]) -> dict[str, str]:
    return {
        test: reason for test, reason in DESELECTED.items() if any(test.startswith(f"test/{path}") for path in selected)
    }


def _problems(run: str, functions: dict[str, Any], expected: dict[str, dict[str, int]]) -> list[str]:
    problems = []
    for label, entry in functions.items():
        fallen_back = {reason: n for reason, n in entry["fallen_back"].items() if reason != _TRACED}
        if fallen_back != expected.get(label, {}):
            problems.append(f"{run}: {label} fell back {fallen_back}, expected {expected.get(label, {})}")
        if entry["served"] != entry["calls"] - sum(fallen_back.values()):
            problems.append(f"{run}: {label} served {entry['served']} of {entry['calls']} calls")
    problems += [
        f"{run}: {label} is expected to fall back, but was not called" for label in expected.keys() - functions
    ]
    return problems


def digest() -> str:
    """Of the adapter's code, so that a record tells which code it is about."""
    files = [ROOT / "adapters" / "_functions.py", *sorted((ROOT / "adapters" / "torchrl").glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def table(merged: dict[str, Any]) -> str:
    """The record as the docs show it."""
    lines = [
        "| tests | stock | loops served | vectorised served | calls served, of |",
        "|---|---|---|---|---|",
    ]
    totals: Counter[str] = Counter()
    for part, entry in merged["parts"].items():
        cells = []
        served = calls = 0
        for family, run in entry["runs"].items():
            text = f"{run['passed']} passed"
            text += "".join(f", {run[kind]} {kind}" for kind in ("failed", "skipped") if run[kind])
            cells.append(text)
            totals[family] += run["passed"]
            served += sum(counts["served"] for counts in run["functions"].values())
            calls += sum(counts["calls"] for counts in run["functions"].values())
        totals["served"] += served
        totals["calls"] += calls
        lines.append(f"| {part} | {' | '.join(cells)} | {served}, {calls} |")
    passed = " | ".join(f"{totals[family]} passed" for family in FAMILIES)
    lines.append(f"| all | {passed} | {totals['served']}, {totals['calls']} |")
    versions = ", ".join(f"{name} {version}" for name, version in merged["packages"].items())
    lines += ["", f"Tests of TorchRL's {merged['source']}, run on {merged['date']} with {versions}."]
    if merged["not_run"]:
        lines.append(f"Not run with this state of the adapter: {', '.join(merged['not_run'])}.")
    return "\n".join(lines)


def write_table(merged: dict[str, Any]) -> None:
    page = ROOT / "docs" / "torchrl.md"
    begin, end = "<!-- suites:begin -->\n", "<!-- suites:end -->"
    head, _, rest = page.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}{table(merged)}\n{end}{tail}")


if __name__ == "__main__":
    raise SystemExit(main())
