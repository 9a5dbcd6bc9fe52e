"""Which backend runs, and what happens when the forced one cannot."""

import subprocess
import sys

import pytest
import torch

import rl_triton as rlt
from rl_triton import _cpu, _launch, _plan


def call(device="cpu"):
    x = torch.ones(2, 3, device=device)
    return rlt.gae(x, x, x, last_values=None)


def spied(monkeypatch):
    """The backends that calls from here on reach by the ordinary path."""
    monkeypatch.setattr(_plan, "ENABLED", False)
    seen = []
    for module in (_cpu, _launch):
        run = module.run
        name = module.__name__

        def spy(problem, run=run, name=name):
            seen.append(name)
            run(problem)

        monkeypatch.setattr(module, "run", spy)
    return seen


def test_auto_takes_numba_on_a_cpu(monkeypatch):
    seen = spied(monkeypatch)
    call()
    assert seen == ["rl_triton._cpu"]


@pytest.mark.gpu_only
def test_auto_takes_triton_on_a_gpu(monkeypatch):
    seen = spied(monkeypatch)
    call("cuda")
    assert seen == ["rl_triton._launch"]
    with (
        rlt.backend("cpu"),
        pytest.raises(ValueError, match="the backend is forced to 'cpu', but the tensors are on cuda"),
    ):
        call("cuda")


@pytest.mark.cpu_only
def test_forced_backends_nest(monkeypatch):
    seen = spied(monkeypatch)
    with rlt.backend("triton"):
        call()
        with rlt.backend("cpu"):
            call()
        call()
    call()
    assert [name.rpartition(".")[2] for name in seen] == ["_launch", "_cpu", "_launch", "_cpu"]


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match="backend must be one of 'auto', 'triton', 'cpu', got 'cuda'"),
        rlt.backend("cuda"),
    ):
        pass


def child(code, **environment):
    import os

    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RL_TRITON_BACKEND")}
    return subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)


CALL = "import torch, rl_triton as rlt; x = torch.ones(2, 3); rlt.gae(x, x, x, last_values=None); print('served')"


def test_forcing_what_cannot_serve_is_an_error():
    result = child(CALL, RL_TRITON_BACKEND="triton")
    assert "the backend is forced to 'triton', but the tensors are on the CPU" in result.stderr
    assert "TRITON_INTERPRET=1" in result.stderr


def test_environment_sets_the_default():
    assert child(CALL, RL_TRITON_BACKEND="cpu").stdout == "served\n"
    assert (
        "RL_TRITON_BACKEND must be one of 'auto', 'triton', 'cpu', got 'gpu'"
        in child(CALL, RL_TRITON_BACKEND="gpu").stderr
    )


def test_without_triton_the_cpu_path_works():
    assert child("import sys; sys.modules['triton'] = None; " + CALL).stdout == "served\n"
