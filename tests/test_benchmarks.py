"""The benchmark program on small shapes: that it measures the right thing, not how fast that is."""

import contextlib
import json

import pytest
import torch

pytest.importorskip("tqdm", reason="the bench extra is not installed")
pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from benchmarks import check, run, timing
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
    return [*rows, {**Case(OPS["gae"], "NT", Shape(8, 16)).key, **failed, **where}]


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
