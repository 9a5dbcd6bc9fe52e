"""Calls in CUDA graphs: captured once, replayed with other inputs in the same memory."""

import contextlib

import pytest
import torch
from calls import FUNCTIONS, NAMES, calls, flat
from windows import SMALL_CONFIGS

from rl_triton._config import configured
from rl_triton.testing import assert_close

pytestmark = pytest.mark.gpu_only

# Rows and steps for which the launch configuration is chosen differently; the last splits the time axis.
SHAPES = [(64, 32), (4096, 128), (33, 257), (2, 40_000)]


def capture(function, tensors):
    """(graph, what a replay fills). The kernels are compiled before, on a side stream, as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(tensors)
    return graph, results


def replays(function, make, n, compare):
    """Capture on the tensors of `make(0)`, then replay on those of every other."""
    static = make(0)
    graph, results = capture(function, static)
    for seed in range(1, n):
        given = make(seed)
        for k, x in given.items():
            static[k].copy_(x)
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        for k, (x, want) in enumerate(zip(results, function(given), strict=True)):
            compare(x, want, f"result {k} of replay {seed}")


def same(x, want, name):
    assert torch.equal(x, want), name


def of(call):
    def function(tensors):
        return flat(call.function(**tensors, **call.options))

    return function


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replays(name, shape):
    replays(of(calls()[name]), lambda seed: calls(*shape, "cuda", seed=seed)[name].tensors, 4, same)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=["batch major", "time major", "split"])
def test_replays_of_every_schedule(name, config):
    with configured(config):
        replays(of(calls()[name]), lambda seed: calls(9, 70, "cuda", seed=seed)[name].tensors, 4, same)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_replays_into_given_results(name):
    call = calls()[name]
    results = flat(calls(64, 32, "cuda")[name]())

    def function(tensors):
        call.function(**tensors, **call.options, out=tuple(results) if len(results) > 1 else results[0])
        return results

    static = calls(64, 32, "cuda")[name].tensors
    graph, _ = capture(function, static)
    for seed in range(1, 4):
        given = calls(64, 32, "cuda", seed=seed)[name]
        for k, x in given.tensors.items():
            static[k].copy_(x)
        graph.replay()
        for x, want in zip(results, flat(given()), strict=True):
            assert torch.equal(x, want)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(64, 32), (2, 20_000)], ids=str)
def test_replays_of_gradients(name, shape):
    """Forward and backward in one graph."""
    call = calls()[name]

    def function(tensors):
        leaves = {k: x.detach().requires_grad_() for k, x in tensors.items() if x.is_floating_point()}
        results = flat(call.function(**(tensors | leaves), **call.options, differentiable=True))
        loss = sum(x.square().sum() for x in results)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return [*(x.detach() for x in results), *gradients]

    def make(seed):
        return calls(*shape, "cuda", torch.float64, seed)[name].tensors

    def close(x, want, name):  # `index_add` behind a gather may sum in another order
        assert_close(x, want, max_error=1e-9, name=name)

    replays(function, make, 3, close)


@pytest.mark.parametrize("shape", [(256, 128), (2, 40_000)], ids=str)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_ten_thousand_replays(shape, mode):
    """No replay is wrong: what one leaves behind (scratch memory, counters) is nothing to the next."""
    with mode():
        windows = [calls(*shape, "cuda", seed=seed)["gae, truncated"] for seed in range(16)]
        expected = [flat(call()) for call in windows]
        static = {k: x.clone() for k, x in windows[0].tensors.items()}
        graph, results = capture(of(windows[0]), static)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(10_000):
            for k, x in windows[i % 16].tensors.items():
                static[k].copy_(x)
            graph.replay()
            for x, want in zip(results, expected[i % 16], strict=True):
                wrong += (x != want).any()
        assert wrong.item() == 0
