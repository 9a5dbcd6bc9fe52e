"""affine_scan against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import SMALL_CONFIGS, assert_result, examples, restride

import rl_triton as rlt
from rl_triton import reference
from rl_triton._config import LaunchConfig, configured


@settings(max_examples=examples(120))
@given(data=st.data())
def test_matches_reference(data, backend):
    n_axes = data.draw(st.integers(1, 4))
    time_dim = data.draw(st.integers(0, n_axes - 1))
    shape = [data.draw(st.integers(1, 4)) for _ in range(n_axes)]
    shape[time_dim] = data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    order = list(data.draw(st.permutations(range(n_axes))))

    def normal(size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(backend.device)

    alpha = restride(normal(shape), order, data.draw(st.sampled_from([1, 2])))
    kind = data.draw(st.sampled_from(["float", "0-d", "per step", "broadcast"]))
    if kind == "float":
        beta = data.draw(st.sampled_from([0.0, 0.9, -0.5, 1.0]))
    elif kind == "0-d":
        beta = torch.tensor(0.8, dtype=dtype, device=backend.device)
    else:
        some = shape if kind == "per step" else [s if data.draw(st.booleans()) else 1 for s in shape]
        beta = normal(some).clamp(-1, 1)
        beta = beta.masked_fill(normal(some) > 1, 0.0)
    rows = shape[:time_dim] + shape[time_dim + 1 :]
    options = {
        "initial": normal(rows) if data.draw(st.booleans()) else None,
        "reverse": data.draw(st.booleans()),
        "time_dim": time_dim,
    }
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        y = rlt.affine_scan(alpha, beta, **options)
    assert y.shape == alpha.shape
    assert_result(y, reference.affine_scan(alpha, beta, **options), dtype)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_zero_factor_reads_nothing(backend, reverse):
    """0 * inf never appears: NaN and inf stay on their side of a zero factor, across tiles too."""
    alpha = torch.ones(1, 32, device=backend.device)
    beta = torch.full((1, 32), 0.5, device=backend.device)
    alpha[0, 12], alpha[0, 13] = float("nan"), float("inf")
    beta[0, 16 if not reverse else 9] = 0.0
    with configured(LaunchConfig(rows=16, chunks=2, steps=4)):
        y = rlt.affine_scan(alpha, beta, reverse=reverse).cpu()[0]
    finite = torch.isfinite(y)
    bad = range(12, 16) if not reverse else range(10, 14)
    assert [t for t in range(32) if not finite[t]] == list(bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_factor_stays_behind_a_zero_one(backend, bad):
    """The product of a zero factor and a NaN one is zero: what lies beyond the zero is not read."""
    alpha = torch.ones(1, 32, device=backend.device)
    beta = torch.full((1, 32), 0.5, device=backend.device)
    beta[0, 9], beta[0, 13] = 0.0, bad
    with configured(LaunchConfig(rows=16, chunks=2, steps=4)):
        y = rlt.affine_scan(alpha, beta)
    finite = torch.isfinite(y.cpu()[0])
    assert [t for t in range(32) if not finite[t]] == [10, 11, 12, 13]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_underflow_is_not_a_zero_factor(backend, dtype, sign):
    """A product of factors that underflows must not hide NaN or the sign of inf, as a plain loop would not."""
    n_steps = 200 if dtype == torch.float32 else 1200
    alpha = torch.zeros(2, n_steps, dtype=dtype, device=backend.device)
    alpha[0, -1], alpha[1, -1] = float("nan"), float("inf")
    with configured(LaunchConfig(rows=2, chunks=16, steps=4)):
        y = rlt.affine_scan(alpha, sign * 0.5, reverse=True)
    expected = reference.affine_scan(alpha, sign * 0.5, reverse=True)
    assert torch.equal(y[0].isnan().cpu(), expected[0].isnan().cpu())
    assert torch.equal(y[1].cpu().double(), expected[1].cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_accumulate_in_float32(backend, dtype):
    alpha = torch.full((1, 4096 if not backend.slow else 600), 0.01, dtype=dtype, device=backend.device)
    y = rlt.affine_scan(alpha, 1.0)
    assert_result(y, reference.affine_scan(alpha, 1.0), dtype)


def test_integers_count_as_default_float(backend):
    y = rlt.affine_scan(torch.tensor([1, 2, 3], device=backend.device), 1.0, reverse=False)
    assert y.dtype == torch.get_default_dtype()
    assert y.tolist() == [1.0, 3.0, 6.0]


def test_empty(backend):
    assert rlt.affine_scan(torch.zeros(0, 3, device=backend.device), 0.5).shape == (0, 3)
    assert rlt.affine_scan(torch.zeros(3, 0, device=backend.device), 0.5).shape == (3, 0)


def test_out(backend):
    alpha = torch.randn(3, 10, device=backend.device)
    out = torch.empty(10, 3, device=backend.device).t()
    assert rlt.affine_scan(alpha, 0.5, out=out) is out
    assert torch.equal(out, rlt.affine_scan(alpha, 0.5))
