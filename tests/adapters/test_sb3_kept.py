"""Calls on rollouts of the same sizes as one before, which Stable-Baselines3's adapter does by the loop that it kept.

Stable-Baselines3's own method is the judge; that a loop was followed shows in a library function that must not be
called.
"""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from sb3_rollouts import NAME, STOCK, both, counts, make_buffer, same_bits

import rl_triton as rlt
from rl_triton import _checks
from rl_triton.adapters import sb3, status
from rl_triton.adapters.sb3 import _compute, _kept

ARRAYS = ("rewards", "values", "episode_starts", "advantages")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(_compute, "SHORT", 0)
    _kept.forget()
    yield
    _kept.forget()


@pytest.fixture
def calls(monkeypatch):
    """Calls that went to the library's function, and not to a loop that was kept."""
    calls, gae = [], _compute._gae

    def counted(*args, **kwargs):
        calls.append(args)
        return gae(*args, **kwargs)

    monkeypatch.setattr(_compute, "_gae", counted)
    return calls


def agree(arguments):
    """Whether ours has the bits of Stable-Baselines3's, and was served."""
    before = counts()
    stock, ours = both(arguments)
    assert counts() == (before[0] + 1, before[1])
    return same_bits(stock.advantages, ours.advantages) and same_bits(stock.returns, ours.returns)


@settings(max_examples=60)
@given(
    n_steps=st.sampled_from([1, 2, 5, 127]),
    n_envs=st.sampled_from([1, 7, 16]),
    ends=st.sampled_from([0.0, 0.2, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 1.0, 1]),
    gae_lambda=st.sampled_from([0.0, 0.95, 1]),
    seed=st.integers(0, 2**31),
)
def test_same_bits_from_the_first_call_and_those_after(n_steps, n_envs, ends, gamma, gae_lambda, seed):
    options = {"ends": ends, "gamma": gamma, "gae_lambda": gae_lambda}
    for i in range(3):
        assert agree(lambda: make_buffer(n_steps, n_envs, seed=seed + i, **options))  # noqa: B023
    kind = _kept.kind_of(n_steps, n_envs, gamma, gae_lambda)
    assert kind.loop is not None


def test_a_loop_is_followed_from_the_second_call_on(calls):
    for seed in range(4):
        assert agree(lambda: make_buffer(5, 16, seed=seed))  # noqa: B023
    assert len(calls) == 1


@pytest.mark.parametrize(("taken", "place"), [(0, 1), (1, 0), (2, 0), (3, 0), (4, 2), (5, 6), (6, 5)])
def test_the_comparison_shows_arrays_that_are_mixed_up(taken, place, monkeypatch):
    """Another array, of no fewer bytes, in the place of one."""
    make = lambda: make_buffer(5, 16)  # noqa: E731
    assert agree(make)
    assert agree(make)

    def mutant(*arrays):
        addresses = list(_kept.addresses_of(*arrays))
        addresses[taken] = addresses[place]
        return addresses

    monkeypatch.setattr(_compute, "addresses_of", mutant)
    assert not agree(make)


def test_factors_are_read_in_every_call(calls):
    buffer, last_values, dones = make_buffer(9, 4)
    stock, *_ = make_buffer(9, 4)
    with sb3.patched():
        for gamma, gae_lambda in [(0.99, 0.95), (0.99, 0.95), (0.9, 0.95), (0.9, 0.5), (0.99, 0.95), (1, 1), (1.0, 1)]:
            for x in (buffer, stock):
                x.gamma, x.gae_lambda = gamma, gae_lambda
            STOCK(stock, last_values, dones)
            buffer.compute_returns_and_advantage(last_values, dones)
            assert same_bits(stock.advantages, buffer.advantages)
            assert same_bits(stock.returns, buffer.returns)
    assert len(calls) == 5


def replaced(buffer):
    for name in ARRAYS:
        setattr(buffer, name, getattr(buffer, name).copy())


def resized(buffer):
    buffer.buffer_size, buffer.n_envs = 7, 3
    for name in ARRAYS:
        setattr(buffer, name, getattr(buffer, name)[:7, :3].copy())


def in_fortran_order(buffer):
    for name in ARRAYS:
        setattr(buffer, name, np.asfortranarray(getattr(buffer, name)))


def strided(buffer):
    buffer.values = np.repeat(buffer.values, 2, axis=1)[:, ::2]


def unaligned(buffer):
    raw = bytearray(buffer.values.nbytes + 1)
    values = np.frombuffer(raw, np.float32, buffer.values.size, 1).reshape(buffer.values.shape)
    values[...] = buffer.values
    buffer.values = values
    assert not values.flags.aligned


def reset(buffer):
    """As before every rollout: all arrays are new ones."""
    kept = {name: getattr(buffer, name) for name in ARRAYS}
    buffer.reset()
    for name, x in kept.items():
        getattr(buffer, name)[...] = x


@pytest.mark.parametrize("change", [replaced, resized, in_fortran_order, strided, unaligned, reset])
def test_arrays_that_changed_since_the_loop_was_kept(change):
    def arguments():
        buffer, last_values, dones = make_buffer(9, 4, seed=3)
        change(buffer)
        return buffer, last_values[: buffer.n_envs], dones[: buffer.n_envs]

    ours, last_values, dones = make_buffer(9, 4, seed=3)
    with sb3.patched():
        ours.compute_returns_and_advantage(last_values, dones)
        ours.compute_returns_and_advantage(last_values, dones)
        change(ours)
        ours.compute_returns_and_advantage(last_values[: ours.n_envs], dones[: ours.n_envs])
    stock, *edge = arguments()
    STOCK(stock, *edge)
    assert same_bits(stock.advantages, ours.advantages)
    assert same_bits(stock.returns, ours.returns)
    assert agree(arguments)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("rewards is not float32", lambda b: setattr(b, "rewards", b.rewards.astype(np.float64))),
        ("values has not the shape (n_steps, n_envs)", lambda b: setattr(b, "values", b.values[:, :1])),
        ("advantages is read-only", lambda b: b.advantages.setflags(write=False)),
        (_compute.FLAGS_ONLY, lambda b: b.episode_starts.__setitem__((3, 1), 0.5)),
        (_compute.FINITE, lambda b: b.rewards.__setitem__((3, 1), np.inf)),
    ],
)
def test_what_is_not_served_is_not_served_by_a_loop_that_was_kept(reason, change):
    buffer, last_values, dones = make_buffer(9, 4)
    with sb3.patched():
        buffer.compute_returns_and_advantage(last_values, dones)
        change(buffer)
        before = status()[NAME]["fallen_back"].get(reason, 0)
        try:
            buffer.compute_returns_and_advantage(last_values, dones)
        except ValueError:
            with pytest.raises(ValueError, match=r"read-only|broadcast"):
                STOCK(buffer, last_values, dones)
    assert status()[NAME]["fallen_back"][reason] == before + 1


@pytest.mark.parametrize("layout", ["C", "fortran"])
@pytest.mark.parametrize("name", ["rewards", "values", "episode_starts"])
def test_advantages_in_the_memory_of_another_array(name, layout):
    """A row on: Stable-Baselines3 reads there what it has written."""

    def arguments():
        buffer, last_values, dones = make_buffer(9, 4)
        if layout == "fortran":
            in_fortran_order(buffer)
        both_in = np.zeros((10, 4), np.float32)
        both_in[:9] = getattr(buffer, name)
        setattr(buffer, name, both_in[:9])
        buffer.advantages = both_in[1:]
        return buffer, last_values, dones

    assert agree(lambda: make_buffer(9, 4))
    assert agree(lambda: make_buffer(9, 4))
    before = status()[NAME]["fallen_back"].get(_compute.SHARED, 0)
    stock, ours = both(arguments)
    assert status()[NAME]["fallen_back"][_compute.SHARED] == before + 1
    np.testing.assert_array_equal(stock.advantages, ours.advantages)
    assert agree(lambda: make_buffer(9, 4))


def test_inputs_that_share_memory(calls):
    def arguments():
        buffer, last_values, dones = make_buffer(9, 4)
        buffer.rewards = buffer.values
        return buffer, last_values, dones

    for make in (arguments, lambda: make_buffer(9, 4), arguments):
        assert agree(make)
    _kept.forget()
    for make in (lambda: make_buffer(9, 4), arguments, lambda: make_buffer(9, 4)):
        assert agree(make)
    assert len(calls) == 4  # none is kept of the first that shared; after one that did not, all are followed


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint8])
def test_flags_of_the_last_step_in_another_dtype(dtype, calls):
    def arguments():
        buffer, last_values, dones = make_buffer(9, 4)
        return buffer, last_values, dones.astype(dtype)

    for make in (lambda: make_buffer(9, 4), arguments, arguments):
        assert agree(make)
    assert len(calls) == 1  # they are bool where the loop reads them


def test_strided_edges(calls):
    def arguments():
        buffer, last_values, dones = make_buffer(9, 4)
        return buffer, last_values.repeat(1, 2)[:, :1], np.repeat(dones, 2)[::2]

    for make in (lambda: make_buffer(9, 4), arguments):
        assert agree(make)
    assert len(calls) == 2


def test_no_array_is_kept():
    buffer, last_values, dones = make_buffer(9, 4)
    arrays = [buffer, dones, last_values, *(getattr(buffer, name) for name in ARRAYS)]
    with sb3.patched():
        for _ in range(3):
            buffer.compute_returns_and_advantage(last_values, dones)
    alive = [weakref.ref(x) for x in (*arrays, buffer.returns)]
    del buffer, last_values, dones, arrays
    gc.collect()
    assert [x() for x in alive] == [None] * len(alive)
    assert agree(lambda: make_buffer(9, 4, seed=1))


def test_the_number_of_loops_that_are_kept_is_bounded():
    for i in range(100):
        assert agree(lambda: make_buffer(2, 2, gamma=i / 100))  # noqa: B023
    assert _kept._kind.cache_info().currsize == _kept._kind.cache_info().maxsize < 100


def test_where_calls_are_to_be_checked_or_seen_none_is_followed(calls, monkeypatch):
    make = lambda: make_buffer(9, 4)  # noqa: E731
    assert agree(make)
    with rlt.backend("cpu"):
        assert agree(make)
    assert len(calls) == 1
    with torch.overrides.BaseTorchFunctionMode():
        assert agree(make)
    assert len(calls) == 2
    with rlt.backend("triton"):
        assert _kept.kind_of(9, 4, 0.99, 0.95) is None
    monkeypatch.setattr(_checks, "READS_DATA", True)
    assert agree(make)
    assert len(calls) == 3


def test_threads_share_a_loop(calls):
    stock, last_values, dones = make_buffer(64, 8)
    STOCK(stock, last_values, dones)
    assert agree(lambda: make_buffer(64, 8))
    wrong = []

    def work():
        for _ in range(50):
            buffer, last_values, dones = make_buffer(64, 8)
            buffer.compute_returns_and_advantage(last_values, dones)
            if not (same_bits(stock.advantages, buffer.advantages) and same_bits(stock.returns, buffer.returns)):
                wrong.append(buffer)

    with sb3.patched():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(calls) == 1
