"""gae against the paper's equations, on both backends."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import EPS, SMALL, SMALL_CONFIGS, assert_result, examples, windows

import rl_triton as rlt
from rl_triton import reference
from rl_triton._config import LaunchConfig, configured
from rl_triton.testing import assert_close, make_rollout


def both(arguments, options):
    tensors = dict(arguments)
    first = [tensors.pop(name) for name in ("rewards", "values", "terminated")]
    return rlt.gae(*first, **tensors, **options), reference.gae(*first, **tensors, **options)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_matches_reference(data, backend):
    tensors, options, dtype = data.draw(windows(device=backend.device, max_steps=24))
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        (result, carry), (expected, expected_carry) = both(tensors, options | {"return_carry": True})
    for name, actual, want in zip(result._fields, result, expected, strict=True):
        assert actual.shape == tensors["rewards"].shape
        assert_result(actual, want, dtype, name)
    assert_result(carry, expected_carry, dtype, "carry")


def definition(rewards, values, terminated, truncated, bootstrap_values, last_values, gamma, lambda_):
    """Schulman et al. 2016, eq. 16 as a sum: A[t] = Σ_l (γλ)^l δ[t+l], up to the end of the episode."""
    n_rows, n_steps = rewards.shape
    advantages = torch.zeros(n_rows, n_steps, dtype=torch.float64)
    for n, t in itertools.product(range(n_rows), range(n_steps)):
        for k in range(t, n_steps):
            if terminated[n, k]:
                v_next = 0.0
            elif truncated[n, k]:
                v_next = bootstrap_values[n, k].item()
            else:
                v_next = (last_values[n] if k == n_steps - 1 else values[n, k + 1]).item()
            delta = rewards[n, k].item() + gamma * v_next - values[n, k].item()
            advantages[n, t] += (gamma * lambda_) ** (k - t) * delta
            if terminated[n, k] or truncated[n, k]:
                break
    return advantages


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_sum_of_the_definition(backend, lambda_):
    rollout = make_rollout(3, 21, truncated=0.15, device=backend.device)
    expected = definition(**{k: v.cpu() for k, v in rollout.items()}, gamma=0.9, lambda_=lambda_)
    exact = reference.gae(**rollout, gamma=0.9, lambda_=lambda_)[0]
    assert_close(exact, expected, max_error=1e-13, name="reference")
    with configured(SMALL):
        result = rlt.gae(**rollout, gamma=0.9, lambda_=lambda_)
    assert_result(result.advantages, expected, torch.float32)


def discounted(rewards, terminated, last_values, gamma):
    total, returns = last_values.double(), []
    for t in reversed(range(rewards.shape[1])):
        total = rewards[:, t].double() + gamma * torch.where(terminated[:, t] != 0, 0.0, total)
        returns.append(total)
    return torch.stack(returns[::-1], dim=1)


def test_lambda_one_telescopes_to_monte_carlo(backend):
    rollout = make_rollout(4, 50, device=backend.device, poison=False)
    result = rlt.gae(**rollout, gamma=0.97, lambda_=1.0)
    expected = discounted(rollout["rewards"], rollout["terminated"], rollout["last_values"], 0.97)
    assert_result(result.returns, expected, torch.float32)


def test_lambda_zero_is_the_td_error(backend):
    rollout = make_rollout(4, 50, device=backend.device, poison=False)
    result = rlt.gae(**rollout, gamma=0.97, lambda_=0.0)
    values = rollout["values"].double()
    v_next = torch.cat([values[:, 1:], rollout["last_values"].double()[:, None]], dim=1)
    v_next = torch.where(rollout["terminated"] != 0, 0.0, v_next)
    assert_result(result.advantages, rollout["rewards"].double() + 0.97 * v_next - values, torch.float32)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_two_windows_chained_are_one(data, backend):
    """At every cut position, with flags and invalid steps at the seam."""
    n_steps = data.draw(st.integers(2, 14))
    at = data.draw(st.integers(1, n_steps - 1))
    some_valid = data.draw(st.sampled_from([None, 0.6]))
    rollout = make_rollout(
        3, n_steps, terminated=0.3, truncated=0.3, valid=some_valid, dtype=torch.float64, device=backend.device,
        poison=False, seed=data.draw(st.integers(0, 2**31)),
    )  # fmt: skip
    last = rollout.pop("last_values")
    whole, whole_carry = reference.gae(**rollout, last_values=last, return_carry=True)
    early, late = ({k: v[:, part] for k, v in rollout.items()} for part in (slice(at), slice(at, None)))
    # What lies beyond the seam: the value of the late window's first valid step, unless a flag stands before it.
    seam = reference._resolve(
        late["rewards"], 1, np.float64, late["terminated"],
        values=late["values"], **{k: late[k] for k in ("truncated", "bootstrap_values", "valid") if k in late},
    )  # fmt: skip
    first = torch.from_numpy(seam.valid.argmax(axis=0))[:, None].to(backend.device)
    seam_values = torch.where(
        torch.from_numpy(seam.valid.any(axis=0)).to(backend.device), late["values"].gather(1, first)[:, 0], last
    )
    flagged = torch.from_numpy(seam.ended_before).to(backend.device)
    seam_values = torch.where(flagged, torch.from_numpy(seam.value_before).to(backend.device), seam_values)
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        late_result, carry = rlt.gae(**late, last_values=last, return_carry=True)
        early_result, early_carry = rlt.gae(**early, last_values=seam_values, carry=carry, return_carry=True)
    for k, name in enumerate(("advantages", "returns")):
        joined = torch.cat([early_result[k], late_result[k]], dim=1)
        assert_result(joined, whole[k], torch.float64, name)
    assert_result(early_carry, whole_carry, torch.float64, "carry")


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097])
@pytest.mark.parametrize("layout", ["NT", "TN"])
def test_edge_sizes(backend, n_steps, layout):
    """With the configuration that users get, one below and above every block size."""
    if backend.slow and (n_steps > 1025 or (n_steps == 1024 and layout == "TN")):
        pytest.skip("as slow as it looks in the interpreter; runs on a GPU")
    rollout = make_rollout(2, n_steps, layout=layout, truncated=0.05, device=backend.device)
    options = {"time_dim": 0 if layout == "TN" else 1}
    result, expected = both(rollout, options)
    for k in range(2):
        assert_result(result[k], expected[k], torch.float32, result._fields[k])


@pytest.mark.parametrize("n_steps", [131072, 131073, 1048577])
def test_long_windows(backend, n_steps):
    if backend.slow:
        pytest.skip("minutes in the interpreter; runs on a GPU")
    rollout = make_rollout(2, n_steps, terminated=0.001, device=backend.device)
    result, expected = both(rollout, {})
    for k in range(2):
        assert_result(result[k], expected[k], torch.float32, result._fields[k])


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 31, 32, 33, 65])
def test_row_sizes(backend, n_rows):
    for layout, time_dim in (("NT", 1), ("TN", 0)):
        rollout = make_rollout(n_rows, 9, layout=layout, truncated=0.2, device=backend.device)
        result, expected = both(rollout, {"time_dim": time_dim})
        for k in range(2):
            assert_result(result[k], expected[k], torch.float32, result._fields[k])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "flag_dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.float64,
    ],
)
def test_dtypes(backend, dtype, flag_dtype):
    rollout = make_rollout(3, 33, dtype=dtype, flag_dtype=flag_dtype, truncated=0.1, device=backend.device)
    result, expected = both(rollout, {})
    for k in range(2):
        assert_result(result[k], expected[k], dtype, result._fields[k])


@pytest.mark.parametrize(
    ("rewards", "values", "wanted"),
    [
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.int64, torch.float32, torch.float32),
        (torch.int32, torch.bfloat16, torch.float32),
        (torch.int64, torch.float64, torch.float64),
        (torch.uint16, torch.float32, torch.float32),
    ],
)
def test_promotion(backend, rewards, values, wanted):
    rollout = make_rollout(2, 10, device=backend.device, dtype=torch.float64)
    last = rollout.pop("last_values").to(values)
    rollout |= {"rewards": (3 * rollout["rewards"]).abs().to(rewards), "values": rollout["values"].to(values)}
    result, expected = both(rollout, {"last_values": last, "gamma": torch.tensor(0.9, dtype=torch.float64).to(last)})
    for k in range(2):
        assert_result(result[k], expected[k], wanted, result._fields[k])


def test_float64_keeps_all_of_gamma(backend):
    """Triton's float arguments are float32; 0.99 must not become 0.9900000095."""
    rollout = make_rollout(2, 100, dtype=torch.float64, device=backend.device)
    result, expected = both(rollout, {"gamma": 0.99, "lambda_": 0.95})
    assert_close(result.advantages, expected[0], max_error=1e-14)


def test_scalar_gamma_equals_constant_tensor(backend):
    rollout = make_rollout(3, 40, device=backend.device)
    plain = rlt.gae(**rollout, gamma=0.5, lambda_=0.25)
    for shape in ((), (1, 1), (3, 1), (1, 40), (3, 40)):
        gamma = torch.full(shape, 0.5, device=backend.device)
        tensor = rlt.gae(**rollout, gamma=gamma, lambda_=torch.tensor(0.25, device=backend.device))
        assert_result(tensor.advantages, plain.advantages, torch.float32)


def test_row_alone_is_row_in_a_batch(backend):
    rollout = make_rollout(7, 65, truncated=0.1, device=backend.device)
    whole = rlt.gae(**rollout)
    for n in range(7):
        alone = rlt.gae(**{k: v[n : n + 1] for k, v in rollout.items()})
        one_dimensional = rlt.gae(**{k: v[n] for k, v in rollout.items()})
        assert_result(alone.advantages[0], whole.advantages[n], torch.float32)
        assert_result(one_dimensional.advantages, whole.advantages[n], torch.float32)


def test_same_input_same_bits(backend):
    rollout = make_rollout(5, 300, truncated=0.1, device=backend.device)
    first = rlt.gae(**rollout)
    for _ in range(3):
        again = rlt.gae(**rollout)
        assert torch.equal(first.advantages, again.advantages)
        assert torch.equal(first.returns, again.returns)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 3)])
def test_empty(backend, shape):
    rewards = torch.zeros(shape, device=backend.device)
    last = torch.ones((shape[0], *shape[2:]), device=backend.device)
    result, carry = rlt.gae(rewards, rewards, rewards, last_values=last, time_dim=1, return_carry=True)
    assert result.advantages.shape == result.returns.shape == shape
    assert torch.equal(carry, torch.zeros_like(last))
    _, carry = rlt.gae(rewards, rewards, rewards, last_values=last, carry=5 * last, time_dim=1, return_carry=True)
    assert torch.equal(carry, 5 * last)


def test_out(backend):
    rollout = make_rollout(3, 20, device=backend.device)
    expected = rlt.gae(**rollout)
    buffer = torch.full((3, 20, 2), float("nan"), device=backend.device)
    out = buffer[..., 0], buffer[..., 1]
    version = buffer._version
    result = rlt.gae(**rollout, out=out)
    assert result.advantages is out[0]
    assert result.returns is out[1]
    assert torch.equal(out[0], expected.advantages)
    assert torch.equal(out[1], expected.returns)
    assert buffer._version > version  # autograd sees the write


def test_interleaved_out_and_input_are_apart(backend):
    """Views of one storage that share no element are no overlap."""
    rollout = make_rollout(3, 20, device=backend.device)
    buffer = torch.zeros(3, 20, 3, device=backend.device)
    buffer[..., 0] = rollout["rewards"]
    expected = rlt.gae(**rollout)
    rlt.gae(**rollout | {"rewards": buffer[..., 0]}, out=(buffer[..., 1], buffer[..., 2]))
    assert torch.equal(buffer[..., 1], expected.advantages)


def test_results_carry_no_graph(backend):
    rollout = make_rollout(2, 5, device=backend.device)
    rollout["values"] = torch.nn.Parameter(rollout["values"])
    gamma = torch.tensor(0.9, device=backend.device, requires_grad=True)
    result = rlt.gae(**rollout, gamma=gamma)
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


def test_inputs_are_left_alone(backend):
    rollout = make_rollout(3, 30, truncated=0.2, valid=0.8, device=backend.device)
    before = {k: v.clone() for k, v in rollout.items()}
    rlt.gae(**rollout)
    for name, x in rollout.items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)


def test_large_values_lose_no_more_than_a_loop(backend):
    """V far from zero: δ cancels, and the scan must not add to what a float32 loop loses."""
    rollout = make_rollout(4, 512, values_at=1000.0, device=backend.device)
    exact = reference.gae(**rollout)[0]
    loop = reference.gae(**rollout, dtype=torch.float32)[0]
    ours = rlt.gae(**rollout).advantages
    for norm in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
        assert norm(ours.cpu() - exact.cpu()) <= 2 * norm(loop.cpu() - exact.cpu())
    assert EPS[torch.float32] < (loop.cpu() - exact.cpu()).abs().max()


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(rows=8, chunks=4, steps=1, num_warps=1, parts=35),
        LaunchConfig(rows=16, chunks=2, steps=1, axis=0, num_warps=1, parts=35),
        LaunchConfig(rows=8, chunks=4, steps=2, axis=0, num_warps=1, prefetch=True, parts=35),
    ],
    ids=["axis 1", "axis 0", "axis 0, prefetched"],
)
def test_more_parts_than_lanes(config, backend):
    """A lane composes several maps before the lanes compose theirs."""
    if backend.slow and config.axis == 0 and not config.prefetch:
        pytest.skip("half a minute in the interpreter, and much like the next; runs on a GPU")
    n_steps = config.parts * config.chunks * config.steps - 1
    layout = "NT" if config.axis == 1 else "TN"
    rollout = make_rollout(5, n_steps, layout=layout, truncated=0.01, terminated=0.01, device=backend.device)
    options = {"gamma": 0.999, "lambda_": 0.99, "time_dim": config.axis}
    with configured(config):
        result = rlt.gae(**rollout, **options)
    expected = reference.gae(**{k: x.cpu().double() for k, x in rollout.items()}, **options)
    for actual, want in zip(result, expected, strict=True):
        assert_close(actual, want, max_error=1e-5)
