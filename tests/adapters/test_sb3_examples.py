"""The programs beside docs/sb3.md run, on a small budget."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *options, cwd):
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    command = [sys.executable, str(EXAMPLES / name), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.cpu_only
def test_recompute(tmp_path):
    result = run("sb3_recompute.py", "--seeds", "1", "--total-timesteps", "2048", "--n-steps", "128", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr  # 1 if the two loops gave different runs
    assert "each epoch, rl_triton" in result.stdout


@pytest.mark.cpu_only
def test_costs(tmp_path):
    result = run("sb3_costs.py", "--repeats", "1", "--parts", "call", "recompute", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert "| 5 x 16 |" in result.stdout
    assert sum("left to Stable-Baselines3" in line for line in lines) == 1
    assert len(lines) == 2 + 10 + 3
