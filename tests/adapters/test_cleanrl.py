"""The calls of CleanRL scripts, beside loops written from the equations that those scripts state."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import rl_triton as rlt
from rl_triton.adapters import cleanrl


def window(seed, T, N, dtype=torch.float32, flags=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return dict(
        rewards=normal(T, N),
        values=normal(T, N),
        dones=(torch.rand(T, N, generator=generator) < 0.2).to(flags),
        next_value=normal(N),
        next_done=(torch.rand(N, generator=generator) < 0.4).to(flags),
    )


def one_row_at_a_time(rewards, values, dones, next_value, next_done):
    """For every t from the last: its row of each, the value behind it, and whether an episode starts there."""
    T = len(rewards)
    for t in reversed(range(T)):
        following, started = (next_value, next_done) if t == T - 1 else (values[t + 1], dones[t + 1])
        yield t, rewards[t], values[t], following, started != 0


def gae_loop(inputs, gamma, lambda_):
    advantages = torch.zeros_like(inputs["rewards"])
    ahead = torch.zeros_like(inputs["next_value"])
    for t, reward, value, following, started in one_row_at_a_time(**inputs):
        going_on = (~started).to(value.dtype)
        ahead = reward + gamma * following * going_on - value + gamma * lambda_ * going_on * ahead
        advantages[t] = ahead
    return advantages, advantages + inputs["values"]


def q_lambda_loop(inputs, gamma, lambda_):
    returns = torch.zeros_like(inputs["rewards"])
    last = len(returns) - 1
    for t, reward, _, following, started in one_row_at_a_time(**inputs):
        mixed = following if t == last else lambda_ * returns[t + 1] + (1 - lambda_) * following
        returns[t] = reward + gamma * torch.where(started, 0.0, mixed)
    return returns


def double(inputs):
    return {name: x.double() for name, x in inputs.items()}


@hypothesis.given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9), st.sampled_from(["bool", "float32"]))
@hypothesis.settings(max_examples=40)
def test_gae_is_the_loop(seed, T, N, flags):
    inputs = window(seed, T, N, flags=getattr(torch, flags))
    result = cleanrl.compute_gae(**inputs, gamma=0.99, gae_lambda=0.95)
    for actual, expected in zip(result, gae_loop(double(inputs), 0.99, 0.95), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.cpu_only
def test_gae_has_the_bits_of_the_float32_loop():
    for seed in range(20):
        inputs = window(seed, 128, 8)
        result = cleanrl.compute_gae(**inputs, gamma=0.99, gae_lambda=0.95)
        for actual, expected in zip(result, gae_loop(inputs, 0.99, 0.95), strict=True):
            assert torch.equal(actual, expected)


def test_each_backend(backend):
    inputs = window(3, 19, 5)
    on_device = {name: x.to(backend.device) for name, x in inputs.items()}
    advantages, returns = cleanrl.compute_gae(**on_device, gamma=0.99, gae_lambda=0.95)
    wanted = gae_loop(double(inputs), 0.99, 0.95)
    torch.testing.assert_close(advantages.double().cpu(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns.double().cpu(), wanted[1], rtol=1e-5, atol=1e-5)
    targets = cleanrl.compute_q_lambda(**on_device, gamma=0.99, q_lambda=0.65)
    torch.testing.assert_close(targets.double().cpu(), q_lambda_loop(double(inputs), 0.99, 0.65), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [cleanrl.compute_gae, cleanrl.compute_q_lambda])
@pytest.mark.parametrize("N", [1, 4])
def test_forms_of_the_edge(function, N):
    """A value head leaves [N, 1], the scripts reshape to [1, N], flattened it is [N]: never an [N, N] result."""
    inputs = window(0, 6, N)
    expected = function(*inputs.values(), 0.9, 0.8)
    edge = inputs["next_value"], inputs["next_done"]
    for value in (edge[0], edge[0].view(1, N), edge[0].view(N, 1)):
        for done in (edge[1], edge[1].view(1, N), edge[1].view(N, 1)):
            actual = function(*(inputs | dict(next_value=value, next_done=done)).values(), 0.9, 0.8)
            for a, b in zip(actual, expected, strict=True):
                assert a.shape == b.shape
                assert torch.equal(a, b)


def test_any_batch_shape():
    inputs = window(1, 7, 6)
    wanted = cleanrl.compute_gae(**inputs, gamma=0.9, gae_lambda=0.8)
    folded = {name: x.reshape(*x.shape[:-1], 2, 3) for name, x in inputs.items()}
    for a, b in zip(cleanrl.compute_gae(**folded, gamma=0.9, gae_lambda=0.8), wanted, strict=True):
        assert torch.equal(a.reshape(7, 6), b)


def test_flags_are_read_in_place(monkeypatch):
    """What reaches the library is the script's own memory, not a shifted copy."""
    seen = {}
    gae = rlt.gae

    def spy(rewards, values, terminated, **options):
        seen.update(rewards=rewards, values=values, dones=terminated, next_value=options["last_values"])
        seen["next_done"] = options["last_done"]
        return gae(rewards, values, terminated, **options)

    monkeypatch.setattr(rlt, "gae", spy)
    inputs = window(0, 6, 4)
    cleanrl.compute_gae(**inputs | dict(next_value=inputs["next_value"].view(1, 4)), gamma=0.9, gae_lambda=0.8)
    for name, x in inputs.items():
        assert seen[name].data_ptr() == x.data_ptr()


def test_no_graph_and_no_leak_across_episodes():
    inputs = window(0, 4, 1)
    inputs["dones"].zero_()
    inputs["dones"][2] = 1
    clean = cleanrl.compute_gae(**inputs, gamma=0.9, gae_lambda=0.8)
    inputs["rewards"][2:] = float("nan")
    inputs["values"].requires_grad_()
    result = cleanrl.compute_gae(**inputs, gamma=0.9, gae_lambda=0.8)
    assert torch.equal(result.advantages[:2], clean.advantages[:2])
    assert not result.advantages.requires_grad


@hypothesis.given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9))
@hypothesis.settings(max_examples=20)
def test_rnd_has_one_episodic_stream_and_one_that_goes_on(seed, T, N):
    ext, intrinsic = window(seed, T, N), window(seed + 1, T, N)
    result = cleanrl.compute_gae_rnd(
        rewards=ext["rewards"],
        curiosity_rewards=intrinsic["rewards"],
        ext_values=ext["values"],
        int_values=intrinsic["values"],
        dones=ext["dones"],
        next_value_ext=ext["next_value"].view(1, N),
        next_value_int=intrinsic["next_value"].view(1, N),
        next_done=ext["next_done"],
        gamma=0.999,
        int_gamma=0.99,
        gae_lambda=0.95,
    )
    never = dict(dones=torch.zeros(T, N), next_done=torch.zeros(N))
    ext_advantages, ext_returns = gae_loop(double(ext), 0.999, 0.95)
    int_advantages, int_returns = gae_loop(double(intrinsic | never), 0.99, 0.95)
    wanted = (ext_advantages, int_advantages, ext_returns, int_returns)
    for actual, expected in zip(result, wanted, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@hypothesis.given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 9), st.sampled_from([0.0, 0.65, 1.0]))
@hypothesis.settings(max_examples=30)
def test_q_lambda_is_the_loop(seed, T, N, lambda_):
    inputs = window(seed, T, N)
    actual = cleanrl.compute_q_lambda(**inputs, gamma=0.99, q_lambda=lambda_)
    expected = q_lambda_loop(double(inputs), 0.99, lambda_)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_normalisation_over_the_full_batch():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3 + 50
    wide = x.double()
    expected = (wide - wide.mean()) / (wide.std() + 1e-8)
    torch.testing.assert_close(cleanrl.normalize_advantages(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert cleanrl.normalize_advantages(torch.ones(1)).item() == 0.0


def test_rows_that_are_no_transitions():
    """Next-step autoreset under CleanRL's flags: the flagged row shows the old episode's last observation, its action
    is ignored. Without it, the window is two windows."""
    inputs = window(5, 7, 1)
    inputs["dones"] = torch.tensor([0, 0, 0, 1, 0, 0, 0.0]).view(7, 1)
    inputs["next_done"].zero_()
    inputs["rewards"][3] = float("nan")
    result = cleanrl.compute_gae(**inputs, gamma=0.9, gae_lambda=0.8, next_step_autoreset=True)

    def part(rows, next_done):
        pieces = {name: inputs[name][rows] for name in ("rewards", "values", "dones")}
        return cleanrl.compute_gae(
            **pieces, next_value=inputs["next_value"], next_done=torch.tensor([next_done]), gamma=0.9, gae_lambda=0.8
        )

    before, after = part(slice(0, 3), 1.0), part(slice(4, 7), 0.0)
    for name in ("advantages", "returns"):
        actual = getattr(result, name)
        wanted = torch.cat([getattr(before, name), torch.zeros(1, 1), getattr(after, name)])
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["next_value", "next_done"])
def test_wrong_edge(name):
    inputs = window(0, 6, 4) | {name: torch.zeros(6)}
    message = rf"compute_gae: {name} must have one entry for each environment, \[4\], \[1, 4\], \[4, 1\] for rewards"
    with pytest.raises(ValueError, match=message):
        cleanrl.compute_gae(**inputs, gamma=0.9, gae_lambda=0.8)
    with pytest.raises(TypeError, match=f"compute_gae: {name} must be a torch.Tensor, got float"):
        cleanrl.compute_gae(**inputs | {name: 0.0}, gamma=0.9, gae_lambda=0.8)


def test_errors_speak_the_scripts_language():
    inputs = window(0, 6, 4)
    for function in (cleanrl.compute_gae, cleanrl.compute_q_lambda):
        name = function.__name__
        message = rf"{name}: dones must have the shape and device of rewards, \[6, 4\] on cpu, got \[4, 6\] on cpu"
        with pytest.raises(ValueError, match=message):
            function(*(inputs | dict(dones=torch.zeros(4, 6))).values(), 0.9, 0.8)
        with pytest.raises(TypeError, match=f"{name}: dones must be a torch.Tensor, got NoneType"):
            function(*(inputs | dict(dones=None)).values(), 0.9, 0.8)
        with pytest.raises(ValueError, match=f"{name}: next_value must be on the device of rewards, cpu, got meta"):
            function(*(inputs | dict(next_value=torch.zeros(4, device="meta"))).values(), 0.9, 0.8)


ROW_MORE = {"dones": "next_done", "values": "next_value"}


@pytest.mark.parametrize("function", [cleanrl.compute_gae, cleanrl.compute_q_lambda])
@pytest.mark.parametrize("name", ROW_MORE)
def test_a_row_more_is_refused_with_the_way_out(name, function):
    """Scripts that keep the flag, or value, of the observation after the last row as a row T."""
    inputs = window(0, 6, 4)
    longer = torch.cat([inputs[name], inputs[ROW_MORE[name]][None]])
    error = (
        rf"{function.__name__}: {name} must have the shape and device of rewards, \[6, 4\] on cpu, got \[7, 4\] on "
        rf"cpu; it has a row more: pass {name}\[:-1\], and {name}\[-1\] as {ROW_MORE[name]}"
    )
    with pytest.raises(ValueError, match=error):
        function(*(inputs | {name: longer}).values(), 0.9, 0.8)
    ways_out = inputs | {name: longer[:-1], ROW_MORE[name]: longer[-1]}
    for actual, expected in zip(
        function(*ways_out.values(), 0.9, 0.8), function(*inputs.values(), 0.9, 0.8), strict=True
    ):
        assert torch.equal(actual, expected)


SHAPES = {
    (5, 4): "each needs one row a step",
    (6, 4, 1): r"pass NAME\.squeeze\(-1\)",
    (4, 6): r"pass NAME\.t\(\) if it is \[N, T\]",
    (6,): r"got \[6\] on cpu$",
    (4,): r"got \[4\] on cpu$",
    (6, 1): r"got \[6, 1\] on cpu$",
    (1, 4): "each needs one row a step",
    (): r"got \[\] on cpu$",
}


@pytest.mark.parametrize("function", [cleanrl.compute_gae, cleanrl.compute_q_lambda, cleanrl.compute_gae_rnd])
@pytest.mark.parametrize(("shape", "way_out"), SHAPES.items())
def test_shapes_that_do_not_fit(function, shape, way_out):
    """Whatever has rows, named as the script names it, by the function that the script calls."""
    inputs = window(0, 6, 4)
    names = ["values", "dones"]
    if function is cleanrl.compute_gae_rnd:
        names = ["curiosity_rewards", "ext_values", "int_values", "dones"]
        inputs = {
            "rewards": inputs["rewards"],
            **dict.fromkeys(names[:3], inputs["values"]),
            "dones": inputs["dones"],
            **dict.fromkeys(("next_value_ext", "next_value_int"), inputs["next_value"]),
            "next_done": inputs["next_done"],
            "int_gamma": 0.9,
        }
        function(**inputs, gamma=0.9, gae_lambda=0.8)
    factors = {"gamma": 0.9, "q_lambda" if function is cleanrl.compute_q_lambda else "gae_lambda": 0.8}
    op = function.__name__

    def refused(name, x, error, kind=ValueError):
        with pytest.raises(kind, match=f"^{op}: {name} {error}"):
            function(**inputs | factors | {name: x})

    for name in names:
        refused(name, torch.zeros(shape), f"must have the shape and device of rewards.*{way_out.replace('NAME', name)}")
    for name, x in (inputs | factors).items():
        if isinstance(x, float):
            refused(name, torch.ones(3), rf"has shape \[3\]; a tensor {name} is 0-d")
            continue
        refused(name, x.to(torch.complex64), "has dtype torch.complex64", TypeError)
        if name.startswith("next_"):
            refused(name, torch.zeros(3), "must have one entry for each environment")
