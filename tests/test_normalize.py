"""normalize_advantages: masks, axes, edge cases, accuracy, and statistics pooled over processes."""

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_triton as rlt
from rl_triton.testing import assert_close


def plain(x, valid=None, dims=None, unbiased=True, eps=1e-8):
    """The definition, group by group, in float64."""
    x = x.double()
    keep = torch.ones_like(x, dtype=torch.bool) if valid is None else valid != 0
    axes = (
        tuple(range(x.dim()))
        if dims is None
        else tuple(d % x.dim() for d in ((dims,) if isinstance(dims, int) else dims))
    )
    y = torch.zeros_like(x)
    others = [range(1) if d in axes else range(size) for d, size in enumerate(x.shape)]
    for index in torch.cartesian_prod(*(torch.tensor(list(r)) for r in others)).reshape(-1, x.dim()).tolist():
        where = tuple(slice(None) if d in axes else i for d, i in enumerate(index))
        group, kept = x[where], keep[where]
        chosen = group[kept]
        if len(chosen) > 1 and chosen.min() < chosen.max():
            normalized = (group - chosen.mean()) / (chosen.std(unbiased=unbiased) + eps)
            y[where] = torch.where(kept, normalized, 0.0)
    return y


@settings(max_examples=80)
@given(data=st.data())
def test_matches_the_definition(data, backend):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    options = {"unbiased": data.draw(st.booleans()), "eps": data.draw(st.sampled_from([1e-8, 0.1]))}
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    options["dims"] = data.draw(st.sampled_from([None, tuple(axes), tuple(a - len(shape) for a in axes), 0]))
    if data.draw(st.booleans()):
        options["valid"] = (torch.rand(shape, generator=generator) < 0.7).to(backend.device)
        x = torch.where(options["valid"].cpu(), x, float("nan"))
    y = rlt.normalize_advantages(x.to(backend.device), **options)
    assert y.dtype == dtype
    options["valid"] = options["valid"].cpu() if "valid" in options else None
    assert_close(y, plain(x, **options), max_error=2e-4 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("x", [3.0, 0.0, 0.1, 1e30, -1e-30])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_no_spread_is_zero(backend, x, unbiased, n):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        y = rlt.normalize_advantages(
            torch.full((n,), x, dtype=dtype, device=backend.device), unbiased=unbiased, eps=0.0
        )
        assert torch.equal(y, torch.zeros_like(y))


def test_nothing_valid_and_nothing_at_all(backend):
    x = torch.full((3, 4), float("nan"), device=backend.device)
    assert torch.equal(rlt.normalize_advantages(x, valid=torch.zeros_like(x)), torch.zeros_like(x))
    valid = torch.zeros_like(x)
    valid[1, 2] = 1
    x[1, 2] = 5
    assert torch.equal(rlt.normalize_advantages(x, valid=valid), torch.zeros_like(x))
    assert rlt.normalize_advantages(x[:0]).shape == (0, 4)


ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_order_in_memory(backend, dtype):
    """Elements that fill their memory in any order or do not, and a mask in the same order or another."""
    generator = torch.Generator().manual_seed(0)
    wide = (3 + torch.randn(6, 50, 4, generator=generator)).to(dtype)
    for x in (wide, wide.permute(2, 0, 1), wide[:, ::2], wide.transpose(0, 1)[1:], wide[:1].expand(6, 50, 4)):
        keep = torch.rand(x.shape, generator=generator) < 0.6
        same_order = torch.empty_like(x, dtype=torch.bool).copy_(keep)
        for valid in (None, keep, same_order, keep.float()):
            mask = None if valid is None else valid.to(backend.device)
            y = rlt.normalize_advantages(x.to(backend.device), valid=mask)
            assert y.shape == x.shape
            assert y.dtype == dtype
            assert_close(y, plain(x, valid), max_error=ROUNDING[dtype])


@pytest.mark.parametrize("n", [4096 * 21, 4096 * 21 - 1, 4096 * 19 + 5])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_many_tiles_have_the_same_bits_each_time(backend, monkeypatch, n, masked):
    """Seven programs that sum tiles by turns and five that write them, with and without one that hangs over."""
    if backend.name == "triton":
        from rl_triton import _moments

        monkeypatch.setattr(_moments, "_FIRST_PROGRAMS", 7)
        monkeypatch.setattr(_moments, "_SECOND_PROGRAMS", 5)
    x = (3 + torch.randn(n, generator=torch.Generator().manual_seed(n))).to(backend.device)
    valid = x > 2 if masked else None
    y = rlt.normalize_advantages(x, valid=valid)
    assert_close(y, plain(x.cpu(), valid.cpu() if masked else None), max_error=2e-6)
    assert torch.equal(rlt.normalize_advantages(x, valid=valid), y)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fill", [0.1, float("inf")])
def test_one_nan_among_equal_elements_stays_visible(backend, fill, masked):
    """In the first tile or a later one, and none where it does not count."""
    for at in (0, 4097, 9999):
        x = torch.full((10_000,), fill, device=backend.device)
        x[at] = float("nan")
        valid = torch.ones_like(x, dtype=torch.bool) if masked else None
        assert rlt.normalize_advantages(x, valid=valid).isnan().all()
        assert torch.equal(rlt.normalize_advantages(x, valid=~x.isnan()), torch.zeros_like(x))


def test_nan_of_a_valid_step_stays_visible(backend):
    x = torch.tensor([1.0, float("nan"), 2.0], device=backend.device)
    assert rlt.normalize_advantages(x).isnan().all()


@pytest.mark.parametrize("dims", [None, -1])
def test_squares_beyond_float32(backend, dims):
    x = (1e25 * torch.randn(3, 500, generator=torch.Generator().manual_seed(0))).to(backend.device)
    assert_close(rlt.normalize_advantages(x, dims=dims), plain(x.cpu(), dims=dims), max_error=1e-5)


@pytest.mark.parametrize("eps", [-1e-8, float("nan"), float("inf"), True, "1e-8", torch.tensor(1e-8)], ids=repr)
def test_eps_is_a_number_that_is_not_negative(backend, eps):
    x = torch.zeros(3, 4, device=backend.device)
    error = ValueError if type(eps) is float else TypeError
    with pytest.raises(error, match="normalize_advantages: eps must be"):
        rlt.normalize_advantages(x, eps=eps)


@pytest.mark.parametrize("at", [0.0, 1e4, -1e6])
def test_a_mean_far_from_zero_costs_nothing(backend, at):
    x = (at + torch.randn(200_000, generator=torch.Generator().manual_seed(0))).to(backend.device)
    assert_close(rlt.normalize_advantages(x), plain(x.cpu()), max_error=1e-5)


@pytest.mark.parametrize("n", [10_000_000, pytest.param(100_000_000, marks=pytest.mark.gpu_only)])
def test_many_elements_lose_nothing(backend, n, monkeypatch):
    """A running float32 sum would stall long before; 1e8 elements on a GPU."""
    if backend.slow and backend.name == "triton":
        from rl_triton import _moments

        monkeypatch.setattr(_moments, "_WARPS", 128)  # larger tiles than a GPU takes: the interpreter is paid by tile
    if backend.device == "cpu" and n > 10_000_000:
        pytest.skip("too much memory traffic for a CPU test")
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).add_(100.0).to(backend.device)
    y = rlt.normalize_advantages(x)
    mean, std = x.mean(dtype=torch.float64), x.double().std()
    expected = (x[:1000].double() - mean) / std
    assert (y[:1000].double() - expected).abs().max() < 2e-6
    assert abs(y.mean(dtype=torch.float64).item()) < 1e-7
    assert abs(y.double().square().mean().item() - 1) < 1e-6


def test_carries_no_graph(backend):
    x = torch.randn(5, device=backend.device, requires_grad=True)
    assert not rlt.normalize_advantages(x).requires_grad


def test_errors():
    x = torch.randn(3, 4)
    with pytest.raises(TypeError, match="normalize_advantages: advantages has dtype torch.int64"):
        rlt.normalize_advantages(x.long())
    with pytest.raises(ValueError, match=r"valid has shape \[3\], but advantages has shape \[3, 4\]"):
        rlt.normalize_advantages(x, valid=x[:, 0])
    with pytest.raises(ValueError, match=r"dims=2 is out of range for advantages of shape \[3, 4\]"):
        rlt.normalize_advantages(x, dims=2)
    with pytest.raises(ValueError, match="names an axis twice"):
        rlt.normalize_advantages(x, dims=(0, -2))
    with pytest.raises(TypeError, match="dims must be an int or a tuple of ints"):
        rlt.normalize_advantages(x, dims=[0])


def _member(rank, path, queue):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x, valid = _shard(rank)
    for dims in (None, 0):
        queue.put(
            (rank, dims, rlt.normalize_advantages(x, valid=valid, dims=dims, process_group=dist.group.WORLD).tolist())
        )
    # One member without a single element still takes part.
    empty = rlt.normalize_advantages(x[: 3 * rank], process_group=dist.group.WORLD)
    queue.put((rank, "empty", empty.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def _shard(rank):
    generator = torch.Generator().manual_seed(rank)
    x = 10 * rank + torch.randn(3 + rank, 4, generator=generator, dtype=torch.float64)
    return x, torch.rand(3 + rank, 4, generator=generator) < 0.8


def test_two_processes_pool_their_statistics(tmp_path):
    """Each gets its part of what one process with all the data would get."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    members = [context.Process(target=_member, args=(rank, tmp_path / "store", queue)) for rank in range(2)]
    for member in members:
        member.start()
    results = {}
    for _ in range(6):
        rank, kind, y = queue.get(timeout=120)
        results[kind, rank] = torch.tensor(y, dtype=torch.float64)
    for member in members:
        member.join(timeout=60)
        assert member.exitcode == 0
    (x0, v0), (x1, v1) = _shard(0), _shard(1)
    x, valid = torch.cat([x0, x1]), torch.cat([v0, v1])
    for dims in (None, 0):
        together = torch.cat([results[dims, 0], results[dims, 1]])
        assert_close(together, plain(x, valid, dims), max_error=1e-9)
    assert results["empty", 0].numel() == 0
    assert_close(results["empty", 1], plain(x1[:3]), max_error=1e-9)
