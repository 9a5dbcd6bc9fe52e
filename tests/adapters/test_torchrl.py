"""TorchRL's functions computed by rl_triton, against TorchRL's own and against loops in float64 from the equations.

TorchRL never compares its V-trace with a reference, and compares its vectorised forms with its loops; these tests have
an oracle of their own for every function. Its results in float64 are only exact to 1e-6 (γ and λ pass through float32).
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchrl", reason="TorchRL is not installed")

from tensordict import MemoryMappedTensor
from torchrl.objectives.value import advantages, functional

import rl_triton as rlt
from rl_triton.adapters import status, torchrl
from rl_triton.adapters._functions import MISFIT, TRACEABLE, TRACED, NotServedError
from rl_triton.adapters.torchrl import _behaviour, _functionals

NAMES = tuple(_functionals.NAMES)
STOCK = {name: getattr(functional, name) for name in NAMES}


@pytest.fixture(autouse=True)
def stock_afterwards():
    yield
    torchrl.unpatch()
    assert all(getattr(functional, name) is STOCK[name] for name in NAMES)


def counts(name, module=functional):
    entry = status().get(f"{module.__name__}.{name}", {"served": 0, "fallen_back": {}})
    return entry["served"], dict(entry["fallen_back"])


# --------------------------------------------------------------------------------------------------------- the oracles


def rows_of(time_dim, *tensors):
    """Each tensor as float64 [T, rows], and how to bring an array like that back."""
    shape = tensors[0].shape
    arrays = [np.moveaxis(x.detach().cpu().double().numpy(), time_dim, 0) for x in tensors]
    flat = [x.reshape(x.shape[0], -1) for x in arrays]

    def back(x):
        moved = x.reshape(arrays[0].shape)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(moved, 0, time_dim))).reshape(shape)

    return flat, back


def oracle(name, data, gamma, lmbda, time_dim, rho_thresh=1.0, c_thresh=1.0):
    """The results as a tuple, float64. gamma, lmbda and the bars: numbers, or tensors in the shape of the reward."""

    def full(x):
        x = x.detach().double().cpu() if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64)
        return x.expand(data["reward"].shape)

    zero = torch.zeros_like(data["reward"], dtype=torch.float64)
    inputs = [data.get(key, zero) for key in ("reward", "state_value", "next_state_value", "log_pi", "log_mu")]
    done = data["done"]
    terminated = done if data.get("terminated") is None else data["terminated"]
    (r, v, nv, log_pi, log_mu, d, te, g, l, rho_bar, c_bar), back = rows_of(
        time_dim, *inputs, done, terminated, *map(full, (gamma, lmbda, rho_thresh, c_thresh))
    )
    d, te = d != 0, te != 0
    n_steps = len(r)
    after = np.where(te, 0.0, nv)  # V of the successor
    result, advantage = np.zeros_like(r), np.zeros_like(r)
    for t in reversed(range(n_steps)):
        edge = t == n_steps - 1
        later = np.zeros_like(r[t]) if edge else result[t + 1]
        if "generalized_advantage" in name:
            delta = r[t] + g[t] * after[t] - v[t]
            result[t] = delta + np.where(d[t], 0.0, g[t] * l[t] * later)
        elif "td" in name:
            lam = l[t] if "lambda" in name else 1.0
            ahead = after[t] if edge else np.where(d[t], after[t], result[t + 1])
            result[t] = r[t] + g[t] * ((1 - lam) * after[t] + lam * ahead)
        elif name == "reward2go":
            result[t] = r[t] + np.where(d[t], 0.0, g[t] * later)
        else:
            w = np.exp(log_pi[t] - log_mu[t])
            rho, c = np.minimum(w, rho_bar[t]), np.minimum(w, c_bar[t])
            following = nv[t] if edge else np.where(d[t], nv[t], v[t + 1] + result[t + 1])
            result[t] = rho * (r[t] + g[t] * after[t] - v[t]) + np.where(d[t], 0.0, g[t] * c * later)
            advantage[t] = rho * (r[t] + g[t] * np.where(te[t], 0.0, following) - v[t])
    if "generalized_advantage" in name:
        return back(result), back(result + v)
    if "vtrace" in name:
        return back(advantage), back(result + v)
    return (back(result),)


def make_data(shape, *, dtype=torch.float32, ends=0.2, seed=0, with_terminated=True, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def floats(scale=1.0):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return x.to(dtype).to(device)

    data = {name: floats() for name in ("reward", "state_value", "next_state_value")}
    data |= {name: floats(0.5) for name in ("log_pi", "log_mu")}
    terminated = torch.rand(shape, generator=generator) < ends / 2
    data["done"] = (terminated | (torch.rand(shape, generator=generator) < ends / 2)).to(device)
    data["terminated"] = terminated.to(device) if with_terminated else None
    return data


def arguments(name, data, gamma, lmbda, **options):
    """Keyword arguments for a function of TorchRL's."""
    given = {key: x for key, x in data.items() if key in inspect.signature(STOCK[name]).parameters}
    given["gamma"] = gamma
    if "lmbda" in inspect.signature(STOCK[name]).parameters:
        given["lmbda"] = lmbda
    return given | options


def results(function, *args, **kwargs):
    result = function(*args, **kwargs)
    return result if isinstance(result, tuple) else (result,)


def close(results_, expected, bound):
    for x, y in zip(results_, expected, strict=True):
        assert x.shape == y.shape
        error = (x.detach().cpu().double() - y.detach().cpu().double()).abs().max()
        assert error <= bound * max(1.0, y.abs().max())


# -------------------------------------------------------------------------------------------------------------- values


SHAPES = [
    ((1, 1), (-2,)),
    ((7, 1), (-2, 0)),
    ((4, 6, 1), (-2, 1)),
    ((3, 5, 2), (-2, -1, 0)),
    ((2, 3, 9, 2), (2, -2, 1)),
]


@st.composite
def calls(draw):
    shape, dims = draw(st.sampled_from(SHAPES))
    time_dim = draw(st.sampled_from(dims))
    # One kind of numbers for both factors, and float64 with floats alone: each combination is a loop to compile.
    dtype, kinds = draw(
        st.sampled_from(
            [(torch.float64, ["float"]), (torch.float32, ["float"]), (torch.float32, ["0-d", "[1]", "all"])]
        )
    )
    data = make_data(
        shape,
        dtype=dtype,
        ends=draw(st.sampled_from([0.0, 0.1, 0.6, 2.0])),
        seed=draw(st.integers(0, 2**31)),
    )

    def factor(numbers):
        number, kind = draw(st.sampled_from(numbers)), draw(st.sampled_from(kinds))
        if kind == "float":
            return number
        if kind == "all":
            generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
            return torch.rand(shape, generator=generator, dtype=dtype) * number
        return torch.full((1,) * (kind == "[1]"), float(number), dtype=dtype)

    return shape, time_dim, data, factor([0.0, 0.5, 0.99, 1.0, 1]), factor([0.0, 0.9, 1.0, 1])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(call=calls())
def test_against_the_equations(name, call):
    shape, time_dim, data, gamma, lmbda = call
    if name == "reward2go" and isinstance(gamma, torch.Tensor) and gamma.numel() > 1:
        gamma = 0.9
    given_ = arguments(name, data, gamma, lmbda, time_dim=time_dim)
    if time_dim == -2:
        del given_["time_dim"]
    with torchrl.patched():
        before = counts(name)
        ours = results(getattr(functional, name), **given_)
        assert counts(name) == (before[0] + 1, before[1])
    dtype = data["reward"].dtype
    close(ours, oracle(name, data, gamma, lmbda, time_dim), 2e-12 if dtype == torch.float64 else 2e-5)
    # TorchRL's output where all numbers of a call have one dtype
    assert {x.dtype for x in ours} <= {dtype, torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(call=calls())
def test_against_torchrl(name, call):
    """The same numbers, shapes and dtypes, in TorchRL's own tolerance."""
    shape, time_dim, data, gamma, lmbda = call
    loop = STOCK[name.removeprefix("vec_")]
    if name == "reward2go":
        gamma = 0.9
    given_ = arguments(name, data, gamma, lmbda, time_dim=time_dim)
    if name == "vtrace_advantage_estimate" and isinstance(gamma, torch.Tensor):
        given_["gamma"] = gamma.reshape(()) if gamma.numel() == 1 else gamma
    stock = results(loop, **given_)
    with torchrl.patched():
        ours = results(getattr(functional, name), **given_)
    close(ours, stock, 1e-4)
    if name == loop.__name__:
        assert [x.dtype for x in ours] == [x.dtype for x in stock]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [0.9, 1, torch.tensor(0.9), torch.tensor(0.9, dtype=torch.float64), torch.tensor(1)])
def test_dtypes(name, gamma):
    """Loops keep the dtype of the next values, vectorised forms promote, 16-bit numbers to float32 with a float γ."""
    pairs = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.int64, torch.float32)]
    pairs += [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    if gamma == 0.9 and not isinstance(gamma, torch.Tensor):  # each is a loop to compile
        pairs += [(torch.float64, torch.float32), (torch.float32, torch.float64)]
    for reward_dtype, value_dtype in pairs:
        data = make_data((2, 5, 1))
        data["reward"] = (data["reward"] * 3).to(reward_dtype)
        data |= {key: data[key].to(value_dtype) for key in ("state_value", "next_state_value", "log_pi")}
        given_ = arguments(name, data, gamma, 0.8)
        try:
            stock = results(STOCK[name], **given_)
        except RuntimeError:  # its convolution does not mix dtypes
            continue
        with torchrl.patched():
            ours = results(getattr(functional, name), **given_)
        assert [x.dtype for x in ours] == [x.dtype for x in stock], (reward_dtype, value_dtype)
        sixteen = any(x.dtype.itemsize < 4 for x in (*ours, data["next_state_value"]))
        close(ours, stock, 0.05 if sixteen else 1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(name, dtype):
    """TorchRL's TD loops and rewards to go accumulate in 16 bits, and lose a tenth of the value over 512 steps."""
    data = make_data((2, 512, 1), dtype=dtype, ends=0.0)
    ours = results(_functionals.NAMES[name], **arguments(name, data, 0.99, 0.95))
    expected = oracle(name, data, 0.99, 0.95, -2)
    close(ours, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMES)
def test_done_alone(name):
    """Without `terminated`, every end is a terminal state."""
    data = make_data((3, 8, 2), ends=0.5, with_terminated=False)
    ours = results(_functionals.NAMES[name], **arguments(name, data, 0.9, 0.8))
    close(ours, oracle(name, data, 0.9, 0.8, -2), 2e-5)
    close(ours, results(STOCK[name], **arguments(name, data, 0.9, 0.8)), 1e-4)


def test_one_axis_alone():
    """[T] needs time_dim=-1; with time_dim=0 TorchRL returns [T, 1]."""
    for name in NAMES:
        data = make_data((6,))
        for time_dim in (-1, 0):
            given_ = arguments(name, data, 0.9, 0.8, time_dim=time_dim)
            stock, ours = results(STOCK[name], **given_), results(_functionals.NAMES[name], **given_)
            close(ours, stock, 1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if "td" in name or "generalized" in name])
@pytest.mark.parametrize(("shape", "time_dim"), [((6, 1), -2), ((3, 6, 1), -2), ((3, 6, 2), 1), ((2, 3, 6, 4), -2)])
@pytest.mark.parametrize("form", ["[T, 1]", "[F]", "all", "[B, 1, 1]"])
def test_factors_that_broadcast(name, shape, time_dim, form):
    data = make_data(shape)
    own = {"[T, 1]": (6, 1), "[F]": shape[-1:], "all": shape, "[B, 1, 1]": (*shape[:-2], 1, 1)}[form]
    if time_dim >= 0 and len(own) != len(shape):
        pytest.skip("a positive time_dim counts the axes of each tensor")
    gamma, lmbda = torch.rand(own) * 0.5 + 0.5, torch.rand(own)
    for g, l in ((gamma, lmbda), (gamma, 0.9), (0.9, lmbda), (torch.tensor(0.9), lmbda)):
        ours = results(_functionals.NAMES[name], **arguments(name, data, g, l, time_dim=time_dim))
        close(ours, oracle(name, data, g, l, time_dim), 2e-5)


@pytest.mark.parametrize("bar", [0.7, 1, torch.tensor(0.7), "per feature", float("inf")])
def test_bars_of_vtrace(bar):
    data = make_data((3, 8, 2))
    if bar == "per feature":
        bar = torch.tensor([0.7, 1.3])
    for options in ({"rho_thresh": bar}, {"c_thresh": bar}, {"rho_thresh": bar, "c_thresh": 0.5}):
        given_ = arguments("vtrace_advantage_estimate", data, 0.9, None, **options)
        ours = _functionals.vtrace_advantage_estimate(**given_)
        close(ours, oracle("vtrace_advantage_estimate", data, 0.9, 1.0, -2, **options), 2e-5)
        close(ours, STOCK["vtrace_advantage_estimate"](**given_), 1e-4)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
@pytest.mark.parametrize("name", NAMES)
def test_memory_layouts(name, layout):
    data = make_data((4, 6, 2))

    def change(x):
        if layout == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return x[..., :1].expand(4, 6, 2) if layout == "expanded" else x.repeat(1, 1, 3)[..., ::3]

    data = {key: change(x) for key, x in data.items()}
    ours = results(_functionals.NAMES[name], **arguments(name, data, 0.9, 0.8))
    close(ours, oracle(name, data, 0.9, 0.8, -2), 2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_kernels(name, backend):
    """What runs on a GPU: the same calls through the kernels, next to the CPU backend."""
    data = make_data((3, 6, 2), device=backend.device)
    for time_dim, lmbda in ((-2, 0.8), (1, torch.tensor(0.8, device=backend.device))):
        given_ = arguments(name, data, torch.tensor(0.9, device=backend.device), lmbda, time_dim=time_dim)
        ours = results(_functionals.NAMES[name], **given_)
        close(ours, oracle(name, data, 0.9, 0.8, time_dim), 2e-5)


# ----------------------------------------------------------------------------------------------- what users suffer from


def test_zero_decay():
    """γλ = 0, or tiny, crashes the vectorised forms and rewards to go."""
    data = make_data((2, 6, 1))
    for gamma, lmbda in ((0.9, 0.0), (0.0, 0.9), (0.9, 1e-9), (-0.5, 0.9)):
        for name in NAMES:
            ours = results(_functionals.NAMES[name], **arguments(name, data, gamma, lmbda))
            close(ours, oracle(name, data, gamma, lmbda, -2), 2e-5)


def test_an_environment_that_never_ends():
    """The vectorised forms pad every trajectory to the longest: here 60 trajectories of 8 steps to 4096."""
    data = make_data((8, 4096, 1), ends=0.0)
    data["terminated"][:7, 7::8] = True
    data["done"][:7, 7::8] = True
    for name in ("vec_generalized_advantage_estimate", "vec_td_lambda_return_estimate", "reward2go"):
        ours = results(_functionals.NAMES[name], **arguments(name, data, 0.99, 0.95))
        close(ours, oracle(name, data, 0.99, 0.95, -2), 2e-5)


def test_numbers_on_the_device_are_not_read_on_the_host(monkeypatch):
    def read(self):
        raise AssertionError("a tensor was read on the host")

    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, method, read)
    data = make_data((3, 6, 1))
    gamma, lmbda = torch.tensor(0.9), torch.tensor(0.8)
    for name in NAMES:
        _functionals.NAMES[name](**arguments(name, data, gamma, lmbda))


@pytest.mark.gpu_only
def test_no_synchronization():
    data = make_data((64, 128, 1), device="cuda")
    gamma, lmbda = torch.tensor(0.9, device="cuda"), torch.tensor(0.8, device="cuda")
    for name in NAMES:
        given_ = arguments(name, data, gamma, lmbda, time_dim=1)
        _functionals.NAMES[name](**given_)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = results(_functionals.NAMES[name], **given_)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        close(ours, oracle(name, data, 0.9, 0.8, 1), 2e-5)


@pytest.mark.gpu_only
@pytest.mark.parametrize("name", NAMES)
def test_in_a_cuda_graph(name):
    data = make_data((64, 128, 1), device="cuda")
    given_ = arguments(name, data, torch.tensor(0.9, device="cuda"), torch.tensor(0.8, device="cuda"))
    with torchrl.patched():
        function = getattr(functional, name)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            function(**given_)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours = results(function, **given_)
        data["reward"].mul_(2)
        graph.replay()
    torch.cuda.synchronize()
    close(ours, oracle(name, data, 0.9, 0.8, -2), 2e-5)


@pytest.mark.gpu_only
def test_a_number_in_host_memory_beside_device_data():
    data = make_data((4, 8, 1), device="cuda")
    for name in NAMES:
        ours = results(_functionals.NAMES[name], **arguments(name, data, torch.tensor(0.9), torch.tensor(0.8)))
        close(ours, oracle(name, data, 0.9, 0.8, -2), 2e-5)


def test_nothing_leaks_over_an_episode_end():
    """NaN in one episode: TorchRL's loops carry it into the episodes before; here it stays in its own."""
    data = make_data((1, 8, 1), ends=0.0)
    data["terminated"][:, 3] = data["done"][:, 3] = True
    clean = {key: x.clone() for key, x in data.items()}
    data["reward"][:, 6] = float("nan")
    data["next_state_value"][:, 3] = float("nan")  # of a terminal state
    for name in NAMES:
        ours = results(_functionals.NAMES[name], **arguments(name, data, 0.9, 0.8))
        expected = results(_functionals.NAMES[name], **arguments(name, clean, 0.9, 0.8))
        for x, y in zip(ours, expected, strict=True):
            assert torch.equal(x[:, :4], y[:, :4])
            assert x[:, 6].isnan().all()


def test_terminated_without_done_cuts():
    """The one rule that differs: TorchRL's environments never emit such a step."""
    data = make_data((1, 6, 1), ends=0.0)
    data["terminated"][:, 2] = True
    legal = data | {"done": data["terminated"]}
    for name in NAMES:
        if "terminated" in inspect.signature(STOCK[name]).parameters:
            ours = results(_functionals.NAMES[name], **arguments(name, data, 0.9, 0.8))
            close(ours, results(STOCK[name], **arguments(name, legal, 0.9, 0.8)), 1e-5)


def test_inputs_are_left_alone():
    data = make_data((3, 5, 1))
    before = {key: x.clone() for key, x in data.items()}
    for name in NAMES:
        _functionals.NAMES[name](**arguments(name, data, 0.9, 0.8))
    assert all(torch.equal(data[key], before[key]) for key in data)


def test_memory_mapped_storage(tmp_path):
    data = make_data((3, 5, 1))
    mapped = {key: MemoryMappedTensor.from_tensor(x, filename=tmp_path / key) for key, x in data.items()}
    for name in NAMES:
        ours = results(_functionals.NAMES[name], **arguments(name, mapped, 0.9, 0.8))
        assert all(type(x) is torch.Tensor for x in ours)
        close(ours, oracle(name, data, 0.9, 0.8, -2), 2e-5)


# ----------------------------------------------------------------------------------------------------------- gradients


def gradients(function, name, data, gamma, lmbda, factors_too):
    data = {
        key: x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for key, x in data.items()
    }
    numbers = [torch.tensor(x, dtype=torch.float64, requires_grad=True) if factors_too else x for x in (gamma, lmbda)]
    given_ = arguments(name, data, *numbers)
    outputs = results(function, **given_)
    weights = [torch.arange(1.0, x.numel() + 1, dtype=torch.float64).reshape(x.shape).sin() for x in outputs]
    wanted = [x for x in given_.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.autograd.grad(sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)), wanted)


@pytest.mark.parametrize("factors_too", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("gamma", "lmbda"), [(0.9, 0.8), (1.0, 1.0)])
def test_gradients_are_those_of_the_loop(name, factors_too, gamma, lmbda):
    """Those of scalar γ and λ too, which TorchRL's vectorised forms get wrong."""
    if name == "reward2go" and factors_too:
        pytest.skip("TorchRL reads γ on the host, so it has no gradient to compare with")
    data = make_data((2, 6, 2), dtype=torch.float64, ends=0.4)
    if factors_too and name == "vtrace_advantage_estimate":
        lmbda = None
    numbers = (gamma, 0.0 if lmbda is None else lmbda)
    loop = STOCK[name.removeprefix("vec_")]
    stock = gradients(loop, loop.__name__, data, *numbers, factors_too)
    with torchrl.patched():
        ours = gradients(getattr(functional, name), name, data, *numbers, factors_too)
    close(ours, stock, 1e-5)


def test_on_policy_gradients_of_vtrace():
    """Where the ratio is its bar exactly, the gradient is the ratio's, as in TorchRL."""
    data = make_data((2, 5, 1), dtype=torch.float64)
    data["log_mu"] = data["log_pi"].clone()
    name = "vtrace_advantage_estimate"
    stock = gradients(STOCK[name], name, data, 0.9, 0.0, False)
    close(gradients(_functionals.NAMES[name], name, data, 0.9, 0.0, False), stock, 1e-6)


def test_second_derivatives():
    data = make_data((1, 4, 1), dtype=torch.float64)
    value, next_value, reward = (data[key].requires_grad_() for key in ("state_value", "next_state_value", "reward"))
    gamma = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def function(gamma, value, next_value, reward):
        return _functionals.generalized_advantage_estimate(gamma, 0.8, value, next_value, reward, data["done"])[0].sin()

    assert torch.autograd.gradcheck(function, (gamma, value, next_value, reward))
    assert torch.autograd.gradgradcheck(function, (gamma, value, next_value, reward))


def test_results_without_a_graph():
    data = make_data((2, 5, 1))
    data["state_value"].requires_grad_()
    with torchrl.patched():
        for name in NAMES:
            given_ = arguments(name, data, 0.9, 0.8)
            wants = any(isinstance(x, torch.Tensor) and x.requires_grad for x in given_.values())
            assert any(x.requires_grad for x in results(getattr(functional, name), **given_)) == wants
            with torch.no_grad():
                assert not any(x.requires_grad for x in results(getattr(functional, name), **given_))


# ------------------------------------------------------------------------------------------- what TorchRL's code serves


def with_(**changes):
    return lambda data: {key: changes[key](x) if key in changes else x for key, x in data.items()}


TENSORS = ("reward", "next_state_value", "done", "terminated")
FALLBACKS = {
    "rolling_gamma=False": (
        "td_lambda_return_estimate",
        lambda data: data | {"rolling_gamma": False, "gamma": torch.rand(3, 6, 2)},
    ),
    "tensors of different shapes": ("td1_return_estimate", with_(reward=lambda x: x[:1])),
    "no steps or no rows": ("td_lambda_return_estimate", with_(**dict.fromkeys(TENSORS, lambda x: x[:0]))),
    "flags that are not bool": ("generalized_advantage_estimate", with_(done=lambda x: x.int())),
    "values that are no floating-point numbers": (
        "td_lambda_return_estimate",
        with_(next_state_value=lambda x: x.int()),
    ),
    "time_dim is no axis of the tensors": ("generalized_advantage_estimate", lambda data: data | {"time_dim": 5}),
    "time_dim is not an int": ("td1_return_estimate", lambda data: data | {"time_dim": np.int64(1)}),
    "gamma does not broadcast to the reward": (
        "generalized_advantage_estimate",
        lambda data: data | {"gamma": torch.rand(5, 1)},
    ),
    "gamma has more axes than the reward": (
        "td_lambda_return_estimate",
        lambda data: data | {"gamma": torch.rand(1, 1, 1, 1)},
    ),
    "gamma is a bool": ("td1_return_estimate", lambda data: data | {"gamma": True}),
    "gamma is no real number": ("td1_return_estimate", lambda data: data | {"gamma": torch.tensor(True)}),
    "gamma is a float32": ("td1_return_estimate", lambda data: data | {"gamma": np.float32(0.9)}),
    "gamma is not a single number": ("reward2go", lambda data: data | {"gamma": torch.full((6, 2), 0.9)}),
    "rewards that are no floating-point numbers": ("reward2go", with_(reward=lambda x: x.long())),
    "gamma is on another device": (
        "td1_return_estimate",
        lambda data: data | {"gamma": torch.empty((), device="meta")},
    ),
    "next_state_value is a Subclass": (
        "td1_return_estimate",
        with_(next_state_value=lambda x: x.as_subclass(Subclass)),
    ),
}


class Subclass(torch.Tensor):
    pass


def outcome(function, **given_):
    try:
        return results(function, **given_)
    except Exception as error:
        return error


@pytest.mark.parametrize("reason", FALLBACKS)
def test_falls_back_to_torchrl_and_says_why(reason):
    """What TorchRL accepts and we do not serve gets TorchRL's numbers; what it refuses gets its error."""
    name, change = FALLBACKS[reason]
    given_ = change(arguments(name, make_data((3, 6, 2)), 0.9, 0.8))
    stock = outcome(STOCK[name], **given_)
    with torchrl.patched():
        served, before = counts(name)
        ours = outcome(getattr(functional, name), **given_)
        after = counts(name)
    assert after[0] == served
    again = name == "reward2go"  # TorchRL's own calls itself with fewer axes
    assert after[1][reason] == before.get(reason, 0) + 1 + again
    if isinstance(stock, Exception):
        assert type(ours) is type(stock)
        assert str(ours) == str(stock)
    else:
        for x, y in zip(ours, stock, strict=True):
            assert torch.equal(x, y) or (x.isnan() & y.isnan()).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 4, 2), (3, 3, 1), (2, 2, 2), (4, 1), (1, 1, 1), (3, 3)])
def test_nothing_is_broadcast(name, shape):
    """An argument of another shape, which would broadcast or not: TorchRL's error, or what TorchRL makes of it."""
    *rows, n_steps, n_features = shape
    others = {shape[:-1], (*shape[:-1], 1), (1, *shape[1:]), shape[1:], (n_steps,), (1,), (), (*rows, 1, n_features)}
    others |= {(2, *shape), (*shape, 1), shape[::-1]}
    torchrl.patch()
    for time_dim in (-2, 0, 1):
        given_ = arguments(name, make_data(shape, ends=0.6), 0.9, 0.8, time_dim=time_dim)
        for key in (key for key, x in given_.items() if isinstance(x, torch.Tensor)):
            for other in others - {shape}:
                wrong = given_ | {key: torch.randn(other)}
                if key in ("done", "terminated"):  # no step is terminal and not done
                    wrong[key] = torch.full(other, key == "done")
                before = counts(name)[1]
                ours = outcome(getattr(functional, name), **wrong)
                assert counts(name)[1] != before
                stock = outcome(STOCK[name], **wrong)
                assert type(ours) is type(stock), (key, other)
                if isinstance(stock, Exception):
                    assert str(ours) == str(stock)
                else:
                    close(ours, stock, 1e-5)


def test_positional_arguments_and_wrong_calls():
    data = make_data((2, 5, 1))
    r, v, nv, d, te = (data[key] for key in ("reward", "state_value", "next_state_value", "done", "terminated"))
    lp, lm = data["log_pi"], data["log_mu"]
    positional = {
        "generalized_advantage_estimate": (0.9, 0.8, v, nv, r, d, te),
        "vec_generalized_advantage_estimate": (0.9, 0.8, v, nv, r, d, te),
        "td_lambda_return_estimate": (0.9, 0.8, nv, r, d, te, None),
        "vec_td_lambda_return_estimate": (0.9, 0.8, nv, r, d, te, None),
        "td1_return_estimate": (0.9, nv, r, d, te, None),
        "vec_td1_return_estimate": (0.9, nv, r, d, te, None),
        "vtrace_advantage_estimate": (0.9, lp, lm, v, nv, r, d, te, 1.0, 1.0),
        "reward2go": (r, d, 0.9),
    }
    stock = {name: results(STOCK[name], *given_) for name, given_ in positional.items()}
    with torchrl.patched():
        for name, given_ in positional.items():
            before = counts(name)
            close(results(getattr(functional, name), *given_), stock[name], 1e-5)
            assert counts(name)[0] == before[0] + 1
            with pytest.raises(TypeError):
                getattr(functional, name)(*given_, 1, 2, 3)
            with pytest.raises(TypeError):
                getattr(functional, name)()
        with pytest.raises(TypeError):
            functional.generalized_advantage_estimate(*positional["generalized_advantage_estimate"], -2)
        assert all(counts(name)[1][MISFIT] >= 1 for name in NAMES)
        # TorchRL ignores time_dim by position here, or takes it for something else
        stock = STOCK["vtrace_advantage_estimate"](*positional["vtrace_advantage_estimate"], -2)
        close(functional.vtrace_advantage_estimate(*positional["vtrace_advantage_estimate"], -2), stock, 0)
        assert counts("vtrace_advantage_estimate")[1]["time_dim by position"] >= 1


@pytest.mark.parametrize("name", [name for name in NAMES if "advantage" in name and "generalized" not in name])
def test_the_oracle_is_not_blind(name):
    """A mix-up of the two flags shows."""
    data = make_data((3, 8, 1), ends=0.8)
    swapped = data | {"done": data["terminated"], "terminated": data["done"]}
    a, b = (oracle(name, x, 0.9, 0.8, -2)[0] for x in (data, swapped))
    assert (a - b).abs().max() > 0.1


def test_an_argument_that_a_later_version_adds():
    """What TorchRL's own function takes and we do not know of, it gets."""

    def newer(*args, valid=None, **kwargs):
        return valid

    with torchrl.patched():
        for name in NAMES:
            target = torchrl._patches[functional, name]
            dispatcher = target._dispatcher(newer)
            before = counts(name)
            assert dispatcher(**arguments(name, make_data((2, 4, 1)), 0.9, 0.8), valid=3) == 3
            assert counts(name)[1][MISFIT] == before[1].get(MISFIT, 0) + 1


def test_td_advantages_follow():
    """TorchRL's TD advantages call the returns by name."""
    data = make_data((3, 8, 1))
    for family in ("", "vec_"):
        for kind, extra in (("td1", {}), ("td_lambda", {"lmbda": 0.8})):
            function = getattr(functional, f"{family}{kind}_advantage_estimate")
            given_ = {key: data[key] for key in ("state_value", "next_state_value", "reward", "done", "terminated")}
            stock = function(gamma=0.9, **given_, **extra)
            with torchrl.patched():
                before = counts(f"{family}{kind}_return_estimate")
                ours = function(gamma=0.9, **given_, **extra)
                assert counts(f"{family}{kind}_return_estimate")[0] == before[0] + 1
            close((ours,), (stock,), 1e-5)


def test_transforms_and_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    data = make_data((4, 3, 5, 1))
    name = "td_lambda_return_estimate"
    tensors = [data[key] for key in ("next_state_value", "reward", "done", "terminated")]

    def expect(reason, run):
        """Served where the library's operations are operators; else TorchRL's, with the reason."""
        served, before = counts(name)
        result = run()
        after = counts(name)
        if TRACEABLE:
            assert after[0] == served + 1
        else:
            assert after[1][reason] == before.get(reason, 0) + 1
        return result

    with torchrl.patched():
        function = functools.partial(functional.td_lambda_return_estimate, 0.9, 0.8)
        expected = function(*tensors)
        mapped = expect("inside a functorch transform (vmap, grad, jvp)", lambda: torch.vmap(function)(*tensors))
        close((mapped,), (expected,), 1e-5)
        with Mode():
            close((expect("under a dispatch mode", lambda: function(*tensors)),), (expected,), 1e-5)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(tensors[1], torch.ones_like(tensors[1]))
            tangent = torch.autograd.forward_ad.unpack_dual(function(tensors[0], dual, *tensors[2:])).tangent
        assert tangent is not None
        assert counts(name)[1]["inside forward-mode differentiation"] >= 1


def test_errors_of_the_library_are_counted(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("gae: no")

    monkeypatch.setattr(rlt, "gae", refuse)
    data = make_data((2, 5, 1))
    given_ = arguments("generalized_advantage_estimate", data, 0.9, 0.8)
    with torchrl.patched():
        close(functional.generalized_advantage_estimate(**given_), STOCK["generalized_advantage_estimate"](**given_), 0)
    assert counts("generalized_advantage_estimate")[1]["rl_triton refused the input: gae: no"] == 1


def test_under_torch_compile():
    """Without a break of the graph. Before the library's operations are operators, TorchRL's loop is traced and the
    trace is counted."""
    data = make_data((2, 3, 1))
    tensors = [data[key] for key in ("state_value", "next_state_value", "reward", "done", "terminated")]

    def loss(gamma, *tensors):
        return advantages.generalized_advantage_estimate(gamma, 0.8, *tensors)[0].square().mean()

    expected = loss(torch.tensor(0.9), *tensors)
    with torchrl.patched():
        before = counts("generalized_advantage_estimate", advantages)
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(torch.tensor(0.9), *tensors), expected)
        after = counts("generalized_advantage_estimate", advantages)
        assert after[0] == before[0]
        assert after[1].get(TRACED, 0) == before[1].get(TRACED, 0) + (not TRACEABLE)
        torch.testing.assert_close(loss(torch.tensor(0.9), *tensors), expected)
        assert counts("generalized_advantage_estimate", advantages)[0] == before[0] + 1


# --------------------------------------------------------------------------------------------------- patch and unpatch


def bindings():
    import torchrl.objectives.dreamer_v3 as dreamer

    return [(module, name) for module in (functional, advantages, dreamer) for name in NAMES if hasattr(module, name)]


def test_every_binding_is_replaced_and_hit():
    found = bindings()
    assert len(found) == 16
    for module, name in found:
        assert getattr(module, name) is STOCK[name]
    with torchrl.patched():
        assert torchrl.is_patched()
        for module, name in found:
            before = counts(name, module)
            getattr(module, name)(**arguments(name, make_data((2, 4, 1)), 0.9, 0.8))
            assert counts(name, module)[0] == before[0] + 1
            assert status()[f"{module.__name__}.{name}"]["active"]
    for module, name in found:
        assert getattr(module, name) is STOCK[name]
        assert not status()[f"{module.__name__}.{name}"]["active"]


def test_patch_is_idempotent_and_exactly_reversible():
    assert not torchrl.is_patched()
    torchrl.patch()
    installed = [getattr(module, name) for module, name in bindings()]
    torchrl.patch()
    assert all(getattr(module, name) is x for (module, name), x in zip(bindings(), installed, strict=True))
    torchrl.unpatch()
    torchrl.unpatch()
    assert not torchrl.is_patched()
    assert all(vars(module)[name] is STOCK[name] for module, name in bindings())


def test_contexts_nest():
    with torchrl.patched():
        with torchrl.patched():
            assert torchrl.is_patched()
        assert torchrl.is_patched()
        torchrl.patch()
    assert torchrl.is_patched()
    torchrl.unpatch()
    with pytest.raises(KeyError), torchrl.patched():
        raise KeyError
    assert not torchrl.is_patched()


def test_contexts_in_threads():
    def work():
        for _ in range(10):
            with torchrl.patched():
                assert torchrl.is_patched()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(vars(module)[name] is STOCK[name] for module, name in bindings())


def test_signature_and_doc_stay():
    with torchrl.patched():
        for module, name in bindings():
            function = getattr(module, name)
            assert inspect.signature(function) == inspect.signature(STOCK[name])
            assert function.__doc__ == STOCK[name].__doc__
            assert function.__wrapped__ is STOCK[name]
            assert pickle.loads(pickle.dumps(function)) is function


LOADED = """
import pickle, sys, torch
estimator, function, held = pickle.load(sys.stdin.buffer)
assert type(estimator).__module__ == "torchrl.objectives.value.advantages"
flags = torch.zeros(2, 4, 1, dtype=torch.bool)
for each in (function, held):
    patches = [x.cell_contents for x in each.__closure__ if hasattr(x.cell_contents, "served")]
    served = [patch.served for patch in patches]
    assert (each(torch.ones(2, 4, 1), flags, 0.5)[:, 0] == 1.875).all()
    assert served == [patch.served for patch in patches]
"""


def test_pickles_are_torchrls_in_a_process_that_is_not_patched():
    """By name; a function that is no longer where its name says, as cloudpickle takes it, by value."""
    cloudpickle = pytest.importorskip("cloudpickle")
    torchrl.patch()
    estimator = advantages.GAE(gamma=0.9, lmbda=0.8, value_network=None)
    held = functional.reward2go
    pickled = [pickle.dumps((estimator, held, held))]
    torchrl.unpatch()
    assert [type(x) for x in pickle.loads(pickled[0])] == [advantages.GAE, types.FunctionType, types.FunctionType]
    assert pickle.loads(pickled[0])[1] is STOCK["reward2go"]
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(held)
    pickled.append(cloudpickle.dumps((estimator, functional.reward2go, held)))
    torchrl.patch()  # `held` is served again, and not what has its name
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(STOCK["reward2go"])
    pickled.append(cloudpickle.dumps((estimator, functional.reward2go, held)))
    for data in pickled:
        result = subprocess.run([sys.executable, "-c", LOADED], input=data, capture_output=True)
        assert result.returncode == 0, result.stderr.decode()


def test_a_function_taken_while_patched_goes_back_to_torchrl():
    with torchrl.patched():
        function = functional.td1_return_estimate
    before = counts("td1_return_estimate")
    function(**arguments("td1_return_estimate", make_data((2, 4, 1)), 0.9, None))
    assert counts("td1_return_estimate") == before


def test_a_later_wrapper_is_left_in_place(monkeypatch):
    torchrl.patch()
    under = advantages.generalized_advantage_estimate
    module = types.ModuleType("somewhere")  # of the wrapper, which has what it wraps in a global
    module.under = under
    monkeypatch.setitem(sys.modules, "somewhere", module)

    @functools.wraps(under)
    def wrapper(*args, **kwargs):
        taken.append(args)
        return module.under(*args, **kwargs)

    taken = []
    advantages.generalized_advantage_estimate = wrapper
    given_ = arguments("generalized_advantage_estimate", make_data((2, 4, 1)), 0.9, 0.8)
    try:
        with pytest.warns(UserWarning, match="was wrapped after rl_triton patched it"):
            torchrl.unpatch()
        assert advantages.generalized_advantage_estimate is wrapper
        before = counts("generalized_advantage_estimate", advantages)
        wrapper(**given_)
        assert counts("generalized_advantage_estimate", advantages) == before
        torchrl.patch()
        wrapper(**given_)
        assert counts("generalized_advantage_estimate", advantages)[0] == before[0] + 1
        assert len(taken) == 2
    finally:
        advantages.generalized_advantage_estimate = under
        torchrl.unpatch()
    assert advantages.generalized_advantage_estimate is STOCK["generalized_advantage_estimate"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("way", ["patch", "patched"])
def test_modules_that_are_imported_while_patched(way, again, tmp_path, monkeypatch):
    """TorchRL's and others follow the patch while it is in force, and have TorchRL's functions afterwards."""
    code = "from torchrl.objectives.value.advantages import generalized_advantage_estimate as alias\n"
    code += f"from torchrl.objectives.value.functional import {', '.join(NAMES)}\n"
    (tmp_path / "late_user.py").write_text(code)
    (tmp_path / "late.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torchrl.__path__", [*sys.modules["torchrl"].__path__, str(tmp_path)])
    held = {}
    try:
        with contextlib.ExitStack() as stack:
            if way == "patch":
                torchrl.patch()
                stack.callback(torchrl.unpatch)
            else:
                stack.enter_context(torchrl.patched())
            modules = [importlib.import_module(name) for name in ("late_user", "torchrl.late")]
            assert torchrl.is_patched()
            if again:
                torchrl.patch()
                assert torchrl.is_patched()
                if way == "patched":
                    torchrl.unpatch()
            for name in NAMES:
                label = "torchrl.late" if again and way == "patch" else functional.__name__
                served = status()[f"{label}.{name}"]["served"] if label in sys.modules else 0
                modules[1].__dict__[name](**arguments(name, make_data((2, 4, 1)), 0.9, 0.8))
                assert status()[f"{label}.{name}"]["served"] == served + 1
                modules[0].__dict__[name](**arguments(name, make_data((2, 4, 1)), 0.9, 0.8))
            held = {name: vars(modules[0])[name] for name in NAMES}
        for module in modules:
            assert all(vars(module)[name] is STOCK[name] for name in NAMES)
            assert module.alias is STOCK["generalized_advantage_estimate"]
            assert pickle.loads(pickle.dumps(module.alias)) is module.alias
        for name, function in held.items():  # by somebody who is no module
            before = counts(name)
            function(**arguments(name, make_data((2, 4, 1)), 0.9, 0.8))
            assert counts(name) == before
    finally:
        for name in ("late_user", "torchrl.late"):
            sys.modules.pop(name, None)
        vars(sys.modules["torchrl"]).pop("late", None)
        for key in [key for key in torchrl._patches if key[0].__name__ == "torchrl.late"]:
            del torchrl._patches[key]


RELOADS = """
import importlib, sys, warnings
warnings.simplefilter("error", UserWarning)
import torch
from torchrl.objectives import dreamer_v3
from torchrl.objectives.utils import ValueEstimators, get_value_estimator_entry
from torchrl.objectives.value import advantages, functional
from rl_triton.adapters import _functions, _patching, status, torchrl
from rl_triton.adapters.torchrl import _behaviour, _estimators, _functionals

def bound():
    modules = [sys.modules[module.__name__] for module in (functional, advantages, dreamer_v3)]
    return {(m.__name__, n): vars(m)[n] for m in modules for n in _functionals.NAMES if n in vars(m)}

def calls():
    return {label: entry["served"] for label, entry in status().items() if entry["active"]}

def run_all(serves):
    flags = torch.zeros(2, 4, 1, dtype=torch.bool)
    for (module, name), function in bound().items():
        before = calls().get(f"{module}.{name}", 0)
        if name == "generalized_advantage_estimate":
            result = function(0.9, 0.8, *torch.ones(3, 2, 4, 1), flags)[1]
            assert (result - result.double()).abs().max() == 0
            assert calls().get(f"{module}.{name}", 0) == before + serves, (module, name)

TORCHRL = [functional], [advantages], [dreamer_v3], [functional, advantages], [advantages, functional]
OURS = [torchrl], [_estimators], [_functionals, _behaviour, torchrl], [_patching, _functions, _functionals, torchrl]
for reloaded in (*TORCHRL, *OURS):
    for again in (False, True):
        for way in ("patch", "patched"):
            before = bound()
            assert not torchrl.is_patched()
            torchrl.patch() if way == "patch" else (context := torchrl.patched()).__enter__()
            for module in reloaded:
                importlib.reload(sys.modules[module.__name__])
            if again:
                torchrl.patch()
                assert torchrl.is_patched()
                run_all(serves=1)
                torchrl.patch()
                assert all(_patching.patch_of(function.__wrapped__) is None for function in bound().values())
                torchrl.unpatch()
            torchrl.unpatch() if way == "patch" else context.__exit__(None, None, None)
            assert not torchrl.is_patched()
            assert all(_patching.patch_under(function) is None for function in bound().values())
            run_all(serves=0)
            after = bound()
            for key, function in before.items():
                renewed = functional in reloaded and (key[0] == functional.__name__ or advantages in reloaded)
                assert function is after[key] or renewed, (key, reloaded)
            importlib.reload(advantages), importlib.reload(dreamer_v3)

entries = {key: get_value_estimator_entry(key).cls for key in ValueEstimators}
torchrl.register()
importlib.reload(_estimators)
torchrl.register()
torchrl.unregister()
assert entries == {key: get_value_estimator_entry(key).cls for key in ValueEstimators}

torchrl.patch()
del sys.modules[functional.__name__]
torchrl.patch()
assert torchrl.is_patched()
torchrl.unpatch()
for module in (functional, sys.modules[functional.__name__], advantages):
    assert _patching.patch_under(module.generalized_advantage_estimate) is None
"""


def test_reloads_while_patched():
    """Modules of TorchRL's, and ours: nothing is lost, patched twice or left behind."""
    result = subprocess.run([sys.executable, "-c", RELOADS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_another_copy_of_the_adapter_is_refused(monkeypatch):
    torchrl.patch()
    with monkeypatch.context() as context:
        context.setattr(torchrl, "_patches", {})
        with pytest.raises(RuntimeError, match="is already patched by another copy of rl_triton"):
            torchrl.patch()
    torchrl.patch()
    assert torchrl.is_patched()


def test_a_reloaded_module_that_computes_something_else_is_refused(monkeypatch):
    torchrl.patch()
    monkeypatch.setattr(functional, "reward2go", lambda reward, done, gamma, *, time_dim=-2: reward)
    with pytest.raises(RuntimeError, match="reward2go does not compute what rl_triton"):
        torchrl.patch()


def test_another_module_that_bound_a_function(monkeypatch):
    module = types.ModuleType("torchrl.somewhere")
    module.reward2go = functional.reward2go
    monkeypatch.setitem(sys.modules, "torchrl.somewhere", module)
    try:
        with torchrl.patched():
            module.reward2go(**arguments("reward2go", make_data((2, 4, 1)), 0.9, None))
            assert status()["torchrl.somewhere.reward2go"]["served"] == 1
        assert module.reward2go is STOCK["reward2go"]
    finally:
        del torchrl._patches[module, "reward2go"]


# ------------------------------------------------------------------------------------------------- other versions of it


def test_functions_that_compute_something_else_are_refused(monkeypatch):
    def other(*args, **kwargs):
        return STOCK["td1_return_estimate"](*args, **kwargs) + 1.0

    monkeypatch.setattr(functional, "td1_return_estimate", other)
    with pytest.raises(RuntimeError, match="td1_return_estimate does not compute what rl_triton"):
        _behaviour.functions(functional, "99")


def vtrace_before_0_14(**given_):
    """In float64, from its equation: x' is the target of the next row, also across a truncation."""
    data = {key: x for key, x in given_.items() if isinstance(x, torch.Tensor)}
    _, targets = oracle("vtrace_advantage_estimate", data, given_["gamma"], 1.0, -2, 1.1, 0.9)
    following = torch.cat([targets[..., 1:, :], data["next_state_value"][..., -1:, :].double()], -2)
    rho = (data["log_pi"].double() - data["log_mu"].double()).exp().clamp_max(1.1)
    one_step = data["reward"] + given_["gamma"] * following * ~data["terminated"] - data["state_value"]
    return rho * one_step, targets


def test_vtrace_of_versions_before_0_14(monkeypatch):
    """Its numbers are kept, since runs rely on them."""
    monkeypatch.setattr(functional, "vtrace_advantage_estimate", vtrace_before_0_14)
    function = _behaviour.functions(functional, "0.13.3")["vtrace_advantage_estimate"]
    for shape, time_dim in (((3, 8, 2), -2), ((3, 1, 2), -2), ((2, 3, 8, 1), 2)):
        data = make_data(shape, ends=0.6)
        given_ = arguments("vtrace_advantage_estimate", data, 0.9, None, rho_thresh=1.1, c_thresh=0.9)
        expected = vtrace_before_0_14(**given_)
        close(function(**given_, time_dim=time_dim), expected, 2e-5)
    data = make_data((6,), ends=0.6)
    given_ = arguments("vtrace_advantage_estimate", data, 0.9, None, rho_thresh=1.1, c_thresh=0.9)
    with_feature = {key: x.unsqueeze(-1) if isinstance(x, torch.Tensor) else x for key, x in given_.items()}
    close(function(**given_, time_dim=-1), [x.squeeze(-1) for x in vtrace_before_0_14(**with_feature)], 2e-5)


def test_vtrace_before_0_14_can_be_fixed(monkeypatch):
    name = "vtrace_advantage_estimate"
    monkeypatch.setattr(
        torchrl, "_functions", lambda: _functionals.NAMES | {name: _functionals.vtrace_across_truncations}
    )
    data = make_data((3, 8, 2), ends=0.6)
    given_ = arguments(name, data, 0.9, None, rho_thresh=1.1, c_thresh=0.9)
    right, faulty = oracle(name, data, 0.9, 1.0, -2, 1.1, 0.9), vtrace_before_0_14(**given_)
    assert (right[0] - faulty[0]).abs().max() > 0.1
    with torchrl.patched():
        close(functional.vtrace_advantage_estimate(**given_), faulty, 2e-5)
        with torchrl.patched(fix_vtrace=True):
            close(functional.vtrace_advantage_estimate(**given_), right, 2e-5)
        close(functional.vtrace_advantage_estimate(**given_), faulty, 2e-5)
    torchrl.patch(fix_vtrace=True)
    close(functional.vtrace_advantage_estimate(**given_), right, 2e-5)


def test_a_version_that_was_not_tested_is_told(monkeypatch):
    import torchrl as package

    monkeypatch.setattr(package, "__version__", "0.99.0")
    with pytest.warns(UserWarning, match="tested with TorchRL 0.14; the functions of 0.99.0 compute the same"):
        torchrl._functions()
    torchrl._functions()  # once


@pytest.mark.parametrize("code", ["torchrl.patch()", "torchrl.GAE"])
def test_without_torchrl(code):
    """Importing the adapter loads nothing; using it says what to install."""
    script = f"import sys; sys.modules['torchrl'] = None\nfrom rl_triton.adapters import torchrl\n{code}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError: rl_triton.adapters.torchrl needs TorchRL: pip install 'rl-triton[torchrl]'" in result.stderr


def test_not_served_is_an_error_of_its_own():
    with pytest.raises(NotServedError, match="flags that are not bool"):
        _functionals.reward2go(torch.ones(3, 1), torch.ones(3, 1), 0.9)


def test_the_docs_show_the_record_of_the_suites():
    suites = Path(__file__).parents[1] / "suites"
    spec = importlib.util.spec_from_file_location("torchrl_run", suites / "torchrl_run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    record = json.loads((suites / "torchrl.json").read_text())
    assert run.table(record) in (suites.parents[1] / "docs" / "torchrl.md").read_text()
    assert {*record["parts"], *record["not_run"]} == set(run.PARTS)
    for part, entry in record["parts"].items():
        assert not entry["runs"]["none"]["failed"], part
        for family in ("loop", "vec"):
            assert not entry["runs"][family]["failed"], (part, family)
            assert not run._problems(
                part, entry["runs"][family]["functions"], run.EXPECTED.get(part, {}).get(family, {})
            )
