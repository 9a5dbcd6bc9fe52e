"""n-step replay in tensors, against Stable-Baselines3's `NStepReplayBuffer` from the same draws."""

import pickle

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("stable_baselines3", minversion="2.7", reason="needs Stable-Baselines3 with n-step replay")

from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import rl_triton as rlt
from rl_triton.adapters.sb3 import replay
from rl_triton.adapters.sb3.replay import TensorNStepReplayBuffer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]
SPACES = {
    "Box": (gymnasium.spaces.Box(-1, 1, (2, 3)), gymnasium.spaces.Box(-1, 1, (2,), np.float64)),
    "Image": (gymnasium.spaces.Box(0, 255, (1, 4, 4), np.uint8), gymnasium.spaces.Discrete(4)),
    "Discrete": (gymnasium.spaces.Discrete(5), gymnasium.spaces.MultiDiscrete([2, 3])),
}


def filled(
    buffer_class, *, n_envs=2, size=20, n_steps=3, steps=15, ends=0.2, spaces="Box", seed=0, device="cpu", **options
):
    space, actions = SPACES[spaces]
    space.seed(seed)
    actions.seed(seed)
    rng = np.random.default_rng(seed)
    buffer = buffer_class(size, space, actions, device, n_envs=n_envs, n_steps=n_steps, gamma=0.9, **options)
    for _ in range(steps):
        obs, next_obs = (np.stack([space.sample() for _ in range(n_envs)]) for _ in range(2))
        ended = rng.random(n_envs) < ends
        infos = [{"TimeLimit.truncated": bool(end and rng.random() < 0.5)} for end in ended]
        action = np.stack([actions.sample() for _ in range(n_envs)])
        buffer.add(obs, next_obs, action, rng.normal(size=n_envs), ended, infos)
    return buffer


def assert_alike(theirs, ours, atol=0.0):
    assert type(theirs) is type(ours)
    for name, a, b in zip(theirs._fields, theirs, ours, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        tolerance = atol or (1e-6 if name in ("rewards", "discounts") else 0)
        torch.testing.assert_close(
            a, b.cpu(), atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def sampled(buffer, seed=0, batch_size=64, env=None):
    np.random.seed(seed)
    return buffer.sample(batch_size, env=env)


@settings(max_examples=60)
@given(
    n_steps=st.sampled_from([1, 2, 3, 7]),
    n_envs=st.sampled_from([1, 2, 5]),
    steps=st.sampled_from([1, 2, 5, 9, 10, 11, 25]),  # until, at and beyond the end of 10 rows
    ends=st.sampled_from([0.0, 0.2, 1.0]),
    handle_timeouts=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_samples(n_steps, n_envs, steps, ends, handle_timeouts, seed):
    theirs, ours = (
        filled(
            buffer_class,
            n_envs=n_envs,
            size=10 * n_envs,
            n_steps=n_steps,
            steps=steps,
            ends=ends,
            seed=seed,
            handle_timeout_termination=handle_timeouts,
        )
        for buffer_class in (NStepReplayBuffer, TensorNStepReplayBuffer)
    )
    assert_alike(sampled(theirs, seed), sampled(ours, seed))
    assert_alike(sampled(theirs, seed + 1), sampled(ours, seed + 1))  # sampling changed nothing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spaces", SPACES)
def test_spaces_and_devices(spaces, device):
    theirs = filled(NStepReplayBuffer, spaces=spaces)
    ours = filled(TensorNStepReplayBuffer, spaces=spaces, device=device)
    assert ours.observations.device.type == device
    assert_alike(sampled(theirs), sampled(ours))


def test_the_comparison_would_show_a_mistake(monkeypatch):
    theirs, ours = filled(NStepReplayBuffer), filled(TensorNStepReplayBuffer)
    right = rlt.n_step_returns
    for mutant in (
        lambda r, ended, **options: right(r, torch.zeros_like(ended), **options),
        lambda r, ended, **options: right(r, ended, **options | {"gamma": 0.95}),
        lambda r, ended, **options: right(r, ended, **options | {"n": 2}),
        lambda r, ended, **options: right(r.roll(1, 0), ended, **options),
    ):
        monkeypatch.setattr(replay.rlt, "n_step_returns", mutant)
        with pytest.raises(AssertionError, match="rewards"):
            assert_alike(sampled(theirs), sampled(ours))


def test_normalized():
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2))
    env.reset()
    for _ in range(20):
        env.step(np.zeros((2, 1)))
    buffers = []
    for buffer_class in (NStepReplayBuffer, TensorNStepReplayBuffer):
        buffer = buffer_class(20, env.observation_space, env.action_space, "cpu", n_envs=2, n_steps=3)
        rng = np.random.default_rng(0)
        for _ in range(8):
            obs, next_obs = rng.normal(size=(2, 2, 3))
            buffer.add(obs, next_obs, rng.normal(size=(2, 1)), rng.normal(size=2) * 50, rng.random(2) < 0.2, [{}, {}])
        buffers.append(sampled(buffer, env=env))
    assert_alike(*buffers, atol=1e-5)


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_a_run_of_an_algorithm(algorithm):
    """Same seed, same run but for the last bits of the returns."""
    models = []
    for buffer_class in (NStepReplayBuffer, TensorNStepReplayBuffer):
        env = make_vec_env("CartPole-v1" if algorithm is DQN else "Pendulum-v1", n_envs=2, seed=1)
        model = algorithm(
            "MlpPolicy",
            env,
            learning_starts=20,
            buffer_size=100,
            batch_size=16,
            train_freq=4,
            seed=2,
            device="cpu",
            replay_buffer_class=buffer_class,
            replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99},
        )
        models.append(model.learn(120))
    for name, x in models[0].policy.state_dict().items():
        torch.testing.assert_close(x, models[1].policy.state_dict()[name], atol=1e-3, rtol=1e-3)


def test_save_and_load(tmp_path):
    env = make_vec_env("Pendulum-v1", n_envs=2, seed=1)
    options = {"learning_starts": 20, "buffer_size": 100, "batch_size": 16, "device": "cpu"}
    model = SAC("MlpPolicy", env, replay_buffer_class=TensorNStepReplayBuffer, **options).learn(60)
    model.save_replay_buffer(tmp_path / "replay")
    model.save(tmp_path / "model")
    again = SAC.load(tmp_path / "model", env=env, device="cpu")
    again.load_replay_buffer(tmp_path / "replay")
    assert_alike(sampled(model.replay_buffer), sampled(again.replay_buffer))
    assert_alike(sampled(model.replay_buffer), sampled(pickle.loads(pickle.dumps(again.replay_buffer))))
    again.learn(20)


def test_a_loaded_buffer_goes_to_the_device_of_the_model(tmp_path):
    env = make_vec_env("Pendulum-v1", n_envs=2, seed=1)
    options = {"learning_starts": 20, "buffer_size": 100, "device": "cpu"}
    model = SAC("MlpPolicy", env, replay_buffer_class=TensorNStepReplayBuffer, **options).learn(30)
    model.save_replay_buffer(tmp_path / "replay")
    model.device = torch.device("meta")  # a device that every machine has
    model.load_replay_buffer(tmp_path / "replay")
    assert {getattr(model.replay_buffer, name).device.type for name in replay._FIELDS} == {"meta"}


@pytest.mark.gpu_only
def test_a_buffer_from_a_gpu_on_the_host():
    theirs, ours = filled(NStepReplayBuffer), filled(TensorNStepReplayBuffer, device="cuda")
    again = pickle.loads(pickle.dumps(ours))
    assert again.rewards.device.type == "cuda"
    again.device = "cpu"
    assert_alike(sampled(theirs), sampled(again))
    assert {getattr(again, name).device.type for name in replay._FIELDS} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("reward", 1.5),
        ("reward", np.ones((1, 2))),
        ("reward", np.arange(2.0)[::-1]),
        ("done", True),
        ("done", np.array([True])),
        ("obs", np.arange(6.0).reshape(2, 3)),
        ("next_obs", np.arange(12.0).reshape(2, 2, 3)[::-1]),
        ("action", np.arange(4.0)[::-1]),
    ],
)
def test_add_broadcasts_as_stock_does(name, x):
    stored = []
    for buffer_class in (NStepReplayBuffer, TensorNStepReplayBuffer):
        buffer = buffer_class(8, *SPACES["Box"], "cpu", n_envs=2)
        given = {"obs": np.ones((2, 2, 3)), "next_obs": np.ones((2, 2, 3)), "action": np.ones((2, 2))}
        buffer.add(**given | {"reward": np.ones(2), "done": np.zeros(2), "infos": [{}, {}]} | {name: x})
        stored.append([np.asarray(getattr(buffer, field)) for field in replay._FIELDS])
    for theirs, ours in zip(*stored, strict=True):
        np.testing.assert_array_equal(theirs, ours)


def test_what_does_not_broadcast_and_what_is_not_finite():
    buffer = filled(TensorNStepReplayBuffer)
    given = {"obs": np.ones((2, 2, 3)), "next_obs": np.ones((2, 2, 3)), "action": np.ones((2, 2)), "infos": [{}, {}]}
    with pytest.raises(
        ValueError, match=r"TensorNStepReplayBuffer.add: rewards must broadcast to .* \[2\], got shape \[3\]"
    ):
        buffer.add(**given, reward=np.ones(3), done=np.zeros(2))
    buffer.gamma = float("nan")
    with pytest.raises(ValueError, match="TensorNStepReplayBuffer: gamma must be finite in float32, got nan"):
        sampled(buffer)


def test_dictionaries_are_refused_as_by_stable_baselines3():
    space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Box(-1, 1, (2,))})
    for buffer_class in (NStepReplayBuffer, TensorNStepReplayBuffer):
        with pytest.raises((AssertionError, TypeError)):
            buffer_class(10, space, SPACES["Box"][1])
