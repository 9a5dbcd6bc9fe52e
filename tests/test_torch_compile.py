"""The operators behind the public functions, and torch.compile and torch.export, which see them."""

import copy
import io
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from calls import FUNCTIONS, NAMES, calls, flat
from torch._dynamo.testing import CompileCounterWithBackend

import rl_triton as rlt
from rl_triton import _library
from rl_triton.testing import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for CPUs with g++")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before counts."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def of(call, **more):
    """A call as a function of its tensors alone."""

    def function(tensors):
        return call.function(**tensors, **call.options, **more)

    return function


def equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(flat(results), flat(expected), strict=True))


def operands(call, **more):
    """(operators of a call's function, what they are called with)."""
    operator, given = _library._operators[call.function.__name__], call.tensors | call.options | more
    arguments = []
    for parameter in operator.parameters:
        default = None if parameter.name == "last_values" else parameter.default
        assert parameter.split(given.get(parameter.name, default), arguments)
    return operator, arguments


# ------------------------------------------------------------------------------------------------------ the operators


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, device):
    call = calls(device=device)[name]
    operator, arguments = operands(call)
    torch.library.opcheck(operator.new, tuple(arguments))
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    torch.library.opcheck(operator.new, tuple(leaves))
    assert not any(x.requires_grad for x in operator.new(*leaves))
    if "return_carry" not in call.options and "return_final" not in call.options:
        results = [torch.empty_like(x) for x in flat(call())]
        torch.library.opcheck(operator.out, (*arguments, *results))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_opcheck_with_a_graph(name, device):
    operator, arguments = operands(calls(device=device)[name])
    leaves = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    assert all(x.requires_grad for x in operator.differentiable(*leaves, _library._CODE))
    torch.library.opcheck(operator.differentiable, (*leaves, _library._CODE))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", [(True, True, True, True), (False, True, False, False), (False, False, False, True)])
def test_opcheck_of_the_adjoint(wanted, device):
    x, done = torch.randn(3, 7, device=device), torch.rand(3, 7, device=device) < 0.2
    scalars = "gae", 0.99, 0.95, False
    torch.library.opcheck(torch.ops.rl_triton.adjoint.default, (done, x, None, *scalars, done, None, -1, *wanted))


@pytest.mark.parametrize("name", NAMES)
def test_operators_give_what_the_functions_give(name):
    call = calls()[name]
    operator, arguments = operands(call)
    assert equal(operator.new(*arguments), call())


def test_every_scan_is_an_operator():
    others = {"GAE", "Retrace", "VTrace", "__version__", "backend", "normalize_advantages"}
    assert (
        set(rlt.__all__) - others
        == set(_library._operators) - {"adjoint"}
        == {calls()[name].function.__name__ for name in NAMES}
    )


# ------------------------------------------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_every_size(name):
    """No break; the second size makes the sizes dynamic, and no later one compiles again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of(calls()[name]), fullgraph=True, backend=counter)
    for n_rows, n_steps in ((3, 7), (4, 9), (5, 11), (6, 64)):
        call = calls(n_rows, n_steps)[name]
        result = compiled(call.tensors)
        assert type(result) is type(call())
        assert equal(result, call())
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_gradients(name):
    """`differentiable=True` compiles to one graph forward and one backward, with the eager gradients."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of(calls()[name], differentiable=True), fullgraph=True, backend=counter, dynamic=True)
    for n_rows, n_steps in ((3, 7), (4, 9), (6, 64)):
        call = calls(n_rows, n_steps, dtype=torch.float64)[name]
        assert_gradients(call, compiled)
        if n_rows == 3:
            first = counter.frame_count
    assert counter.frame_count == first


def assert_gradients(call, compiled, tolerance=1e-12):
    found = []
    for function in (of(call, differentiable=True), compiled):
        leaves = {k: x.clone().requires_grad_() if x.is_floating_point() else x for k, x in call.tensors.items()}
        results = flat(function(leaves))
        assert all(x.requires_grad for x in results)
        wanted = [x for x in leaves.values() if x.requires_grad]
        loss = sum((x.sin() * x).sum() for x in results)
        found.append((results, torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)))
    (expected, expected_gradients), (results, gradients) = found
    for x, want in zip((*results, *gradients), (*expected, *expected_gradients), strict=True):
        assert_close(x, want, max_error=tolerance)


@needs_compiler
@pytest.mark.parametrize("differentiable", [False, True])
def test_inductor(differentiable):
    call = calls(dtype=torch.float64)["gae, truncated"]
    compiled = torch.compile(of(call, differentiable=differentiable), fullgraph=True)
    if differentiable:
        assert_gradients(call, compiled)
    else:
        assert equal(compiled(call.tensors), call())


@pytest.mark.gpu_only
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_on_a_gpu(name, mode):
    """With `reduce-overhead` the calls replay in a CUDA graph: the first ones warm up and record."""
    compiled = torch.compile(of(calls(64, 32)[name]), fullgraph=True, mode=mode)
    for seed in range(6):
        call = calls(64, 32, "cuda", seed=seed)[name]
        torch.compiler.cudagraph_mark_step_begin()
        assert equal([x.clone() for x in flat(compiled(call.tensors))], call()), seed


@pytest.mark.gpu_only
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_gradients_on_a_gpu(name, mode):
    compiled = torch.compile(of(calls()[name], differentiable=True), fullgraph=True, mode=mode)
    for seed in range(4):
        call = calls(64, 32, "cuda", torch.float64, seed)[name]
        torch.compiler.cudagraph_mark_step_begin()
        assert_gradients(call, lambda tensors: [x.clone() for x in flat(compiled(tensors))], 1e-10)


def test_a_compiled_loss():
    """What a user compiles: a network, the advantages and the loss, in one graph."""
    torch.manual_seed(0)
    critic = torch.nn.Linear(4, 1)
    obs, rewards, done = torch.randn(5, 9, 4), torch.randn(5, 8), torch.rand(5, 8) < 0.2

    def loss(obs, rewards, done):
        values = critic(obs).squeeze(-1)
        estimate = rlt.gae(rewards, values[:, :-1], done, last_values=values[:, -1])
        return (values[:, :-1] - estimate.returns).square().mean() + estimate.advantages.sum()

    loss(obs, rewards, done).backward()
    expected = [p.grad.clone() for p in critic.parameters()]
    critic.zero_grad()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(obs, rewards, done).backward()
    for p, want in zip(critic.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want)


def test_options_that_change():
    call = calls()["gae"]

    def function(tensors, gamma, lambda_):
        return rlt.gae(**tensors, gamma=gamma, lambda_=lambda_)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for gamma in (0.9, 0.95, 1, torch.full((3, 7), 0.9)):
        assert equal(compiled(call.tensors, gamma, 0.8), function(call.tensors, gamma, 0.8))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for gamma in (0.9, 0.95, 1.0):  # as a tensor it is no constant of the graph
        compiled(call.tensors, torch.tensor(gamma), 0.8)
    assert counter.frame_count == 1
    compiled = torch.compile(lambda x, n: rlt.n_step_returns(**x, n=n), fullgraph=True, backend="aot_eager")
    call = calls()["n_step_returns"]
    for n in (1, 3, 9):
        assert equal(compiled(call.tensors, n), rlt.n_step_returns(**call.tensors, n=n))


@pytest.mark.parametrize("name", ["gae", "gae, carry", "td_lambda_returns", "affine_scan"])
def test_out(name):
    call = calls()[name]
    results = flat(call())

    def function(tensors, out):
        return call.function(**tensors, **call.options, out=out)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    n = 2 if "gae" in name else 1
    out = tuple(torch.full_like(x, float("nan")) for x in results[:n])
    given = out if n > 1 else out[0]
    got = flat(compiled(call.tensors, given))
    assert equal(got, results)
    assert equal(list(out), results[:n])
    assert all(x is y for x, y in zip(got[:n], out, strict=True))


def test_modes_of_gradient():
    """The grad mode at the call decides, as in eager code."""
    call = calls()["td_lambda_returns"]
    leaves = {k: x.requires_grad_() if x.is_floating_point() else x for k, x in call.tensors.items()}
    compiled = torch.compile(of(call, differentiable=True), fullgraph=True, backend="aot_eager")
    assert compiled(leaves).requires_grad
    with torch.no_grad():
        assert not compiled(leaves).requires_grad
    with torch.inference_mode():
        assert not compiled(leaves).requires_grad
    assert not torch.compile(of(call), fullgraph=True, backend="aot_eager")(leaves).requires_grad


def test_transforms_inside():
    parts = [calls(seed=seed)["gae"] for seed in range(4)]
    stacked = {k: torch.stack([part.tensors[k] for part in parts]) for k in parts[0].tensors}

    def advantages(tensors):
        return rlt.gae(**tensors).advantages

    compiled = torch.compile(torch.vmap(advantages), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(stacked), torch.stack([advantages(part.tensors) for part in parts]))


def test_errors_keep_their_words():
    call = calls()["gae"]
    compiled = torch.compile(of(call), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"gae: values has shape \[3, 6\], but rewards has shape \[3, 7\]"):
        compiled(call.tensors | {"values": torch.zeros(3, 6)})
    with pytest.raises(Exception, match="truncated was given without the value of the final observations"):
        compiled(call.tensors | {"truncated": torch.zeros(3, 7)})


def test_the_normalization_compiles():
    x, valid = torch.randn(5, 7), torch.rand(5, 7) < 0.8
    compiled = torch.compile(rlt.normalize_advantages, fullgraph=True, backend="aot_eager")
    for options in ({}, {"valid": valid}, {"dims": 0}, {"dims": (0, 1), "unbiased": False}):
        torch.testing.assert_close(compiled(x, **options), rlt.normalize_advantages(x, **options))


def test_ordinary_calls_stay_out_of_the_way(monkeypatch):
    """Neither compiling nor the operators are any of an eager call's business."""
    monkeypatch.setattr(_library, "call", None)
    monkeypatch.setattr(_library._Operator, "__call__", None)
    for call in calls().values():
        call()


def test_importing_does_not_import_the_compiler():
    program = "import sys, rl_triton; sys.exit('torch._dynamo' in sys.modules or 'torch._inductor' in sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    assert subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}).returncode == 0


# ------------------------------------------------------------------------------------------------------- torch.export


class Critic(torch.nn.Module):
    """A module whose forward pass ends in a call."""

    def __init__(self, differentiable=False):
        super().__init__()
        self.value = torch.nn.Linear(4, 1)
        self.differentiable = differentiable

    def forward(self, obs, rewards, done):
        values = self.value(obs).squeeze(-1)
        return rlt.gae(rewards, values[:, :-1], done, last_values=values[:, -1], differentiable=self.differentiable)


def rollout(n_rows, n_steps):
    torch.manual_seed(n_rows)
    return torch.randn(n_rows, n_steps + 1, 4), torch.randn(n_rows, n_steps), torch.rand(n_rows, n_steps) < 0.2


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
def test_export(strict, differentiable):
    module = Critic(differentiable)
    rows = torch.export.Dim("rows", min=2)
    shapes = ({0: rows}, {0: rows}, {0: rows})
    program = torch.export.export(module, rollout(3, 7), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for exported in (program, loaded):
        for n_rows in (3, 6):
            given = rollout(n_rows, 7)
            for x, want in zip(flat(exported.module()(*given)), module(*given), strict=True):
                torch.testing.assert_close(x, want)
    targets = [str(node.target) for node in program.graph.nodes]
    assert any(target.startswith("rl_triton.") for target in targets), targets
    decomposed = program.run_decompositions()
    for x, want in zip(flat(decomposed.module()(*given)), module(*given), strict=True):
        torch.testing.assert_close(x, want)


def test_results_are_copied_and_pickled():
    for call in calls().values():
        result = call()
        for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
            assert type(again) is type(result)
            assert equal(again, result)


def test_data_is_looked_at_when_the_graph_runs(monkeypatch):
    """RL_TRITON_CHECK=1: tracing has no data to look at, the operator has."""
    monkeypatch.setattr("rl_triton._checks.READS_DATA", True)
    call = calls()["gae"]
    compiled = torch.compile(of(call), fullgraph=True, backend="aot_eager")
    assert equal(compiled(call.tensors), call())
    with pytest.raises(ValueError, match="gae: rewards holds NaN in steps that count"):
        compiled(call.tensors | {"rewards": torch.full((3, 7), float("nan"))})
