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
