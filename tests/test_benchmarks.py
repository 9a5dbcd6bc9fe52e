"""The benchmark program on small shapes: that it measures the right thing, not how fast that is."""

import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm", reason="the bench extra is not installed")
pytest.importorskip("matplotlib", reason="the bench extra is not installed")

import rl_triton
from benchmarks import ahead, backward, check, learning, learning_report, run, timing
from benchmarks.baselines import OURS, SUBJECTS, Prepared, loops, scans
from benchmarks.cases import OPS, TIERS, Case, Shape, bytes_read, make_window, parse_shape, tensors
from benchmarks.gate import Gate, GateError
from benchmarks.provenance import digest
from benchmarks.report import BEGIN, END, measurements, put_between, write
from rl_triton import reference
from rl_triton.testing import assert_close

pytestmark = pytest.mark.cpu_only

CASES = [
    Case(op, layout, Shape(5, 37), "float32", truncated)
    for op in OPS.values()
    for layout in ("NT", "TN")
    for truncated in (False, True)[: 1 + op.truncates]
]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """The program chooses where compilers keep their caches; not for the tests that come after these."""
    for name in run.CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def arguments(case, seed=0):
    """With more ends than the benchmark has, so that a small window has some."""
    window = make_window(case, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    for name in ("terminated", "truncated"):
        if name in window:
            window[name] = torch.rand(window[name].shape, generator=generator) < 0.15
    return case.op.arguments(window)


def expected(case, given):
    if case.op.name == "normalize_advantages":
        x = given["advantages"].double()
        return ((x - x.mean()) / x.std(),)
    return tensors(getattr(reference, case.op.name)(**given, time_dim=case.time_dim))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vectorised_scan_agrees_with_the_reference(case):
    given = arguments(case)
    results = tensors(scans.SCANS[case.op.name](**given, dim=case.time_dim))
    for name, x, y in zip(case.op.results, results, expected(case, given), strict=True):
        assert x.dtype == torch.float32
        assert_close(x, y, max_error=1e-5, name=name)


@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_loop_agrees_with_the_reference(layout):
    case = Case(OPS["gae"], layout, Shape(5, 37))
    given = arguments(case)
    dones = given["terminated"].float()
    rest = {k: x for k, x in given.items() if k != "terminated"}
    for x, y in zip(loops.loop(**rest, dones=dones, time_dim=case.time_dim), expected(case, given), strict=True):
        assert_close(x, y, max_error=1e-5)


@pytest.mark.parametrize("op", backward.OPS)
def test_gradients_are_checked_timed_and_tabled(op, tmp_path, monkeypatch):
    monkeypatch.setattr(backward, "OPS", (op,))
    monkeypatch.setattr(backward, "WHO", {who: backward.WHO[who] for who in ("rl_triton", "eager loop")})
    rows = list(backward.measure("cpu", ((3, 5),), 0.001))
    assert [(row["op"], row["who"], row["N"], row["T"]) for row in rows] == [
        (op, "rl_triton", 3, 5), (op, "eager loop", 3, 5)
    ]  # fmt: skip
    n_weights = 2 if op == "gae" else 1
    assert rows[0]["bytes"] == 4 * (15 * (n_weights + 2) + 3) + 15
    monkeypatch.setattr(backward, "stored", lambda name: rows)
    assert backward.table().count(f"| {op} | 3 x 5 |") == 2
    backward.check(op, backward._scan(op), "cpu")

    def wrong(rewards, *rest):
        return backward._loop(op)(1.001 * rewards, *rest)

    with pytest.raises(AssertionError):
        backward.check(op, wrong, "cpu")


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("layout", ["NT", "TN"])
@pytest.mark.parametrize("name", [OURS, "eager_loop", "torchrl_loop", "torchrl_vectorized", "jax_scan",
                                  "jax_associative_scan", "sb3", "sb3_patched"])  # fmt: skip
def test_subjects_pass_the_gate(name, layout, truncated):
    subject, case = SUBJECTS[name], Case(OPS["gae"], layout, Shape(5, 37), "float32", truncated)
    if not subject.serves(case, "cpu"):
        pytest.skip(f"{name} does not serve {case}")
    if subject.unusable("cpu"):
        pytest.skip(subject.unusable("cpu"))
    given = arguments(case)
    prepared = subject.prepare(case, [given])
    with prepared.scope():
        assert Gate(case, given).check(prepared)["max_error"] < 1e-4


def test_pufferlib_s_convention(monkeypatch):
    """Its kernel stores a transition's reward and flag one step later; a stand-in for it meets the expectation."""
    from benchmarks.baselines import pufferlib

    def stand_in(rewards, values, dones, importance, gamma, lambda_, out):
        last = torch.zeros(len(rewards))
        for t in reversed(range(rewards.shape[1] - 1)):
            going_on = 1 - dones[:, t + 1]
            delta = rewards[:, t + 1] + gamma * values[:, t + 1] * going_on - values[:, t]
            out[:, t] = last = delta + gamma * lambda_ * going_on * last
        return out

    monkeypatch.setattr(pufferlib, "advantages", stand_in)
    case = Case(OPS["gae"], "NT", Shape(5, 37))
    given = arguments(case)
    prepared = SUBJECTS["pufferlib"].prepare(case, [given])
    assert prepared.outputs == ("advantages",)
    Gate(case, given).check(prepared)


def test_one_shape_end_to_end(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "8x16", "--row-seconds", "0.005", "--out", str(out)]
    assert run.main([*options, "--baselines", "--ops", "gae", "affine_scan", "normalize_advantages"]) == 0
    rows = read(out)
    assert [(r["op"], r["layout"]) for r in rows] == [
        (op, layout) for op in ("gae", "affine_scan", "normalize_advantages") for layout in ("NT", "TN")
    ]
    for row in rows:
        assert row["gate"] == "passed", row
        assert row["single_us_q20"] <= row["single_us"] <= row["single_us_q80"]
        assert row["amortised_us"] > 0
        assert row["floor_single_us"] > 0
        assert row["copy_us"] > 0
        assert ("out_single_us" in row) == OPS[row["op"]].has_out
        assert row["digest"] == digest()
    assert rows[0]["bytes"] == 8 * 16 * (4 + 4 + 1 + 8) + 8 * 4
    assert "6 rows, 0 without a result, 0 wrong" in capsys.readouterr().out


def test_stored_rows_are_skipped_and_ours_stands_beside_a_new_baseline(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "4x6", "--ops", "gae", "--layouts", "NT", "--row-seconds", "0.002"]
    options += ["--out", str(out)]
    assert run.main([*options, "--baselines"]) == 0
    assert run.main([*options, "--baselines"]) == 0
    assert [row["who"] for row in read(out)] == [OURS]
    assert run.main([*options, "--baselines", "eager_loop"]) == 0
    rows = read(out)
    assert [row["who"] for row in rows] == [OURS, OURS, "eager_loop"]
    assert rows[1]["run"] == rows[2]["run"]
    assert run.main([*options, "--baselines", "--again"]) == 0
    assert len(read(out)) == 4


def test_compiling_ahead(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "4x6", "--ops", "affine_scan", "--layouts", "NT", "--baselines"]
    assert run.main([*options, "--row-seconds", "0.002", "--out", str(out), "--compile-ahead", "1"]) == 0
    assert "compiled 1 of 1 ahead" in capsys.readouterr().out
    assert len(read(out)) == 1


def test_ours_and_what_is_compiled_is_compiled_ahead():
    case = Case(OPS["gae"], "TN", Shape(4, 6), "bfloat16", True)
    subjects = [SUBJECTS[name] for name in (OURS, "compiled_scan", "eager_loop")]
    tasks = ahead.tasks_of([(case, subjects)], "cpu")
    assert [who for _, who, _ in tasks] == [OURS, "compiled_scan"]
    assert ahead.case_of(tasks[0][0]) == case
    assert ahead.compile_ahead(tasks, 1, time.monotonic()) == 0


def test_no_budget_measures_nothing_and_is_no_failure(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "4x6", "--baselines", "--out", str(out)]
    assert run.main([*options, "--budget", "0"]) == 0
    assert not out.exists()
    assert "run again for the rest" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", ["value", "nan", "out"])
def test_a_wrong_result_is_stored_as_failed(tmp_path, monkeypatch, spoil):
    import rl_triton

    right = rl_triton.gae

    def wrong(*args, out=None, **kwargs):
        result = right(*args, out=out, **kwargs)
        if spoil == "out" and out is None:
            return result
        result.returns[0, 3] += float("nan") if spoil == "nan" else 0.1
        return result

    monkeypatch.setattr(rl_triton, "gae", wrong)
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "4x6", "--ops", "gae", "--layouts", "NT", "--out", str(out)]
    assert run.main([*options, "--baselines"]) == 1
    (row,) = read(out)
    assert row["gate"] == "failed"
    assert "returns" in row["failed"]
    assert "single_us" not in row


def test_the_gate_of_long_windows_sees_one_wrong_step():
    case = Case(OPS["discounted_returns"], "TN", Shape(3, 9000))
    given = arguments(case)
    gate = Gate(case, given)
    assert gate.against == "float64 scan"
    prepared = SUBJECTS[OURS].prepare(case, [given])
    gate.check(prepared)

    def spoilt():
        result = prepared.calls[0]().clone()
        result[4321, 1] += 0.5
        return result

    with pytest.raises(GateError, match="returns: error"):
        gate.check(Prepared([spoilt], prepared.outputs, prepared.bytes_moved))


def test_a_baseline_that_raises_is_a_row_without_times(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(loops, "loop", broken)
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--shapes", "4x6", "--ops", "gae", "--layouts", "NT", "--row-seconds", "0.002"]
    assert run.main([*options, "--baselines", "eager_loop", "--out", str(out)]) == 0
    assert read(out)[1]["failed"] == "RuntimeError: no compiler"


def test_time_limit_is_not_swallowed():
    def swallow():
        with run.time_limit(0.05):
            while True:
                with contextlib.suppress(Exception):
                    sum(range(1000))

    with pytest.raises(run.OutOfTime):
        swallow()


def test_tiers():
    assert len(TIERS["pufferlib"].shapes) == 40
    assert len(list(TIERS["headline"].cases())) == 10 * 4 * 2
    assert {(s.actions, s.steps) for s in TIERS["retrace"].shapes} == {
        (a, t) for a in (4, 18, 64) for t in (128, 1024, 4096, 8192)
    }
    for tier in TIERS.values():
        assert set(tier.baselines) <= set(SUBJECTS)
    assert parse_shape("16x8x18") == Shape(16, 8, 18)
    with pytest.raises(ValueError, match="ROWSxSTEPS"):
        parse_shape("16")


def test_bootstrap_values_count_by_sectors_read():
    given = {
        "terminated": torch.zeros(2, 16, dtype=torch.bool),
        "truncated": torch.zeros(2, 16, dtype=torch.bool),
        "bootstrap_values": torch.zeros(2, 16),
    }
    assert bytes_read(given) == 64
    given["truncated"][0, 3] = given["truncated"][0, 4] = given["truncated"][1, 15] = True
    assert bytes_read(given) == 64 + 2 * 32


def test_rotation_and_quantiles():
    seen = []
    rotation = timing.Rotation([lambda k=k: seen.append(k) for k in range(3)])
    for _ in range(6):
        rotation()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    times = timing.summary([float(k) for k in range(11)])
    assert (times.low, times.median, times.high) == (2.0, 5.0, 8.0)


def test_a_copy_is_of_whole_pages_and_beyond_the_largest_in_proportion(monkeypatch):
    """PyTorch copies other sizes more slowly, which would flatter what is held against them."""
    seen = []

    def clock(calls, wait, seconds):
        seen.append(calls[0]().nbytes)  # what is written, and read
        return timing.summary([10.0])

    monkeypatch.setattr(timing, "amortised", clock)
    monkeypatch.setattr(timing, "LARGEST_COPY", 1 << 20)
    machine = timing.Machine("cpu", 0.01)
    for n_bytes in (0, 2, 2 * timing.PAGE):
        assert machine.copy_us(n_bytes) == 10.0
    assert machine.copy_us(2 * timing.PAGE + 2) == 10.0
    assert machine.copy_us(1 << 20) == 10.0
    assert machine.copy_us(3 << 20) == 30.0
    assert seen == [timing.PAGE, 2 * timing.PAGE, 1 << 19]


def test_regression_check_compares_with_the_slowest_of_the_stored_runs():
    recorded = [{"op": "gae", "gb_s": [1000.0, 900.0, 950.0]}]
    assert check.compare({"gae": 811.0}, recorded)[1]
    lines, good = check.compare({"gae": 809.0, "vtrace": 1.0}, recorded)
    assert not good
    assert "TOO SLOW" in lines[1]
    assert "none" in lines[2]


def fabricated(machine="Some GPU", code=None):
    rows = []
    where = {
        "machine": machine, "driver": "1", "torch": "2", "triton": "3", "commit": "abc1234", "date": "2026-01-01",
        "digest": code or digest(), "run": "1",
    }  # fmt: skip
    for shape in TIERS["headline"].shapes:
        for op, layout in ((op, layout) for op in OPS for layout in ("NT", "TN")):
            case = Case(OPS[op], layout, shape)
            us = 5 + case.shape.rows * case.shape.steps / 1e6
            names = [OURS, *TIERS["headline"].baselines] if op == "gae" else [OURS, "compiled_scan"]
            for k, who in enumerate(names):
                row = {**case.key, "who": who, "outputs": list(case.op.results), "gate": "passed", "max_error": 1e-6}
                scale = 1 if who == OURS else 0.5 * 3**k
                columns = {"single": 15 * scale, "amortised": us * scale, "device": us * scale}
                row |= {f"{name}_us{q}": x for name, x in columns.items() for q in ("", "_q20", "_q80")}
                row |= {"out_single_us": 12.0, "out_amortised_us": us - 2} if who in (OURS, "pufferlib") else {}
                row |= {"device_method": "graph", "copy_fraction": 0.8, "floor_amortised_us": 7.0}
                row |= {"bytes": 17 * shape.rows * shape.steps, "our_bytes": 17 * shape.rows * shape.steps}
                rows.append(row | where)
    failed = {"who": "compiled_scan", "failed": "no compiler | here", "truncated": True, "gate_against": "reference"}
    alone = Case(OPS["retrace"], "TN", Shape(64, 32, 18), "bfloat16", truncated=True).key
    alone |= {"who": OURS, "device_us": 4.25, "copy_fraction": 0.5, **where}
    return [*rows, alone, {**Case(OPS["gae"], "NT", Shape(8, 16)).key, **failed, **where}]


def test_report(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(fabricated(), tmp_path, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "the code as it stands" in text
    assert "| `gae` 4096x128 |" in text
    assert "Faster than ours in 0 of" in text
    assert "on the device ours is faster in 8 of 8 shapes" in text
    page = (tmp_path / "docs" / "speed.md").read_text()
    assert "failed: no compiler / here" in page
    assert "| [T, N] float32 | [T, N] bfloat16 truncated |" in page
    assert "| `retrace` 64x32 A=18 |  |  | 4.25, 50 % |" in page
    for name in ("speedup", "bandwidth", "host_device"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_report_of_earlier_code_and_of_nothing(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}{END}")
    write(fabricated(code="0" * 16), tmp_path, tmp_path)
    assert "earlier code, commit abc1234" in page.read_text()
    write([], tmp_path, tmp_path)
    assert "No speed has been measured" in page.read_text()
    with pytest.raises(ValueError, match="speed:begin"):
        put_between("nothing here", "x")


def test_times_of_different_runs_are_not_compared():
    rows = fabricated()
    peer = next(row for row in rows if row["who"] == "eager_loop")
    assert measurements(rows, cuda=True).speedup(peer) == pytest.approx(1.5)
    peer["run"] = "2"
    assert measurements(rows, cuda=True).speedup(peer) is None


def learning_rows():
    """As the programs would store them, of a GPU that there is not."""
    where = {"machine": "Test GPU", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01", "commit": "abc"}
    phases = {"rollout": 0.05, "credit": 0.001, "optimisation": 0.04}
    yield {"plan": "pong", "name": "pong-loop-1", "failed": "exit 1", "log": ""} | where
    for credit, scores in (("rl_triton", (18.0, 19.0, 20.0)), ("loop", (18.5, 19.0, 19.5))):
        for seed, score in enumerate(scores, 1):
            row = {"plan": "pong", "name": f"pong-{credit}-{seed}", "args": {"credit": credit, "seed": seed}}
            row |= {"total_steps": 3_000_000, "seconds": 500.0, "steps_per_second": 6000.0, "cores": 24, "games": 900}
            row |= {"parallel": 6}
            row |= {"final_return": score, "largest_difference": 4e-7, "phases": phases}
            yield row | {"curve": [[1e6, -21.0], [2e6, 15.5], [3e6, score]]} | where
    given = {"num_envs": 4096, "hidden": 128, "compile": "none", "credit": "rl_triton"}
    for env_id, results, failures in (
        ("cartpole-swingup", {"upright": 0.95, "return": 300.0, "random_return": 20.0}, []),
        ("hopper", {"distance": 3.0, "falls": 0.5, "random_distance": 0.4, "return": 9.0, "random_return": 2.0}, ["x"]),
    ):
        args = given | {"env_id": env_id, "num_steps": 24}
        row = {"plan": "envs", "name": f"{env_id}-T24", "args": args, "results": results, "failures": failures}
        yield row | {"updates": 10, "seconds": 60.0, "phases": phases, "curve": [[1e6, 1.0], [2e6, 5.0]]} | where
    for credit, seconds in (("rl_triton", 0.001), ("loop", 0.01), ("compiled_loop", 0.0005)):
        for plan, steps in (("breakdown", 24), ("amdahl", 128)):
            args = given | {"env_id": "cartpole-swingup", "num_steps": steps, "credit": credit}
            row = {"plan": plan, "name": f"{plan}-{credit}", "args": args, "phases": phases | {"credit": seconds}}
            yield row | {"results": {}, "failures": [], "updates": 40, "seconds": 4.0, "curve": []} | where


def test_report_of_learning(tmp_path):
    rows = list(learning_rows())
    text = learning_report.tables(rows)
    assert "| `rl_triton` | 3 | 3.00 M | 8.3 | 6,000 | 20.0 | 2.00 M | 4.0e-07 |" in text
    assert "+0.00, 95 % bootstrap interval -" in text
    assert "which holds 0" in text
    assert "upright in 95%" in text
    assert "| 9 (2) | 3.0 m, falls in 50% (0.4 m) | **no** |" in text
    # A loop that takes a hundredth of a tenth of a second: 0.01 s of 0.1 s, and a tenth of that afterwards.
    assert "| `loop` | 100.0 | 10.0% | 1.10% | 10.0x | 1.099x | 1.000x | 1.099x |" in text
    assert (
        "faster than ours in 1 of 2 comparisons: cartpole-swingup, 4096 x 24, hidden 128: compiled_loop (0.50x)" in text
    )
    assert "Runs without results" not in text  # the run that failed was repeated
    learning_report.draw(rows, tmp_path)
    names = {"pong.png", "cartpole.png", "hopper.png", "breakdown.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.stat().st_size > 5_000 for path in tmp_path.iterdir())
    assert learning_report.tables([]) == "Nothing has been measured yet."


def test_bootstrap_tells_a_difference():
    low, high = learning_report.bootstrap_interval([20.0, 19.0, 20.5], [10.0, 12.0, 11.0])
    assert 7.0 <= low < high <= 10.5
    low, high = learning_report.bootstrap_interval([20.0, 18.0, 19.0], [19.0, 20.0, 18.5])
    assert low < 0 < high


def test_amdahl():
    assert learning_report.bound(0.5, 2.0) == pytest.approx(4 / 3)
    assert learning_report.bound(0.1, 1e12) == pytest.approx(1 / 0.9)


def test_curves_are_thinned():
    curve = [(i, float(i)) for i in range(10_000)]
    short = learning.thinned(curve)
    assert len(short) == learning.CURVE_POINTS
    assert short[-1] == [9999.0, 9999.0]
    assert learning.thinned(curve[:7]) == [list(map(float, x)) for x in curve[:7]]


def test_cores_and_gpus_are_shared():
    shares = learning.slots(3, "2-8", "0,1", shared=False)
    assert [slot.cores for slot in shares] == [(2, 3, 4), (5, 6), (7, 8)]
    assert [slot.gpu for slot in shares] == ["0", "1", "0"]
    assert [slot.threads for slot in shares] == [3, 2, 2]
    (one, *_) = learning.slots(3, "2-8", None, shared=True)
    assert (one.cores, one.gpu, one.threads) == (tuple(range(2, 9)), None, 6)
    with pytest.raises(ValueError, match="at least 3"):
        learning.slots(3, "0-1", None, shared=False)


IN_TURN = """
import json
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Args:
    credit: str = ""
    runs: Path = Path()
    max_minutes: float = 0.0
    size: int = 0

def main(args):
    if args.credit == "broken":
        raise RuntimeError("it broke")
    folder = args.runs / args.credit
    folder.mkdir()
    result = {"args": {"credit": args.credit, "size": args.size}, "seconds": 1.0, "phases": {}, "results": {}}
    (folder / "results.json").write_text(json.dumps(result | {"failures": [], "curve": []}))
    return 0
"""


def test_runs_in_turn(tmp_path, monkeypatch):
    """A row for each way to assign credit, with what was printed for those that did not get to it."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "program.py").write_text(IN_TURN)
    job = learning.Job("amdahl", "small", "program", ("--size", "3"), ("loop", "broken", "rl_triton"))
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning, "WORK", tmp_path / "work")
    monkeypatch.setitem(learning.PLANS, "amdahl", lambda: iter([job]))
    monkeypatch.setenv("PYTHONPATH", str(Path(learning.__file__).parents[1]), prepend=os.pathsep)
    out, rows = tmp_path / "out", tmp_path / "rows.jsonl"
    options = ["--out", str(out), "--minutes", "1", "--start-seconds", "1"]
    assert learning.main(["run", "--plan", "amdahl", *options]) == 1
    learning.store(out / learning.ARCHIVE, rows, tmp_path / "rollout.npz", "abc")
    found = {row["name"]: row for row in read(rows)}
    assert list(found) == ["small-loop", "small-broken", "small-rl_triton"]
    assert found["small-loop"]["args"] == {"credit": "loop", "size": 3}
    assert all("it broke" in found[name]["log"] for name in ("small-broken", "small-rl_triton"))


PROGRAM = """
import json, pathlib, sys, time
name, runs = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--runs") + 1])
time.sleep(1000 if name == "endless" else 0)
if name == "broken":
    raise RuntimeError("it broke")
(runs / "r").mkdir()
(runs / "r" / "results.json").write_text(json.dumps({"args": {"given": sys.argv[1:]}, "curve": [[1, 2.0, 3.0]],
    "seconds": 1.0, "phases": {}, "results": {}, "failures": []}))
"""


def test_driver_keeps_what_there_is(tmp_path, monkeypatch):
    """Of a run that is done, of one that breaks, and of one that the time limit stops."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "program.py").write_text(PROGRAM)
    jobs = [learning.Job("plan", name, "program", (name,)) for name in ("whole", "broken", "endless")]
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning, "WORK", tmp_path / "work")
    monkeypatch.setitem(learning.PLANS, "plan", lambda: iter(jobs))
    out, rows = tmp_path / "out", tmp_path / "rows.jsonl"
    options = ["--out", str(out), "--minutes", "0.05", "--start-seconds", "0.5", "--parallel", "3", "--", "--more"]
    assert learning.main(["run", "--plan", "plan", *options]) == 1
    learning.store(out / learning.ARCHIVE, rows, tmp_path / "rollout.npz", "abc")
    found = {row["name"]: row for row in read(rows)}
    assert set(found) == {"whole", "broken", "endless"}
    assert found["whole"]["curve"] == [[1.0, 3.0]]
    assert found["whole"]["args"]["given"][-1] == "--more"
    assert "--max-minutes" in found["whole"]["args"]["given"]
    assert "it broke" in found["broken"]["log"]
    assert "failed" in found["endless"]
    assert {row["commit"] for row in found.values()} == {"abc"}


def test_archive_of_pong(tmp_path, monkeypatch):
    """Games become a curve of their mean, and the first run's rollout is kept."""
    monkeypatch.setattr(learning, "WORK", tmp_path)
    window = {"values": torch.ones(2, 3), "terminated": torch.zeros(2, 3, dtype=torch.bool), "truncated": None}
    (tmp_path / "pong-a" / "r").mkdir(parents=True)
    torch.save(window, tmp_path / "pong-a" / "r" / "rollout.pt")
    games = {"steps": list(range(150)), "returns": [float(i >= 50) for i in range(150)], "final_return": 1.0}
    args = {"seed": 1, "runs": str(tmp_path), "resume": None}
    learning.pack(tmp_path, [{"plan": "pong", "name": "pong-a", "args": args, **games}])
    (row,) = learning.store(tmp_path / learning.ARCHIVE, tmp_path / "rows.jsonl", tmp_path / "rollout.npz", None)
    assert row["args"] == {"seed": 1}  # not the folders of the machine that ran it
    assert row["games"] == 150
    assert row["curve"][0] == [99.0, 0.5]
    assert row["curve"][-1] == [149.0, 1.0]
    kept = np.load(tmp_path / "rollout.npz")
    assert set(kept) == {"values", "terminated"}
    assert read(tmp_path / "rows.jsonl") == [row]


@pytest.mark.skipif(not learning.ROLLOUT.exists(), reason="no run of Pong has been stored")
def test_ways_to_assign_credit_agree_on_the_stored_rollout():
    window = {name: torch.from_numpy(x) for name, x in np.load(learning.ROLLOUT).items()}
    rewards, values = window.pop("rewards"), window.pop("values")
    boundary = dict(truncated=None, bootstrap_values=None) | window | dict(time_dim=0, gamma=0.99, lambda_=0.95)
    double = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in boundary.items()}
    ours = rl_triton.gae(rewards, values, **boundary)
    theirs = reference.gae(rewards.double(), values.double(), **double)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.0, atol=1e-5)
