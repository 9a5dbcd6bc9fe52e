"""Gradients of the linear estimators, which are one scan in the other direction: against finite differences and plain
loops; that it is one, what it keeps, and which calls it serves."""

import pytest
import torch
from calls import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from test_differentiable import DOUBLE, by_loop, call_of, check, normal, of_inputs, on_backends
from torch.utils._python_dispatch import TorchDispatchMode
from windows import SMALL, SMALL_CONFIGS, windows

import rl_triton as rlt
from rl_triton import _backend, _differentiable, _linear, _plan
from rl_triton._config import configured
from rl_triton.testing import assert_close

OPS = ("gae", "td_lambda_returns", "discounted_returns")
BOUNDARIES = ("plain", "truncated", "next values", "start flags", "time first")
CASES = [(op, window) for op in OPS for window in BOUNDARIES]


@pytest.fixture
def only_linear(monkeypatch):
    """No call takes the way of the others."""
    monkeypatch.setattr(_differentiable, "estimate", None)


@on_backends("case", CASES, ("td_lambda_returns", "truncated"))
def test_finite_differences(case, backend, only_linear):
    """First and second derivatives; a window with NaN where nothing is read comes below."""
    op, window = case
    constants, inputs = call_of(op, window, backend.device)
    constants.pop("valid", None)
    with configured(SMALL):
        function = of_inputs(op, constants, list(inputs), carries=False)
        if backend.slow:  # first derivatives come below
            assert torch.autograd.gradgradcheck(function, tuple(inputs.values()), fast_mode=True)
        else:
            check(backend, function, tuple(inputs.values()), twice=True)


def test_third_derivatives(only_linear):
    """The transpose of the transpose has one again."""
    constants, inputs = call_of("gae", "truncated", "cpu")
    function = of_inputs("gae", constants, list(inputs), carries=False)

    def twice(*tensors):
        grads = torch.autograd.grad(sum(y.pow(3).sum() for y in function(*tensors)), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), tensors, create_graph=True)

    assert torch.autograd.gradcheck(twice, tuple(inputs.values()))


def linear(data, device="cpu"):
    """(op, arguments) of a drawn call that is linear; what is not read holds NaN."""
    op = data.draw(st.sampled_from(OPS))
    tensors, options, _ = data.draw(windows(device=device, max_steps=9, max_rows=3))
    arguments = tensors | options
    for name in ("valid", "carry", *{"discounted_returns": ("values", "lambda_")}.get(op, ())):
        arguments.pop(name, None)
    for name in ("rewards", "values"):
        if name in arguments:
            arguments[name] = arguments[name].nan_to_num(1.0)
    for name in ("gamma", "lambda_"):
        if isinstance(arguments.get(name), torch.Tensor):
            arguments[name] = 0.7
    if arguments.get("last_values") is not None and data.draw(st.booleans()):
        time_dim = arguments["time_dim"]
        ended = arguments["last_done"] if "last_done" in arguments else arguments["terminated"].select(time_dim, -1)
        if "truncated" in arguments:
            ended = (ended != 0) | (arguments["truncated"].select(time_dim, -1) != 0)
        arguments["last_values"] = arguments["last_values"].masked_fill(ended != 0, float("nan"))
    return op, arguments


FLAGS = ("terminated", "truncated", "last_done")


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=repr)
def test_gradients_of_plain_loops(config, backend, only_linear):
    """Any shape, layout and boundary; the gradients of some of the results, of some of the inputs."""
    if backend.name == "cpu" and config is not SMALL:
        pytest.skip("a configuration is for kernels")

    @settings(max_examples=3 if backend.slow else 20)
    @given(data=st.data())
    def compare(data):
        op, arguments = linear(data)
        arguments = {
            k: x.double() if torch.is_tensor(x) and k not in FLAGS else x for k, x in arguments.items()
        }  # fmt: skip
        names = [k for k, x in arguments.items() if torch.is_tensor(x) and k not in FLAGS]
        if op == "td_lambda_returns" and "next_values" in names:
            names.remove("values")  # not read
        names = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        n_results = data.draw(st.integers(1, 2)) if op == "gae" else 1
        first = data.draw(st.integers(0, 2 - n_results)) if op == "gae" else 0
        found = []
        for ours in (True, False):
            device = backend.device if ours else "cpu"
            leaves = {k: arguments[k].detach().to(device).requires_grad_() for k in names}
            moved = {k: x.to(device) if torch.is_tensor(x) else x for k, x in arguments.items()} | leaves
            if ours:
                with configured(config):
                    results = flat(getattr(rlt, op)(**moved, differentiable=True))
            else:
                results, _ = by_loop(op, moved)
            results = results[first : first + n_results]
            weights = [normal(*y.shape, seed=k).to(device) for k, y in enumerate(results)]
            total = sum((y * w).sum() for y, w in zip(results, weights, strict=True))
            grads = [torch.zeros_like(x) for x in leaves.values()]
            if total.requires_grad:  # a loop may have read none of them
                with configured(config):
                    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
            found.append(dict(zip(names, (g.cpu() for g in grads), strict=True)))
        for name, want in found[1].items():
            assert_close(found[0][name], want, max_error=1e-11, name=name)
            assert not found[0][name][want == 0].any(), name

    compare()


@pytest.mark.parametrize("time_dim", [0, 1])
def test_long_windows(time_dim, backend):
    """With the configurations that are chosen, the time axis split over programs among them."""
    n_rows, n_steps = (2, 40) if backend.slow else (3, 2100)
    generator = torch.Generator().manual_seed(0)
    done, cut = (torch.rand(n_rows, n_steps, generator=generator) < 0.01 for _ in range(2))
    inputs = {name: normal(n_rows, n_steps, seed=k) for k, name in enumerate(("rewards", "values", "bootstrap_values"))}
    found = []
    for ours in (True, False):
        turned = {k: x.t().contiguous() if time_dim == 0 else x for k, x in inputs.items()}
        leaves = {k: x.to(backend.device if ours else "cpu").requires_grad_() for k, x in turned.items()}
        leaves["last_values"] = torch.ones(n_rows, **DOUBLE, device=backend.device if ours else "cpu").requires_grad_()
        flags = {"terminated": done, "truncated": cut}
        flags = {k: (x.t() if time_dim == 0 else x).to(leaves["rewards"].device) for k, x in flags.items()}
        options = {"gamma": 0.99, "lambda_": 0.95, "time_dim": time_dim}
        if ours:
            results = flat(rlt.gae(**leaves, **flags, **options, differentiable=True))
        else:
            results, _ = by_loop("gae", leaves | flags | options)
        total = sum((k + 1) * (y.cpu() * y.detach().cpu().sin()).sum() for k, y in enumerate(results))
        found.append(torch.autograd.grad(total, list(leaves.values())))
    for x, want in zip(*found, strict=True):
        assert_close(x, want.to(x.device), max_error=1e-10)


def small(op, device, dtype=torch.float32):
    x = {k: normal(3, 7, seed=i).to(device, dtype) for i, k in enumerate(("rewards", "values", "bootstrap_values"))}
    x["last_values"] = normal(3, seed=5).to(device, dtype)
    if op == "discounted_returns":
        del x["values"]
    done = torch.zeros(3, 7, dtype=torch.bool, device=device)
    return {k: y.requires_grad_() for k, y in x.items()}, {"terminated": done, "truncated": done.roll(1)}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS)
def test_one_launch_there_and_one_back(op, backend, monkeypatch):
    monkeypatch.setattr(_plan, "ENABLED", False)
    launched, run = [], _backend.run
    monkeypatch.setattr(_backend, "run", lambda problem: (launched.append(problem.algorithm.name), run(problem)))
    inputs, flags = small(op, backend.device)
    results = flat(getattr(rlt, op)(**inputs, **flags, differentiable=True))
    assert launched == [op]
    grads = [torch.ones_like(y) for y in results]
    torch.autograd.grad(results, list(inputs.values()), grads, retain_graph=True)
    assert launched == [op, "adjoint"]
    with Operators() as mode:
        torch.autograd.grad(results, list(inputs.values()), grads)
    assert mode.seen == ["rl_triton.adjoint.default"]


@pytest.mark.parametrize("op", OPS)
def test_only_flags_are_kept(op):
    inputs, flags = small(op, "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        results = flat(getattr(rlt, op)(**inputs, **flags, differentiable=True))
        torch.autograd.grad(results, list(inputs.values()), [torch.ones_like(y) for y in results], create_graph=True)
    addresses = {x.data_ptr() for x in flags.values()}
    assert {x.data_ptr() for x in kept} == addresses


@pytest.mark.parametrize("who", [("values",), ("last_values",), ("rewards", "bootstrap_values")], ids=str)
def test_gradients_that_nobody_wants_are_not_made(who, monkeypatch):
    monkeypatch.setattr(_plan, "ENABLED", False)
    problems, run = [], _backend.run
    monkeypatch.setattr(_backend, "run", lambda problem: (problems.append(problem), run(problem)))
    inputs, flags = small("gae", "cpu")
    given = {k: x if k in who else x.detach() for k, x in inputs.items()}
    rlt.gae(**given, **flags, differentiable=True).returns.sum().backward()
    assert all(inputs[k].grad.isfinite().all() for k in who)
    forward, backward = problems
    assert len(backward.written) == len(who)
    assert backward.inputs[0] is None  # the advantages are not in the loss


@pytest.mark.parametrize("op", OPS)
def test_dtypes_of_their_inputs(op, backend):
    """Gradients have the dtype of what they are of; the arithmetic is that of the results."""
    inputs, flags = small(op, backend.device)
    dtypes = dict(zip(inputs, (torch.float16, torch.float64, torch.bfloat16, torch.float32), strict=False))
    mixed = {k: x.detach().to(dtypes[k]).requires_grad_() for k, x in inputs.items()}
    exact = {k: x.detach().double().requires_grad_() for k, x in mixed.items()}
    for leaves in (mixed, exact):
        results = flat(getattr(rlt, op)(**leaves, **flags, differentiable=True))
        sum((k + 1) * y.sum() for k, y in enumerate(results)).backward()
    for k, x in mixed.items():
        assert x.grad.dtype == x.dtype
        assert torch.equal(x.grad, exact[k].grad.to(x.dtype))


def test_what_is_not_read(backend):
    """last_values beside next_values have a gradient of zero; values that td_lambda_returns does not take have none."""
    x, last = (y.to(backend.device).requires_grad_() for y in (normal(2, 3), normal(2)))
    done = torch.zeros(2, 3, device=backend.device)
    result = rlt.gae(x, x, done, next_values=x.detach(), last_values=last, differentiable=True)
    assert not torch.autograd.grad(result.returns.sum(), last)[0].any()
    result = rlt.td_lambda_returns(x.detach(), x, done, next_values=x.detach().requires_grad_(), differentiable=True)
    assert torch.autograd.grad(result.sum(), x, allow_unused=True)[0] is None


OTHERS = {
    "tensor gamma": {"gamma": torch.tensor(0.9)},
    "tensor lambda": {"lambda_": torch.tensor(0.9)},
    "infinite gamma": {"gamma": float("inf")},
    "gaps": {"valid": torch.ones(3, 7)},
    "carry": {"carry": torch.ones(3)},
    "return_carry": {"return_carry": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_are_expressions(name, monkeypatch):
    monkeypatch.setattr(_linear, "estimate", None)
    inputs, flags = small("gae", "cpu")
    assert all(y.requires_grad for y in flat(rlt.gae(**inputs, **flags, **OTHERS[name], differentiable=True)))


def test_a_gradient_of_nan_reaches_only_what_was_read(backend, only_linear):
    """In its own episode, forward in time, and V of the step after."""
    inputs, flags = small("td_lambda_returns", backend.device)
    flags["terminated"][:, 3] = True
    result = rlt.td_lambda_returns(**inputs, **flags, differentiable=True)
    sent = torch.ones_like(result)
    sent[:, 5] = float("nan")
    sent[0, 2] = float("nan")
    rewards, values, last = torch.autograd.grad(
        result, [inputs[name] for name in ("rewards", "values", "last_values")], sent
    )
    late = [[0, 5], [0, 6], [1, 5], [1, 6], [2, 5], [2, 6]]
    assert rewards.isnan().nonzero().tolist() == [[0, 2], [0, 3], *late]
    assert values.isnan().nonzero().tolist() == [[0, 3], [0, 6], [1, 6], [2, 6]]
    assert last.isnan().all()
