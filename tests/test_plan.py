"""Plans: a call like one before takes a shorter way to the same kernel, and gives the same result."""

import contextlib
import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from test_estimators import OPS, basic, flatten

import rl_triton as rlt
from rl_triton import _direct, _plan, _run
from rl_triton.testing import make_rollout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


def forget():
    for name in rlt.__all__:
        getattr(getattr(rlt, name), "plans", {}).clear()


@pytest.fixture
def looked_up(monkeypatch):
    """One entry for each call from here on that was not known again by comparing."""
    forget()
    count = []
    look_up = _plan._look_up

    def counted(*args):
        count.append(args)
        return look_up(*args)

    monkeypatch.setattr(_plan, "_look_up", counted)
    return count


@pytest.fixture
def followed(monkeypatch):
    """Which calls from here on have been done by a plan."""
    forget()
    count = []
    make = _plan.Plan.__init__

    def made(plan, *args):
        make(plan, *args)
        run = plan.run

        def counted(*args):
            result = run(*args)
            count.append(result is not None)
            return result

        plan.run = counted

    monkeypatch.setattr(_plan.Plan, "__init__", made)
    return count


def ordinary(op, *args, **kwargs):
    """The call without plans."""
    return op.__wrapped__(*args, **kwargs)


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("time_dim", [0, 1])
def test_a_plan_gives_the_ordinary_result(op, time_dim, device, followed, looked_up):
    function = getattr(rlt, op.name)
    for seed in range(4):
        tensors, options = basic(op, device, seed=seed)
        if time_dim == 0:
            tensors = {
                k: v.t() if v.dim() == 2 else v.transpose(0, 1) if v.dim() == 3 else v for k, v in tensors.items()
            }
        options = options | {"time_dim": time_dim}
        results = flatten(function(**tensors, **options))
        expected = flatten(ordinary(function, **tensors, **options))
        for actual, want in zip(results, expected, strict=True):
            assert torch.equal(actual, want)
    assert followed == [True] * 3  # all but the first
    assert len(looked_up) == 2


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_without_the_guards_of_pytorch(op, device, followed, looked_up, monkeypatch):
    monkeypatch.setattr(_plan, "_guards", None)
    function = getattr(rlt, op.name)
    tensors, options = basic(op, device, seed=0)
    for _ in range(4):
        results = flatten(function(**tensors, **options))
        expected = flatten(ordinary(function, **tensors, **options))
        assert all(torch.equal(actual, want) for actual, want in zip(results, expected, strict=True))
    assert followed == [True] * 3
    assert len(looked_up) == 4


def test_few_calls_are_known_by_comparing_and_all_are_right(device, followed, looked_up):
    """Calls of several kinds in turn; each kind is compared with those of the others."""
    rollouts = [make_rollout(8, n_steps, device=device, poison=False) for n_steps in range(60, 60 + 4 * 3, 3)]
    for _ in range(4):
        for rollout in rollouts:
            assert torch.equal(gae(rollout).returns, ordinary(rlt.gae, **rollout).returns)
    assert len(looked_up) == 8
    assert followed == [True] * 12
    rollouts += [make_rollout(n_rows, 60, device=device, poison=False) for n_rows in (3, 5)]
    for _ in range(3):
        for rollout in rollouts:
            assert torch.equal(gae(rollout).returns, ordinary(rlt.gae, **rollout).returns)
    assert len(rlt.gae.plans.recent) == _plan._MAX_RECENT


def test_what_knows_a_call_again_is_written_once(device, followed, monkeypatch):
    """Also of more kinds than are kept at hand. NaN, which equals nothing, leaves no plan."""
    written = []
    recall = _plan._recall
    monkeypatch.setattr(_plan, "_recall", lambda *args: written.append(args) or recall(*args))
    rollouts = [make_rollout(8, n_steps, device=device, poison=False) for n_steps in range(20, 20 + 4 * 9, 4)]
    assert len(rollouts) > _plan._MAX_RECENT
    for _ in range(6):
        for rollout in rollouts:
            assert torch.equal(gae(rollout).returns, ordinary(rlt.gae, **rollout).returns)
    assert followed == [True] * (5 * len(rollouts))
    assert len(written) == len(rollouts)
    kinds = len(rlt.gae.plans.by_key)
    for _ in range(3):
        assert gae(rollouts[0], gamma=float("nan")).returns.isnan().any()
    assert len(written) == len(rollouts)
    assert len(rlt.gae.plans.by_key) == kinds


def test_a_call_leaves_no_cycle(device, followed):
    """Tensors are freed when their last reference goes, not when the collector comes."""
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {}, {}, {"return_carry": True}):
            rollout = make_rollout(8, 24, device=device, poison=False)
            gae(rollout, **options)
            alive = [weakref.ref(x) for x in rollout.values()]
            del rollout
            assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


def test_what_a_known_call_must_share(device, looked_up):
    """Arguments of another type, class, mode or order are not taken for those of the call before."""
    rollout = make_rollout(8, 64, device=device, poison=False)
    for _ in range(3):
        expected = gae(rollout, gamma=1.0, out=(torch.empty(8, 64, device=device), torch.empty(8, 64, device=device)))
    assert len(looked_up) == 2
    with pytest.raises(TypeError, match="gamma"):
        gae(rollout, gamma=True, out=tuple(expected))
    with pytest.raises(TypeError, match="out"):
        gae(rollout, gamma=1.0, out=expected.returns)
    with pytest.raises(TypeError, match="got 3 entries"):
        gae(rollout, gamma=1.0, out=(*expected, expected.returns))
    turned = gae(dict(reversed(rollout.items())), gamma=1.0)
    assert torch.equal(turned.returns, expected.returns)
    with torch.inference_mode():
        assert torch.equal(gae(rollout, gamma=1.0).returns, expected.returns)
    with torch.no_grad():
        assert torch.equal(gae(rollout, gamma=1.0).returns, expected.returns)
    parameters = {name: torch.nn.Parameter(x, requires_grad=x.is_floating_point()) for name, x in rollout.items()}
    for _ in range(3):
        result = gae(parameters, gamma=1.0)
        assert torch.equal(result.returns, expected.returns)
        assert not result.returns.requires_grad


def test_what_the_driver_is_given(monkeypatch):
    """The driver's structures, as its documentation lays them out."""
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(config, function, entries, extra):
        words = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        n_attributes = ctypes.c_uint.from_address(config + 48).value
        pointers = (ctypes.c_uint64 * 6).from_address(entries)
        parameters = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        seen.append((list(words), stream, attributes, n_attributes, function, parameters, extra))
        return 0

    monkeypatch.setattr(_direct, "_driver", lambda: launch)
    device = 1
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0xABC00000000, raising=False)
    read, made = torch.zeros(4), torch.zeros(4)
    kernel = SimpleNamespace(
        src=SimpleNamespace(signature={"x": ("*fp32", "constexpr"), "n": "i32", "y": "*fp32", "scale": "fp32"}),
        metadata=SimpleNamespace(num_warps=4, shared=1024),
        function=0x123400000000,
    )
    direct = _direct.DirectKernel(
        kernel,
        {"x": (read, 7), "n": -2, "y": made, "scale": 1.0},
        5,
        torch.device("cuda", 1),
        _plan.Places([read], [made], []),
    )
    code = _plan.Code("at", "made")
    direct.write(code, ["at"], ["made"])
    code.add("return True")
    start = code.function()
    for address in (0x1000, 0x2000):
        assert start(address, made)
        parameters = [address, 0xFFFFFFFE, made.data_ptr(), 0x3F800000, 0, 0]
        assert seen.pop() == ([5, 1, 1, 128, 1, 1, 1024], 0xABC00000000, 0, 0, 0x123400000000, parameters, None)
    device = 0
    assert not start(0x1000, made)


def gae(rollout, **options):
    return rlt.gae(**rollout, **options)


def test_alignment_and_strides_are_part_of_a_plan(device, followed):
    """A misaligned or oddly strided tensor after an aligned one must not meet the kernel of the aligned one."""
    rollout = make_rollout(8, 64, device=device, poison=False)
    expected = ordinary(rlt.gae, **rollout)
    for shift in (0, 0, 1, 2, 4, 1, 0):
        memory = torch.zeros(8 * 64 + shift, device=device)
        rewards = memory[shift:].view(8, 64)
        rewards.copy_(rollout["rewards"])
        assert torch.equal(gae(rollout | {"rewards": rewards}).advantages, expected.advantages), shift
    for step in (1, 2, 3, 1):
        wide = torch.zeros(8, 64, step, device=device)
        wide[..., 0] = rollout["values"]
        assert torch.equal(gae(rollout | {"values": wide[..., 0]}).advantages, expected.advantages), step
    for dtype in (torch.uint8, torch.bool, torch.float32, torch.int64):
        assert torch.equal(gae(rollout | {"terminated": rollout["terminated"].to(dtype)}).returns, expected.returns)
    assert any(followed)


def test_options_are_part_of_a_plan(device, followed):
    rollout = make_rollout(8, 64, device=device, poison=False)
    for gamma in (0.9, 0.99, 0.9, 0.5, 1, True):
        if gamma is True:
            with pytest.raises(TypeError, match="gamma must be a float"):
                gae(rollout, gamma=gamma)
        else:
            assert torch.equal(gae(rollout, gamma=gamma).returns, ordinary(rlt.gae, **rollout, gamma=gamma).returns)
    if device == "cuda":
        with pytest.raises(ValueError, match="forced to 'cpu'"), rlt.backend("cpu"):
            gae(rollout, gamma=0.9)
    assert followed == [True]


def test_errors_do_not_hide_behind_a_plan(device):
    rollout = make_rollout(8, 64, device=device, poison=False)
    for _ in range(3):
        gae(rollout)
    for name in ("rewards", "values", "terminated", "last_values"):
        if device == "cuda":
            with pytest.raises(ValueError, match=name):
                gae(rollout | {name: rollout[name].cpu()})
        with pytest.raises(TypeError, match=name):
            gae(rollout | {name: rollout[name].cpu().numpy()})
    with pytest.raises(ValueError, match="one step longer"):
        gae(rollout | {"values": torch.zeros(8, 65, device=device)})


def test_a_negated_view_is_refused(device):
    """Its memory holds the numbers with the other sign."""
    rollout = make_rollout(8, 64, device=device, poison=False)
    negated = torch.view_as_complex(torch.stack((rollout["rewards"],) * 2, dim=-1)).conj().imag
    alike = torch.view_as_complex(torch.stack((rollout["rewards"],) * 2, dim=-1)).imag
    assert alike.stride() == negated.stride()
    for _ in range(3):
        gae(rollout | {"rewards": alike})
        with pytest.raises(ValueError, match=r"rewards is a negated view .*rewards\.resolve_neg\(\)"):
            gae(rollout | {"rewards": negated})


def test_out_follows_a_plan_and_is_checked(device, followed):
    rollout = make_rollout(8, 64, device=device, poison=False)
    expected = ordinary(rlt.gae, **rollout)
    for _ in range(3):
        out = tuple(torch.full((8, 64), float("nan"), device=device) for _ in range(2))
        versions = [x._version for x in out]
        result = gae(rollout, out=out)
        assert all(x is y for x, y in zip(result, out, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(out, expected, strict=True))
        assert all(x._version > version for x, version in zip(out, versions, strict=True))
    assert followed == [True, True]
    with pytest.raises(ValueError, match="requires grad"):
        gae(rollout, out=(out[0], out[1].clone().requires_grad_()))
    with pytest.raises(ValueError, match="shares memory with rewards"):
        gae(rollout, out=(rollout["rewards"], out[1]))
    with pytest.raises(ValueError, match="shares memory with out"):
        gae(rollout, out=(out[1], out[1]))
    block = torch.empty(8 * 64 + 32, device=device)
    with pytest.raises(ValueError, match="shares memory with out"):
        gae(rollout, out=(block[:512].view(8, 64), block[32:].view(8, 64)))
    halves = torch.empty(8, 2, 64, device=device)  # interleaved, and yet apart
    gae(rollout, out=(halves[:, 0], halves[:, 1]))
    gae(rollout, out=(halves[:, 0], halves[:, 1]))
    assert torch.equal(halves[:, 0], expected.advantages)


def test_one_tensor_in_two_places(device, followed):
    rollout = make_rollout(8, 64, device=device, poison=False)
    same = rollout | {"values": rollout["rewards"]}
    expected = [ordinary(rlt.gae, **r).advantages for r in (same, rollout)]
    for _ in range(2):
        assert torch.equal(gae(same).advantages, expected[0])
        assert torch.equal(gae(rollout).advantages, expected[1])
        assert torch.equal(gae(same).advantages, expected[0])
    assert followed.count(True) == 4  # all but the first call of each kind


def test_arguments_that_were_in_one_place_come_apart(device, followed):
    rollout = make_rollout(8, 64, device=device, poison=False)
    for seed in range(3):
        other = make_rollout(8, 64, device=device, poison=False, seed=seed)["rewards"]
        for values in (rollout["rewards"], other, rollout["rewards"].view(8, 64)):
            changed = rollout | {"values": values}
            assert torch.equal(gae(changed).advantages, ordinary(rlt.gae, **changed).advantages)
    assert followed.count(True) == 7


def test_arguments_that_lie_in_one_another(device, followed):
    """Values of all steps and the one behind them, as one tensor; and where they come apart."""
    rollout = make_rollout(8, 64, device=device, poison=False)
    for seed in range(3):
        whole, other = (
            torch.randn(8, 65, generator=torch.Generator().manual_seed(10 * seed + i)).to(device) for i in range(2)
        )
        for values, last_values in ((whole, whole), (whole, other), (other, other)):
            changed = rollout | {"values": values[:, :-1], "last_values": last_values[:, -1]}
            assert torch.equal(gae(changed).advantages, ordinary(rlt.gae, **changed).advantages)
    assert followed.count(True) >= 5


def test_a_tensor_in_two_places_has_both_gradients(device, checked):
    rollout = make_rollout(8, 64, device=device, poison=False)
    x = rollout["rewards"].clone().requires_grad_()
    for values in (x, x.detach(), x, x.detach()):
        call = rollout | {"rewards": x, "values": values}
        (found,) = torch.autograd.grad(gae(call, differentiable=True).returns.sum(), x)
        (expected,) = torch.autograd.grad(rlt.gae.__wrapped__(**call, differentiable=True).returns.sum(), x)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(256, 128), (3, 4000)], ids=str)
def test_threads_and_streams(shape, device, followed):
    """Each thread has parameters of its own, and a kernel goes to the stream that is current in its thread."""
    rollouts = [make_rollout(*shape, device=device, seed=i, poison=False) for i in range(4)]
    expected = [ordinary(rlt.gae, **rollout).advantages for rollout in rollouts]
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
            for _ in range(200):
                result = gae(rollouts[i]).advantages
                if not torch.equal(result, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(followed) > 700


def test_the_default_dtype_is_part_of_a_plan(device, followed):
    """Integers count as the default float dtype, whatever that is at the time."""
    x, done = torch.ones(2, 3, dtype=torch.int64, device=device), torch.zeros(2, 3, device=device)
    default = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
            torch.set_default_dtype(dtype)
            assert rlt.episodic_cumsum(x, done).dtype == dtype
    finally:
        torch.set_default_dtype(default)
    assert followed == [True, True]


@needs_gpu
def test_a_plan_replays_in_a_graph():
    rollout = make_rollout(64, 128, device="cuda", poison=False)
    gae(rollout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gae(rollout)
    for seed in range(3):
        for name, x in make_rollout(64, 128, device="cuda", seed=seed, poison=False).items():
            rollout[name].copy_(x)
        graph.replay()
        assert torch.equal(result.advantages, ordinary(rlt.gae, **rollout).advantages)


def test_carries_and_gradients_take_the_ordinary_path(device, followed):
    rollout = make_rollout(8, 64, device=device, poison=False)
    rollout["rewards"].requires_grad_()
    for _ in range(3):
        assert not gae(rollout).advantages.requires_grad
    assert followed == [True] * 2
    for _ in range(3):
        (_, _), carry = gae(rollout, return_carry=True)
        assert carry.shape == (8,)
    assert followed == [True] * 2
    rollout["valid"] = torch.ones(8, 64, dtype=torch.bool, device=device)
    for _ in range(3):  # its scans may follow plans
        assert gae(rollout, differentiable=True).advantages.requires_grad


@pytest.fixture
def checked(monkeypatch):
    """One entry for each call from here on whose arguments were all looked at."""
    forget()
    count = []
    estimate = _run.estimate

    def counted(algorithm, *args, **kwargs):
        if kwargs.get("differentiable"):
            count.append(algorithm.name)
        return estimate(algorithm, *args, **kwargs)

    monkeypatch.setattr(_run, "estimate", counted)
    return count


@pytest.mark.parametrize("name", ["gae", "td_lambda_returns", "discounted_returns"])
def test_a_plan_makes_a_graph(name, device, checked):
    """Gradients of the first and second order are those of calls that were checked."""
    op = getattr(rlt, name)

    def gradients(call, rollout):
        tensors = {key: x.clone() for key, x in rollout.items()}
        leaves = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
        results = flatten(call(**tensors, gamma=0.9, differentiable=True))
        first = torch.autograd.grad(sum(y.pow(2).sum() for y in results), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves)
        return [*results, *first, *second]

    for seed in range(4):
        rollout = make_rollout(8, 64, device=device, poison=False, seed=seed)
        if name == "discounted_returns":
            del rollout["values"]
        found = gradients(op, rollout)
        n_checked = len(checked)
        for actual, expected in zip(found, gradients(op.__wrapped__, rollout), strict=True):
            assert torch.equal(actual, expected)
        del checked[n_checked:]
    assert len(checked) <= 2  # of the first call, and of the first within a backward pass


def test_a_plan_of_a_scan(device, checked):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        alpha, beta, initial = (
            torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((8, 64), (8, 64), (8,))
        )
        y = rlt.affine_scan(alpha, beta, initial=initial, differentiable=True)
        expected = rlt.affine_scan.__wrapped__(alpha, beta, initial=initial, differentiable=True)
        assert torch.equal(y, expected)
        leaves = (alpha, beta, initial)
        grads = torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    assert checked == ["affine_scan"] * 5  # once, and the four to compare with
    for factor in (0.5, torch.tensor(0.5, device=device), beta.double()):  # more than one node, or another dtype
        for _ in range(2):
            y = rlt.affine_scan(alpha, factor, differentiable=True)
            assert torch.equal(y, rlt.affine_scan(alpha, factor))


def test_whether_a_graph_is_made_is_part_of_a_plan(device, checked):
    rollout = make_rollout(8, 64, device=device, poison=False)
    for _ in range(3):
        assert gae(rollout, differentiable=True).advantages.grad_fn is None  # nothing to differentiate by
    rollout["values"].requires_grad_()
    expected = gae(rollout).advantages
    for _ in range(3):
        results = gae(rollout, differentiable=True)
        assert type(results) is rlt.GAE
        assert results.advantages.requires_grad
        assert torch.equal(results.advantages, expected)
        with torch.no_grad():
            assert not gae(rollout, differentiable=True).advantages.requires_grad
        with torch.inference_mode():
            assert gae(rollout, differentiable=True).advantages.is_inference()
    assert len(checked) <= 4


def test_a_plan_of_a_graph_holds_no_memory(device, checked):
    rollout = make_rollout(8, 64, device=device, poison=False)
    for _ in range(3):
        gae(rollout, differentiable=True)
    tensors = [weakref.ref(x) for x in rollout.values()]
    del rollout
    gc.collect()
    assert not any(x() is not None for x in tensors)


@needs_gpu
@pytest.mark.parametrize("missing", ["function", "src", "metadata"])
def test_without_the_hooks_of_triton(missing, monkeypatch, followed):
    """A Triton version whose kernels do not tell what a plan needs."""

    class Kernel:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return getattr(self.kernel, name)

    from rl_triton import _launch

    direct = _launch.DirectKernel
    monkeypatch.setattr(_launch, "DirectKernel", lambda kernel, *rest: direct(Kernel(kernel), *rest))
    rollout = make_rollout(8, 48, device="cuda", poison=False)
    for _ in range(3):
        assert torch.equal(gae(rollout, gamma=0.77).returns, ordinary(rlt.gae, **rollout, gamma=0.77).returns)
    assert not followed
