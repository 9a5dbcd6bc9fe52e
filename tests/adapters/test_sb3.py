"""The Stable-Baselines3 adapter against the installed Stable-Baselines3.

SB3's own tests use one or two environments and miss a transposed axis; these use several, with episode ends everywhere.
"""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from sb3_rollouts import NAME, STOCK, both, counts, make_buffer, same_bits
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

import rl_triton as rlt
from rl_triton import _backend
from rl_triton.adapters import sb3, status
from rl_triton.adapters.sb3 import _compute, _kept
from rl_triton.adapters.sb3._behaviour import body_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]


@pytest.fixture(autouse=True)
def all_served_and_stock_afterwards(monkeypatch):
    monkeypatch.setattr(_compute, "SHORT", 0)
    yield
    _kept.forget()  # what a mutant left
    sb3.unpatch()
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


@settings(max_examples=200)
@given(
    n_steps=st.sampled_from([1, 2, 5, 127, 300]),
    n_envs=st.sampled_from([1, 2, 7, 16, 300]),
    ends=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0, 1]),
    gae_lambda=st.sampled_from([0.0, 0.8, 0.95, 1.0, 0]),
    seed=st.integers(0, 2**31),
)
def test_same_bits_on_the_cpu(n_steps, n_envs, ends, gamma, gae_lambda, seed):
    options = {"ends": ends, "seed": seed, "gamma": gamma, "gae_lambda": gae_lambda}
    before = counts()
    stock, ours = both(lambda: make_buffer(n_steps, n_envs, **options))
    assert same_bits(stock.advantages, ours.advantages)
    assert same_bits(stock.returns, ours.returns)
    assert counts() == (before[0] + 1, before[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_steps", "n_envs"), [(5, 16), (128, 8), (2048, 3), (16, 1024)])
def test_parity_on_any_device(device, n_steps, n_envs):
    before = counts()
    stock, ours = both(lambda: make_buffer(n_steps, n_envs), device=device)
    bound = 0 if device == "cpu" else 1e-5 * np.abs(stock.advantages).max()
    for name in ("advantages", "returns"):
        assert type(getattr(ours, name)) is np.ndarray
        assert np.abs(getattr(stock, name) - getattr(ours, name)).max() <= bound
    assert counts() == (before[0] + 1, before[1])


def wrong(change):
    """A mutant of the call that is served."""

    def mutant(buffer, rewards, values, starts, last_values, last_done, **options):
        arrays = change(rewards, values, starts, last_values, last_done)
        return GAE(buffer, *arrays, **options)

    return mutant


GAE = _compute._gae


def with_axes_swapped(buffer, *arrays, out, function):
    rewards, values, starts, last_values, last_done = arrays
    n = len(rewards)
    edges = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    results = GAE(buffer, *(x.T.contiguous() for x in (rewards, values, starts)), *edges)
    for target, x in zip(out, results, strict=True):
        target.copy_(x.T)


MUTANTS = {
    "time and environment axes swapped": with_axes_swapped,
    "environments rolled": wrong(lambda r, v, s, last, done: (r, v.roll(1, 1), s, last, done)),
    "flags of another environment": wrong(lambda r, v, s, last, done: (r, v, s.roll(1, 1), last, done)),
    "last_values of another environment": wrong(lambda r, v, s, last, done: (r, v, s, last.roll(1), done)),
    "last_values zeroed": wrong(lambda r, v, s, last, done: (r, v, s, last * 0, done)),
    "last dones ignored": wrong(lambda r, v, s, last, done: (r, v, s, last, torch.zeros_like(done))),
    "last step always terminal": wrong(lambda r, v, s, last, done: (r, v, s, last, torch.ones_like(done))),
    "episode starts shifted": wrong(lambda r, v, s, last, done: (r, v, s.roll(1, 0), last, done)),
    "episode starts ignored": wrong(lambda r, v, s, last, done: (r, v, s * 0, last, done)),
    "lambda ignored": lambda buffer, *arrays, **options: GAE(buffer, *arrays, lambda_=1.0, **options),
    "returns without values": lambda buffer, *arrays, out, function: out[1].copy_(GAE(buffer, *arrays, out=out)[0]),
}


def differential_check():
    """What test_same_bits_on_the_cpu asserts, on one buffer."""
    stock, ours = both(lambda: make_buffer(16, 16, seed=5))
    return same_bits(stock.advantages, ours.advantages) and same_bits(stock.returns, ours.returns)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_differential_check_catches(name, monkeypatch):
    assert differential_check()
    _kept.forget()
    monkeypatch.setattr(_compute, "_gae", MUTANTS[name])
    before = counts()
    assert not differential_check()
    assert counts()[0] == before[0] + 1  # it was the mutant that was compared


class BeforeVersion24(RolloutBuffer):
    """The recurrence as Stable-Baselines3 computed it up to 2.3: not(done) in float64, if dones are bool or integer."""

    def compute_returns_and_advantage(self, last_values, dones):
        following, not_done, advantage = last_values.numpy().flatten(), 1.0 - dones, 0
        for t in range(self.buffer_size - 1, -1, -1):
            delta = self.rewards[t] + self.gamma * following * not_done - self.values[t]
            advantage = delta + self.gamma * self.gae_lambda * not_done * advantage
            self.advantages[t] = advantage
            following, not_done = self.values[t], 1.0 - self.episode_starts[t]
        self.returns = self.advantages + self.values


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("n_steps", "n_envs", "ends"), [(1, 3, 0.5), (40, 7, 0.1), (600, 3, 0.0), (600, 1, 0.01)])
def test_the_body_before_version_24_to_the_bit(dtype, n_steps, n_envs, ends, monkeypatch):
    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", BeforeVersion24)
    original = BeforeVersion24.compute_returns_and_advantage

    def arguments():
        buffer, last_values, dones = make_buffer(n_steps, n_envs, ends=ends, buffer_class=BeforeVersion24)
        return buffer, last_values, dones.astype(dtype)

    name = f"{__name__}.BeforeVersion24.compute_returns_and_advantage"
    before = counts(name)
    stock, ours = both(arguments, original)
    assert same_bits(stock.advantages, ours.advantages)
    assert same_bits(stock.returns, ours.returns)
    assert counts(name) == (before[0] + 1, before[1])
    assert BeforeVersion24.compute_returns_and_advantage is original


def with_another_edge(change):
    right = _compute._compute_float64
    return (
        _compute,
        "_compute_float64",
        lambda buffer, *edge_and_returns: right(buffer, *change(*edge_and_returns[:2]), edge_and_returns[2]),
    )


def with_another_scan(change):
    right = _compute.rlt.affine_scan
    return _compute.rlt, "affine_scan", lambda alpha, beta, time_dim: right(*change(alpha, beta), time_dim=time_dim)


MUTANTS_BEFORE_24 = {
    "last_values zeroed": with_another_edge(lambda last, dones: (last * 0, dones)),
    "last dones ignored": with_another_edge(lambda last, dones: (last, np.zeros_like(dones))),
    "last_values of another environment": with_another_edge(lambda last, dones: (np.roll(last, 1), dones)),
    "environments rolled": with_another_scan(lambda alpha, beta: (alpha.roll(1, 1), beta)),
    "flags of another environment": with_another_scan(lambda alpha, beta: (alpha, beta.roll(1, 1))),
    "flags shifted": with_another_scan(lambda alpha, beta: (alpha, beta.roll(1, 0))),
    "axes swapped": with_another_scan(lambda alpha, beta: (alpha.T, beta.T)),
    "float32 carry": with_another_scan(lambda alpha, beta: (alpha.float(), beta.float())),
}


@pytest.mark.parametrize("name", MUTANTS_BEFORE_24)
def test_the_differential_check_catches_before_version_24(name, monkeypatch):
    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", BeforeVersion24)
    original = BeforeVersion24.compute_returns_and_advantage

    def check():
        stock, ours = both(lambda: make_buffer(16, 16, seed=5, buffer_class=BeforeVersion24), original)
        return same_bits(stock.advantages, ours.advantages)

    assert check()
    monkeypatch.setattr(*MUTANTS_BEFORE_24[name])
    assert not check()


def test_the_two_bodies_differ():
    """So that the two tests above are not one."""
    buffers = []
    for buffer_class in (RolloutBuffer, BeforeVersion24):
        buffer, last_values, dones = make_buffer(600, 3, ends=0.0, buffer_class=buffer_class)
        buffer_class.__dict__["compute_returns_and_advantage"](buffer, last_values, dones)
        buffers.append(buffer)
    assert not same_bits(buffers[0].advantages, buffers[1].advantages)
    np.testing.assert_allclose(buffers[0].advantages, buffers[1].advantages, atol=1e-4)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**31))
def test_zeros_may_differ_in_their_sign_and_in_nothing_else(seed):
    def arguments():
        rng = np.random.default_rng(seed)
        buffer, last_values, dones = make_buffer(9, 5, ends=0.5, seed=seed)
        for x in (buffer.rewards, buffer.values):
            x[...] = rng.choice(np.float32([-0.0, 0.0, 1.0, -1.0]), size=x.shape)
        return buffer, last_values * 0, dones

    stock, ours = both(arguments)
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    np.testing.assert_array_equal(stock.returns, ours.returns)


def test_short_rollouts_are_left_to_stock(monkeypatch):
    """Below a measured number of steps its loop is faster; it says so."""
    monkeypatch.undo()
    assert _compute.SHORT > 1
    for n_steps, n_envs, served in [
        (_compute.SHORT - 1, 2, False),
        (_compute.SHORT, 2, True),
        (1, _compute.SMALL - 1, False),
        (1, _compute.SMALL, True),
    ]:
        before = status().get(NAME, {"fallen_back": {}})["fallen_back"].get(_compute.TOO_SHORT, 0)
        count = counts()[0]
        stock, ours = both(lambda: make_buffer(n_steps, n_envs))  # noqa: B023
        assert same_bits(stock.advantages, ours.advantages)
        assert counts()[0] - count == served
        assert status()[NAME]["fallen_back"].get(_compute.TOO_SHORT, 0) - before == (not served)


def test_an_object_with_no_more_than_the_method_reads():
    def arguments():
        buffer, last_values, dones = make_buffer(20, 5)
        names = ("buffer_size", "rewards", "values", "episode_starts", "advantages", "gamma", "gae_lambda")
        return SimpleNamespace(**{name: getattr(buffer, name) for name in names}), last_values, dones

    stock, ours = arguments(), arguments()
    STOCK(*stock)
    before = counts()
    with sb3.patched():
        RolloutBuffer.compute_returns_and_advantage(*ours)
    assert same_bits(stock[0].advantages, ours[0].advantages)
    assert counts() == (before[0], before[1] + 1)


def test_staging_for_a_device():
    """What a CUDA device is given and gives back, with the host in its place."""
    stock, last_values, dones = make_buffer(40, 6)
    STOCK(stock, last_values, dones)
    for _ in range(2):  # the second time in memory that was used before
        buffer, last_values, dones = make_buffer(40, 6)
        returns = np.empty_like(buffer.returns)
        _compute._compute_on(torch.device("cpu"), buffer, last_values.numpy().reshape(-1), dones, returns)
        assert same_bits(stock.advantages, buffer.advantages)
        assert same_bits(stock.returns, returns)


def in_tensors(device):
    def arguments():
        buffer, last_values, dones = make_buffer(20, 5)
        for name in ("rewards", "values", "episode_starts", "advantages"):
            setattr(buffer, name, torch.from_numpy(getattr(buffer, name)).to(device))
        return buffer, last_values.to(device), dones

    return arguments


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_buffers_of_tensors(device):
    stock, last_values, dones = in_tensors("cpu")()  # Stable-Baselines3 computes these, on the host
    STOCK(stock, last_values, dones)
    buffer, last_values, dones = in_tensors(device)()
    before = counts()
    with sb3.patched():
        buffer.compute_returns_and_advantage(last_values, dones)
    assert counts() == (before[0] + 1, before[1])
    assert buffer.returns.device.type == device
    for name in ("advantages", "returns"):
        theirs, ours = getattr(stock, name).numpy(), getattr(buffer, name).cpu().numpy()
        assert same_bits(theirs, ours) if device == "cpu" else np.allclose(theirs, ours, atol=1e-5)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("rewards is not float32", lambda b, last, dones: setattr(b, "rewards", b.rewards.double())),
        ("flags other than 0 and 1", lambda b, last, dones: b.episode_starts.mul_(0.5)),
        ("rewards, values or last_values that are not finite", lambda b, last, dones: b.rewards[3].fill_(float("nan"))),
    ],
)
def test_tensors_fall_back_too(reason, changed):
    def arguments():
        given = in_tensors("cpu")()
        changed(*given)
        return given

    before = status()[NAME]["fallen_back"].get(reason, 0) if NAME in status() else 0
    stock, ours = both(arguments)
    assert status()[NAME]["fallen_back"][reason] == before + 1
    np.testing.assert_array_equal(np.asarray(stock.advantages), np.asarray(ours.advantages))


def as_a_field(x):
    """Of a record whose size is no multiple of the number's: torch has no strides for it."""
    records = np.zeros(x.shape, [("flag", np.uint8), ("x", x.dtype)])
    records["x"] = x
    return records["x"]


LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "time reversed": lambda x: x[::-1].copy()[::-1],
    "environments reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "field": as_a_field,
}
ARRAYS = ("rewards", "values", "episode_starts", "advantages", "dones")


@pytest.mark.parametrize("names", [ARRAYS, *((name,) for name in ARRAYS)], ids=",".join)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer_class", [RolloutBuffer, BeforeVersion24])
def test_memory_layouts(buffer_class, layout, names, monkeypatch):
    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", buffer_class)
    original = buffer_class.compute_returns_and_advantage

    def arguments():
        buffer, last_values, dones = make_buffer(20, 6, buffer_class=buffer_class)
        for name in set(names) - {"dones"}:
            setattr(buffer, name, LAYOUTS[layout](getattr(buffer, name)))
        return buffer, last_values, LAYOUTS[layout](dones) if "dones" in names else dones

    name = f"{buffer_class.__module__}.{buffer_class.__name__}.compute_returns_and_advantage"
    before = counts(name)
    stock, ours = both(arguments, original)
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    np.testing.assert_array_equal(stock.returns, ours.returns)
    assert counts(name) == (before[0] + 1, before[1])


def test_read_only_arrays_are_no_reason_to_warn():
    def arguments():
        buffer, last_values, dones = make_buffer(20, 6)
        for x in (buffer.rewards, buffer.values, buffer.episode_starts, dones):
            x.flags.writeable = False
        return buffer, last_values, dones

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stock, ours = both(arguments)
    np.testing.assert_array_equal(stock.advantages, ours.advantages)


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8", ">i4", ">f4", ">f2"])
@pytest.mark.parametrize("buffer_class", [RolloutBuffer, BeforeVersion24])
def test_flags_in_dtypes_that_torch_does_not_take(buffer_class, dtype, monkeypatch):
    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", buffer_class)
    original = buffer_class.compute_returns_and_advantage

    def arguments():
        buffer, last_values, dones = make_buffer(600, 3, ends=0.01, buffer_class=buffer_class)
        return buffer, last_values, dones.astype(dtype)

    name = f"{buffer_class.__module__}.{buffer_class.__name__}.compute_returns_and_advantage"
    before = counts(name)
    stock, ours = both(arguments, original)
    assert same_bits(stock.advantages, ours.advantages)
    assert counts(name) == (before[0] + 1, before[1])


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("ends", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf"), 1e39, 10**39])
@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_factors_that_are_not_finite(name, factor, ends):
    """Stable-Baselines3 multiplies them by its masks; selecting would hide them behind the ends of episodes."""
    before = status().get(NAME, {"fallen_back": {}})["fallen_back"].get(_compute.FACTORS, 0)
    stock, ours = both(lambda: make_buffer(12, 4, ends=ends, **{name: factor}))
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    np.testing.assert_array_equal(stock.returns, ours.returns)
    assert status()[NAME]["fallen_back"][_compute.FACTORS] == before + 1


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_a_decay_that_is_not_finite():
    before = status().get(NAME, {"fallen_back": {}})["fallen_back"].get(_compute.FACTORS, 0)
    stock, ours = both(lambda: make_buffer(12, 4, ends=1.0, gamma=1e20, gae_lambda=1e20))
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    assert status()[NAME]["fallen_back"][_compute.FACTORS] == before + 1


def test_arrays_are_written_as_stock_writes_them():
    """advantages in place, returns a new array; a second call changes nothing."""
    buffer, last_values, dones = make_buffer(12, 4)
    advantages, returns = buffer.advantages, buffer.returns
    with sb3.patched():
        buffer.compute_returns_and_advantage(last_values=last_values, dones=dones)
        assert buffer.advantages is advantages
        assert buffer.returns is not returns
        first = buffer.advantages.copy(), buffer.returns.copy()
        buffer.compute_returns_and_advantage(last_values, dones)
    assert same_bits(first[0], buffer.advantages)
    assert same_bits(first[1], buffer.returns)


def test_gamma_is_read_at_the_call():
    def arguments():
        buffer, last_values, dones = make_buffer(12, 4)
        buffer.gamma, buffer.gae_lambda = 0.5, 0.25
        return buffer, last_values, dones

    stock, ours = both(arguments)
    assert same_bits(stock.advantages, ours.advantages)


def change(**attributes):
    def apply(buffer, last_values, dones):
        for name, value in attributes.items():
            setattr(buffer, name, value(getattr(buffer, name)) if callable(value) else value)
        return buffer, last_values, dones

    return apply


def put(name, index, x):
    def apply(buffer, last_values, dones):
        getattr(buffer, name)[index] = x
        return buffer, last_values, dones

    return apply


FALLBACKS = {
    "gamma or gae_lambda is not a Python number": [
        change(gamma=np.float64(0.99)),
        change(gae_lambda=np.float32(0.9)),
        change(gamma=np.full(5, 0.9, np.float32)),
    ],
    "rewards is not float32": [change(rewards=lambda x: x.astype(np.float64))],
    "values is not float32": [change(values=lambda x: x.astype(np.float64))],
    "values is not a numpy array": [change(values=lambda x: x.view(np.ma.MaskedArray))],
    "rewards is read-only": [change(rewards=lambda x: np.broadcast_to(x, x.shape))],
    "rewards has not the shape (n_steps, n_envs)": [change(rewards=lambda x: x[:, :1])],
    "last_values is not a float32 tensor": [lambda b, last, dones: (b, last.double(), dones)],
    "last_values has not one entry for each environment": [lambda b, last, dones: (b, last[:1], dones)],
    "dones is not a numpy array with one entry for each environment": [lambda b, last, dones: (b, last, dones[:1])],
    "flags other than 0 and 1": [put("episode_starts", (3, 1), 0.5), lambda b, last, dones: (b, last, dones * 2)],
    "rewards, values or last_values that are not finite": [
        put("rewards", (7, 2), np.nan),
        put("values", (0, 0), np.inf),
        put("rewards", (19, 4), -np.inf),
        lambda b, last, dones: (b, torch.full_like(last, float("nan")), np.ones_like(dones)),
    ],
    "dones has a dtype that torch does not have": [
        lambda b, last, dones: (b, last, dones.astype(object)),
        lambda b, last, dones: (b, last, dones.astype(np.longdouble)),
    ],
}


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("reason", "changed"), [(reason, change) for reason, changes in FALLBACKS.items() for change in changes]
)
def test_falls_back_to_stock_and_says_why(reason, changed):
    """What Stable-Baselines3 accepts and we do not serve gets Stable-Baselines3's numbers, NaN included."""
    before = status().get(NAME, {"fallen_back": {}})["fallen_back"].get(reason, 0)
    stock, ours = both(lambda: changed(*make_buffer(20, 5)))
    assert status()[NAME]["fallen_back"][reason] == before + 1
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    np.testing.assert_array_equal(stock.returns, ours.returns)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (lambda b, last, dones: (b, last.numpy(), dones), AttributeError),
        (lambda b, last, dones: (b, last, dones.tolist()), AttributeError),
        (lambda b, last, dones: (b, last.requires_grad_(), dones), RuntimeError),
        (lambda b, last, dones: (b, last[:3], dones), ValueError),
    ],
)
def test_errors_are_stocks_own(changed, error):
    arguments = changed(*make_buffer(20, 5))
    with pytest.raises(error) as stock:
        STOCK(*arguments)
    with sb3.patched(), pytest.raises(error) as ours:
        arguments[0].compute_returns_and_advantage(*arguments[1:])
    assert str(stock.value) == str(ours.value)


def test_after_get_the_arrays_are_flat():
    """A recompute on flattened arrays raises as in stock for several environments, and works for one."""
    for n_envs in (1, 3):
        buffer, last_values, dones = make_buffer(8, n_envs)
        with sb3.patched():
            buffer.compute_returns_and_advantage(last_values, dones)
            before = buffer.advantages.copy()
            buffer.full = True
            next(buffer.get(4))
            if n_envs == 1:
                buffer.compute_returns_and_advantage(last_values, dones)
                assert same_bits(before, buffer.advantages)
            else:
                with pytest.raises(ValueError, match="broadcast"):
                    buffer.compute_returns_and_advantage(last_values, dones)


# ------------------------------------------------------------------------------------------------ patch and unpatch


def test_patch_is_idempotent_and_exactly_reversible():
    assert not sb3.is_patched()
    sb3.patch()
    installed = RolloutBuffer.compute_returns_and_advantage
    assert installed is not STOCK
    sb3.patch()
    assert RolloutBuffer.compute_returns_and_advantage is installed
    assert sb3.is_patched()
    assert status()[NAME]["active"]
    sb3.unpatch()
    assert RolloutBuffer.compute_returns_and_advantage is STOCK
    assert RolloutBuffer.__dict__["compute_returns_and_advantage"] is STOCK
    assert not sb3.is_patched()
    sb3.unpatch()


def test_contexts_nest():
    with sb3.patched():
        with sb3.patched():
            assert sb3.is_patched()
        assert sb3.is_patched()
        sb3.patch()
    assert sb3.is_patched()
    sb3.unpatch()
    with pytest.raises(KeyError), sb3.patched():
        raise KeyError
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


def test_contexts_in_threads():
    def work():
        for _ in range(20):
            with sb3.patched():
                assert sb3.is_patched()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


def test_signature_and_doc_stay():
    import inspect

    with sb3.patched():
        method = RolloutBuffer.compute_returns_and_advantage
        assert inspect.signature(method) == inspect.signature(STOCK)
        assert method.__doc__ == STOCK.__doc__
        assert method.__wrapped__ is STOCK


def test_a_bound_method_taken_while_patched_goes_back_to_stock():
    buffer, last_values, dones = make_buffer(8, 2)
    with sb3.patched():
        method = buffer.compute_returns_and_advantage
    before = counts()
    method(last_values, dones)
    assert counts() == before


def test_a_later_wrapper_is_left_in_place():
    import functools

    sb3.patch()
    under = RolloutBuffer.compute_returns_and_advantage

    @functools.wraps(under)
    def wrapper(self, last_values, dones):
        calls.append(self)
        return under(self, last_values, dones)

    calls = []
    RolloutBuffer.compute_returns_and_advantage = wrapper
    try:
        with pytest.warns(UserWarning, match="was wrapped after rl_triton patched it"):
            sb3.unpatch()
        assert RolloutBuffer.compute_returns_and_advantage is wrapper
        before = counts()
        make_and_compute()
        assert counts() == before
        sb3.patch()  # on again under the same wrapper
        make_and_compute()
        assert counts()[0] == before[0] + 1
        assert len(calls) == 2
    finally:
        RolloutBuffer.compute_returns_and_advantage = under
        sb3.unpatch()


def make_and_compute(**options):
    buffer, last_values, dones = make_buffer(6, 2, **options)
    buffer.compute_returns_and_advantage(last_values, dones)
    return buffer


class Overriding(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values, dones):
        self.advantages[...] = 7.0


class Extending(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values, dones):
        super().compute_returns_and_advantage(last_values, dones)
        self.advantages -= self.advantages.mean()


def test_subclasses():
    """One that overrides the method is left alone; the super() call of one that extends it is served."""
    before = counts()
    with sb3.patched():
        assert (make_and_compute(buffer_class=Overriding).advantages == 7.0).all()
        assert counts() == before
        extended = make_and_compute(buffer_class=Extending)
        assert counts()[0] == before[0] + 1
    assert same_bits(extended.advantages, make_and_compute(buffer_class=Extending).advantages)
    assert "compute_returns_and_advantage" not in DictRolloutBuffer.__dict__


def test_unknown_device():
    with pytest.raises(ValueError, match=r"sb3\.patch: device must be 'cpu' or a CUDA device, got 'meta'"):
        sb3.patch(device="meta")


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"sb3\.patch: torch sees no CUDA device here, got device='cuda:1'; pass 'cpu'"
    ):
        sb3.patch(device="cuda:1")
    assert not sb3.is_patched()


def test_cuda_does_not_survive_a_fork(monkeypatch):
    """A forked child computes on the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    before = counts()
    stock, ours = both(lambda: make_buffer(20, 5), device="cuda")
    assert same_bits(stock.advantages, ours.advantages)
    assert counts() == (before[0] + 1, before[1])


@pytest.mark.parametrize("forced", ["triton", "cpu"])
def test_what_is_installed_is_found_out_under_a_backend_that_is_forced(forced, monkeypatch):
    """Whatever that one serves: here "triton" has no interpreter, so it takes no arrays of the host."""
    monkeypatch.setattr(_backend, "_interpreting", lambda: False)
    body_of.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rlt.backend(forced):
            sb3.patch()
    before = counts()
    buffer = make_and_compute()
    assert counts() == (before[0] + 1, before[1])
    sb3.unpatch()
    assert same_bits(buffer.advantages, make_and_compute().advantages)


def test_a_call_under_a_backend_that_does_not_serve_it_is_left_to_stock(monkeypatch):
    monkeypatch.setattr(_backend, "_interpreting", lambda: False)
    with rlt.backend("triton"):
        before = counts()
        stock, ours = both(lambda: make_buffer(20, 5))
        assert counts() == (before[0], before[1] + 1)
    assert same_bits(stock.advantages, ours.advantages)


def test_a_body_that_computes_something_else_is_refused(monkeypatch):
    class Other(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values, dones):
            self.advantages[...] = 0.0
            self.returns = self.advantages + self.values

    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", Other)
    with pytest.raises(RuntimeError, match="does not compute the advantages that"):
        sb3.patch()


def test_a_body_that_rounds_otherwise_is_served_with_a_warning(monkeypatch):
    class Other(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values, dones):
            super().compute_returns_and_advantage(last_values, dones)
            self.advantages *= np.float32(1 + 1e-6)

    monkeypatch.setattr("stable_baselines3.common.buffers.RolloutBuffer", Other)
    try:
        with pytest.warns(UserWarning, match="rounds its advantages in a way that rl_triton does not know"):
            sb3.patch()
        assert sb3.is_patched()
    finally:
        sb3.unpatch()
