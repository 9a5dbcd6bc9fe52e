"""The examples run, on a small budget."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.cpu_only
def test_sb3_ppo(tmp_path):
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    plot = tmp_path / "curves.png"
    command = [sys.executable, str(EXAMPLES / "sb3_ppo.py"), "--total-timesteps", "2000", "--plot", str(plot)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "largest difference of final parameters" in result.stdout, result.stderr
    assert "served 8, fallen back 0" in " ".join(result.stdout.split())
    assert "the final parameters differ" not in result.stdout
    assert plot.stat().st_size > 10_000
    assert result.returncode == 1  # two thousand steps do not solve CartPole, and the program says so


@pytest.mark.cpu_only
def test_torchrl_ppo(tmp_path):
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    pytest.importorskip("torchrl", reason="TorchRL is not installed")
    plot = tmp_path / "curves.png"
    budget = ["--total-frames", "2048", "--n-envs", "16", "--n-steps", "32", "--n-epochs", "1", "--n-minibatches", "2"]
    command = [sys.executable, str(EXAMPLES / "torchrl_ppo.py"), *budget, "--plot", str(plot)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    printed = " ".join(result.stdout.split())
    assert "served 4, fallen back 0" in printed, result.stderr
    assert "advantages differ" not in printed
    assert plot.stat().st_size > 10_000
    assert result.returncode == 1  # two thousand steps do not solve CartPole, and the program says so
