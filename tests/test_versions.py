"""The window of PyTorch and Triton versions is looked at when the package is imported."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from rl_triton import _versions
from rl_triton._triton import triton


@pytest.mark.parametrize("version", ["2.7.0", "2.7.1+cu126", "2.13.0a0+git1234", "2.99.1"])
def test_inside(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _versions.check()


@pytest.mark.parametrize("version", ["2.6.0", "1.13.1+cu117", "3.0.0", "unknown"])
def test_outside(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    words = re.escape(f"rl_triton is not made for torch {version} (supported: >=2.7, <3)")
    with pytest.warns(RuntimeWarning, match=words) as warned:
        _versions.check()
    assert len(warned) == 1


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
def test_both_in_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    with pytest.warns(RuntimeWarning, match=re.escape("and triton 3.2.0 (supported: >=3.3, <4)")) as warned:
        _versions.check()
    assert len(warned) == 1


def test_importing_looks_once():
    program = "import torch; torch.__version__ = '2.6.0'; import rl_triton; import rl_triton.testing"
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("rl_triton is not made for torch 2.6.0") == 1


def test_the_window_is_that_of_the_requirements():
    project = Path(__file__).parents[1] / "pyproject.toml"
    for name, first, _ in _versions.SUPPORTED:
        assert f'"{name}>={first[0]}.{first[1]}' in project.read_text()
