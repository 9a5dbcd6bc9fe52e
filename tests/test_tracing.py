"""Whatever looks on while a call is made sees an operator, and no tensor without memory meets a kernel."""

import pytest
import torch
from calls import FUNCTIONS, NAMES, calls, flat
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import rl_triton as rlt
from rl_triton import _library, _plan
from rl_triton.testing import assert_close


def of(call, **more):
    """A call as a function of its tensors alone, with a list of tensors for a result."""

    def function(tensors):
        return flat(call.function(**tensors, **call.options, **more))

    return function


def equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(flat(results), flat(expected), strict=True))


def described(results):
    return [(x.shape, x.stride(), x.dtype, x.device) for x in flat(results)]


class CountedOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------------ tracers


@pytest.mark.parametrize("name", NAMES)
def test_make_fx(name):
    """A traced call is made anew with the tensors of each run, also where plans of such a call exist."""
    first, second = calls()[name], calls(seed=1)[name]
    function = of(first)
    for _ in range(2):
        function(first.tensors)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(function, tracing_mode=mode)(first.tensors)
        assert equal(traced(second.tensors), function(second.tensors)), mode
        assert any("rl_triton" in str(node.target) for node in traced.graph.nodes)
    larger = calls(5, 9)[name]
    assert equal(traced(larger.tensors), function(larger.tensors))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_make_fx_of_gradients(name):
    first, second = (calls(seed=seed, dtype=torch.float64)[name] for seed in range(2))

    def gradients(tensors):
        leaves = {k: x.detach().requires_grad_() for k, x in tensors.items() if x.is_floating_point()}
        loss = sum(x.square().sum() for x in of(first, differentiable=True)(tensors | leaves))
        return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)

    traced = make_fx(gradients)(first.tensors)
    for x, want in zip(traced(second.tensors), gradients(second.tensors), strict=True):
        assert_close(x, want, max_error=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_jit_trace(name):
    first, second = calls()[name], calls(5, 9, seed=1)[name]
    names = list(first.tensors)

    def function(*tensors):
        return tuple(of(first)(dict(zip(names, tensors, strict=True))))

    traced = torch.jit.trace(function, tuple(first.tensors.values()))
    assert "rl_triton::" in str(traced.graph)
    assert equal(traced(*second.tensors.values()), of(first)(second.tensors))


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(name, differentiable):
    """A fake result is like the real one, inside the mode and after it."""
    call = calls()[name]
    function = of(call, differentiable=differentiable)
    expected = described(function(call.tensors))
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(x) for k, x in call.tensors.items()}
        assert described(function(fakes)) == expected
    results = of(call)(fakes)
    assert described(results) == expected
    assert all(type(x) is type(fakes["alpha" if "alpha" in fakes else next(iter(fakes))]) for x in results)


def test_fake_tensors_keep_promotion_and_errors():
    with FakeTensorMode():
        x, done, last = torch.zeros(3, 7, dtype=torch.bfloat16), torch.zeros(3, 7), torch.zeros(3, dtype=torch.float64)
        assert rlt.gae(x, x, done, last_values=last).advantages.dtype == torch.float64
        with pytest.raises(ValueError, match="gae: the window's edge needs a value"):
            rlt.gae(x, x, done)
        with pytest.raises(ValueError, match="gae: last_values has shape"):
            rlt.gae(x, x, done, last_values=x)
        with pytest.raises(TypeError, match="gae: gamma must be a float or a tensor, got str"):
            rlt.gae(x, x, done, last_values=last, gamma="0.9")
        with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
            rlt.gae(x, x, done, last_values=last, gama=0.9)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'terminated'"):
            rlt.gae(x, x, last_values=last)
        with pytest.raises(ValueError, match="out was given with differentiable=True"):
            rlt.gae(x, x, done, last_values=last, out=(x, x), differentiable=True)
        out = torch.empty(3, 7), torch.empty(3, 7)
        assert rlt.gae(out[0], x, done, last_values=None, out=out).returns is out[1]
    assert rlt.gae(torch.empty(0, 7), torch.empty(0, 7), torch.empty(0, 7), last_values=None).returns.shape == (0, 7)


# -------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_modes_see_the_operator(name):
    call = calls()[name]
    expected = call()
    wanted = f"rl_triton.{call.function.__name__}.default"
    with CountedOperators() as mode:
        assert equal(call(), expected)
    assert mode.seen.count(wanted) == 1
    with CountedFunctions() as mode:
        assert equal(call(), expected)
    assert mode.seen.count(wanted) == 1


def test_out_under_a_mode():
    call = calls()["gae"]
    out = tuple(torch.full_like(x, float("nan")) for x in call())
    versions = [x._version for x in out]
    with CountedOperators() as mode:
        result = call(out=out)
    assert mode.seen == ["rl_triton.gae_out.default"]
    assert all(x is y for x, y in zip(result, out, strict=True))
    assert equal(out, call())
    assert all(x._version > version for x, version in zip(out, versions, strict=True))


def test_gradients_under_a_mode():
    call = calls()["gae"]
    leaves = {k: x.requires_grad_() if x.is_floating_point() else x for k, x in call.tensors.items()}
    with CountedOperators() as mode:
        assert not any(x.requires_grad for x in of(call)(leaves))
        result = of(call, differentiable=True)(leaves)
        assert all(x.requires_grad for x in result)
        sum(x.sum() for x in result).backward()
    assert [name for name in mode.seen if "rl_triton" in name] == [
        "rl_triton.gae.default",
        "rl_triton.gae.default",
        "rl_triton.adjoint.default",
    ]
    assert leaves["rewards"].grad.shape == (3, 7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_have_no_loop_and_keep_little(name):
    """As many operators for 64 steps as for 8, and for the backward pass a memory that grows as the inputs do."""
    counts, kept, given = [], [], []
    for n_steps in (8, 64):
        call = calls(3, n_steps)[name]
        leaves = {k: x.requires_grad_() if x.is_floating_point() else x for k, x in call.tensors.items()}
        storages = {}

        def keep(x, storages=storages):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with CountedOperators() as mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = sum(x.square().sum() for x in of(call, differentiable=True)(leaves))
            torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad], allow_unused=True)
        counts.append(len(mode.seen))
        kept.append(sum(storages.values()))
        given.append(sum(x.nbytes for x in leaves.values()))
    assert counts[0] == counts[1]
    assert kept[1] / kept[0] < 1.1 * given[1] / given[0]
    assert kept[1] < 20 * given[1]


def test_a_default_device_is_no_reason_to_dispatch(monkeypatch):
    call = calls()["gae"]
    expected = call()
    with torch.device("meta"):
        assert not _library.watched()
        assert equal(call(), expected)
        assert equal(call(differentiable=True), expected)
        with CountedFunctions() as mode:
            assert _library.watched()
            assert equal(call(), expected)
    assert mode.seen


def test_without_plans(monkeypatch):
    """RL_TRITON_PLANS=0 leaves out the shorter way, not the operators."""
    monkeypatch.setattr(_plan, "ENABLED", False)
    call = calls()["gae"]
    rlt.gae.plans.clear()
    expected = call()
    assert not rlt.gae.plans.by_key
    with CountedOperators() as mode:
        result = call()
    assert mode.seen == ["rl_triton.gae.default"]
    assert equal(result, expected)


def test_subclasses():
    """Those that dispatch for themselves do so under a mode; by themselves they are refused, by name."""

    class Named(torch.Tensor):
        pass

    call = calls()["gae"]
    with pytest.raises(TypeError, match="gae: rewards is a Named; tensor subclasses are not supported"):
        call(rewards=call.tensors["rewards"].as_subclass(Named))
    twice = TwoTensor(call.tensors["rewards"], 2 * call.tensors["rewards"])
    with pytest.raises(TypeError, match="gae: rewards is a TwoTensor; tensor subclasses are not supported"):
        call(rewards=twice)
    parameter = torch.nn.Parameter(call.tensors["rewards"])
    assert equal(call(rewards=parameter), call())


# --------------------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    """The batch axis anywhere, in any of the tensors or in all."""
    parts = [calls(seed=seed)[name] for seed in range(4)]
    names = list(parts[0].tensors)
    function = of(parts[0])
    for shared in (None, *(names if len(names) > 1 else ())):
        each = [part.tensors | ({} if shared is None else {shared: parts[0].tensors[shared]}) for part in parts]
        dims = {k: None if k == shared else i % (parts[0].tensors[k].dim() + 1) for i, k in enumerate(names)}
        stacked = {
            k: parts[0].tensors[k] if k == shared else torch.stack([x[k] for x in each], dim=dims[k]) for k in names
        }
        expected = [torch.stack(x) for x in zip(*map(function, each), strict=True)]
        assert equal(torch.vmap(function, in_dims=(dims,))(stacked), expected), shared


def test_vmap_over_vmap_and_factors():
    call = calls()["gae"]
    gammas, lambdas = torch.tensor([0.9, 0.99]), torch.tensor([0.0, 0.5, 1.0])

    def advantages(gamma, lambda_):
        return call(gamma=gamma, lambda_=lambda_).advantages

    table = torch.vmap(torch.vmap(advantages, in_dims=(None, 0)), in_dims=(0, None))(gammas, lambdas)
    for i, gamma in enumerate(gammas):
        for j, lambda_ in enumerate(lambdas):
            assert torch.equal(table[i, j], advantages(gamma, lambda_))


def test_vmap_does_not_write_to_out():
    call = calls()["affine_scan"]
    with pytest.raises(ValueError, match="affine_scan: out was given under torch.vmap.*pass out=None"):
        torch.vmap(lambda x, out: rlt.affine_scan(x, 0.9, out=out))(call.tensors["alpha"], torch.empty(3, 7))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_func_grad(name):
    parts = [calls(seed=seed, dtype=torch.float64)[name] for seed in range(3)]
    floats = [k for k, x in parts[0].tensors.items() if x.is_floating_point()]

    def loss(given, rest, differentiable=True):
        results = of(parts[0], differentiable=differentiable)(rest | given)
        return sum((k + 1) * x.square().sum() for k, x in enumerate(results))

    def split(tensors):
        return {k: tensors[k] for k in floats}, {k: x for k, x in tensors.items() if k not in floats}

    expected = []
    for part in parts:
        given, rest = split(part.tensors)
        leaves = {k: x.clone().requires_grad_() for k, x in given.items()}
        gradients = torch.autograd.grad(
            loss(leaves, rest), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        expected.append(dict(zip(floats, gradients, strict=True)))
        for k, x in torch.func.grad(loss)(given, rest).items():
            assert_close(x, expected[-1][k], max_error=1e-12, name=k)
        constant = torch.func.grad(lambda given, rest: loss(given, rest, False))(given, rest)
        assert not any(x.any() for x in constant.values())
    stacked = split({k: torch.stack([part.tensors[k] for part in parts]) for k in parts[0].tensors})
    for k, x in torch.vmap(torch.func.grad(loss))(*stacked).items():
        assert_close(x, torch.stack([gradients[k] for gradients in expected]), max_error=1e-12, name=k)


def test_second_derivatives_through_functorch():
    call = calls(dtype=torch.float64)["td_lambda_returns"]

    def loss(rewards):
        return call(rewards=rewards, differentiable=True).square().sum()

    rewards = call.tensors["rewards"]
    hessian = torch.func.jacrev(torch.func.grad(loss))(rewards)
    leaf = rewards.clone().requires_grad_()
    assert_close(hessian, torch.autograd.functional.hessian(loss, leaf), max_error=1e-12)


def test_forward_mode_is_refused_in_words():
    call = calls()["gae"]
    rewards = call.tensors["rewards"]
    results, tangents = torch.func.jvp(lambda x: call(rewards=x).advantages, (rewards,), (torch.ones_like(rewards),))
    assert torch.equal(results, call().advantages)
    assert not tangents.any()  # constants
    with pytest.raises(RuntimeError, match="forward mode AD|forward-mode AD|jvp"):
        torch.func.jvp(
            lambda x: call(rewards=x, differentiable=True).advantages, (rewards,), (torch.ones_like(rewards),)
        )


# ---------------------------------------------------------------------------------------------------- states of a call


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_and_autocast(name):
    call = calls()[name]
    expected = call()
    given = call.tensors
    leaves = {k: x.clone().requires_grad_() if x.is_floating_point() else x for k, x in given.items()}
    for differentiable in (False, True):
        wanted = of(call, differentiable=differentiable)(given)
        for _ in range(2):
            with torch.inference_mode():
                assert equal(of(call, differentiable=differentiable)(leaves), expected)
                assert equal(of(call)({k: x.clone() for k, x in given.items()}), expected)
            with torch.no_grad():
                results = of(call, differentiable=differentiable)(leaves)
                assert equal(results, expected)
                assert not any(x.requires_grad for x in results)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert equal(of(call, differentiable=differentiable)(given), wanted)


def test_results_of_inference_mode_are_inputs_and_outputs_of_it():
    call = calls()["gae"]
    expected = call()
    with torch.inference_mode():
        out = tuple(torch.empty(3, 7) for _ in range(2))
        for _ in range(3):
            assert equal(call(out=out), expected)
    for _ in range(3):
        assert equal(call(rewards=call.tensors["rewards"]), expected)
