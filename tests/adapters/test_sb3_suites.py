"""The committed records of Stable-Baselines3's own suites, and the plugin that writes them."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).parents[1] / "suites"
sys.path.insert(0, str(SUITES))
import sb3_report  # noqa: E402

sys.path.remove(str(SUITES))


@pytest.mark.parametrize("name", sb3_report.RECORDS)
def test_the_record(name):
    pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    sys.path.insert(0, str(SUITES))
    try:
        from rl_triton_sb3_suite import EXPECTED
    finally:
        sys.path.remove(str(SUITES))
    record = json.loads((SUITES / name).read_text())
    assert record["failed"] == []
    assert record["passed"] > 0
    assert record["served"] > 0
    assert set(record["fallen_back"]) <= set(EXPECTED[name.removesuffix(".json")])
    assert record["served"] == sum(file.get("served", 0) for file in record["files"].values())


def test_the_page_shows_the_record():
    page = sb3_report.PAGE.read_text()
    assert sb3_report.section() in page, "run python tests/suites/sb3_report.py"
    assert sb3_report.rewritten(page) == page


IMPORTS = """
    import numpy as np
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
"""
TESTS = {
    "served": """
        def test_learn():
            PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu").learn(16)
    """,
    "nothing served": """
        def test_learn():
            pass
    """,
    "unexpected and lost": """
        def test_learn():
            PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, gamma=np.float64(0.9), device="cpu").learn(32)
            PPO("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu").learn(16)
            RolloutBuffer.compute_returns_and_advantage = lambda self, last_values, dones: None
    """,
}


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("case", "faults"),
    [
        ("served", ()),
        ("nothing served", ["no call was served"]),
        (
            "unexpected and lost",
            ["the patch was lost during the run", "2 calls fell back: gamma or gae_lambda is not a Python number"],
        ),
    ],
)
def test_the_plugin(case, faults, tmp_path):
    pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    (tmp_path / "test_theirs.py").write_text(inspect.cleandoc(IMPORTS) + "\n" + inspect.cleandoc(TESTS[case]))
    report = tmp_path / "report.json"
    options = ["--rlt-suite", "sb3", "--rlt-source", "none", "--rlt-report", str(report), "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rl_triton_sb3_suite", "-p", "no:cacheprovider", *options]
    paths = [str(SUITES), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True)
    written = json.loads(report.read_text())
    assert written["passed"] == 1
    assert result.returncode == bool(faults), result.stdout + result.stderr
    assert [line[6:] for line in result.stdout.splitlines() if line.startswith("FAULT ")] == list(faults)
    if not faults:
        assert (written["served"], written["fallen_back"]) == (1, {})
