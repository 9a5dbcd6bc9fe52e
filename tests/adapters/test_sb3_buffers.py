"""Buffer classes of the Stable-Baselines3 adapter, against Stable-Baselines3's and sb3-contrib's own."""

import contextlib
import copy
import inspect
import pickle
import re
import subprocess
import sys
import warnings

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")

import sb3_contrib as contrib
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from sb3_rollouts import counts, same_bits
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

import rl_triton.reference as reference
from rl_triton.adapters import sb3
from rl_triton.adapters.sb3 import _compute, buffers, contrib_buffers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]
SCAN = "rl_triton.adapters.sb3.buffers.Scan.compute_returns_and_advantage"
TENSORS = "rl_triton.adapters.sb3.buffers.TensorStorage.compute_returns_and_advantage"


@pytest.fixture(autouse=True)
def all_served(monkeypatch):
    monkeypatch.setattr(_compute, "SHORT", 0)


class World(gymnasium.Env):
    """Observations of a Box or a Dict, two actions, ends and time limits."""

    def __init__(self, dictionary, seed):
        box = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        grid = gymnasium.spaces.Box(0, 255, (2, 2), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"a": box, "b": grid}) if dictionary else box
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space.seed(seed)
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        end, cut = self.rng.random(2) < (0.1, 0.1)
        return self.observation_space.sample(), float(self.rng.normal() + action), bool(end), bool(cut), {}

    def action_masks(self):
        return self.rng.random(2) < (0.8, 2.0)


def make(algorithm, dictionary=False, *, n_envs=3, **options):
    env = DummyVecEnv([lambda i=i: World(dictionary, i) for i in range(n_envs)])
    recurrent = algorithm is contrib.RecurrentPPO
    policy = ("MultiInput" if dictionary else "Mlp") + ("LstmPolicy" if recurrent else "Policy")
    given = {"n_steps": 12, "seed": 5, "device": "cpu"}
    if algorithm is not A2C:
        given["batch_size"] = 12
    if "PPO" in algorithm.__name__:
        given["n_epochs"] = 2
    buffer_class = options.pop("buffer_class", None)
    if buffer_class is not None and not recurrent:
        options["rollout_buffer_class"] = buffer_class
    model = algorithm(policy, env, **given | options)
    if buffer_class is not None and recurrent:
        model.rollout_buffer = contrib_buffers.recurrent_buffer(model, buffer_class)
    return model


def learned(algorithm, dictionary=False, **options):
    model = make(algorithm, dictionary, **options)
    model.learn(2 * model.n_steps * model.n_envs)
    return model


RUNS = [
    (A2C, False, buffers.ScanRolloutBuffer, buffers.TensorRolloutBuffer),
    (PPO, False, buffers.ScanRolloutBuffer, buffers.TensorRolloutBuffer),
    (PPO, True, buffers.ScanDictRolloutBuffer, buffers.TensorDictRolloutBuffer),
    (contrib.TRPO, False, buffers.ScanRolloutBuffer, buffers.TensorRolloutBuffer),
    (
        contrib.MaskablePPO,
        False,
        contrib_buffers.ScanMaskableRolloutBuffer,
        contrib_buffers.TensorMaskableRolloutBuffer,
    ),
    (
        contrib.MaskablePPO,
        True,
        contrib_buffers.ScanMaskableDictRolloutBuffer,
        contrib_buffers.TensorMaskableDictRolloutBuffer,
    ),
    (
        contrib.RecurrentPPO,
        False,
        contrib_buffers.ScanRecurrentRolloutBuffer,
        contrib_buffers.TensorRecurrentRolloutBuffer,
    ),
    (
        contrib.RecurrentPPO,
        True,
        contrib_buffers.ScanRecurrentDictRolloutBuffer,
        contrib_buffers.TensorRecurrentDictRolloutBuffer,
    ),
]


def name_of(run):
    return run.__name__ if isinstance(run, type) else {True: "Dict", False: "Box"}[run]


@pytest.mark.parametrize(("algorithm", "dictionary", "scan", "tensors"), RUNS, ids=name_of)
def test_same_seed_same_parameters(algorithm, dictionary, scan, tensors):
    """On the CPU each class gives the run that Stable-Baselines3's own gives, to the bit, without a patch."""
    stock = learned(algorithm, dictionary)
    for buffer_class, name in ((scan, SCAN), (tensors, TENSORS)):
        before = counts(name)
        ours = learned(algorithm, dictionary, buffer_class=buffer_class)
        assert type(ours.rollout_buffer) is buffer_class
        assert counts(name) == (before[0] + 2, before[1])
        for key, x in stock.policy.state_dict().items():
            assert torch.equal(x, ours.policy.state_dict()[key]), (buffer_class, key)


# ---------------------------------------------------------------------------------------------------------- every field

SPACES = {
    "Box": gymnasium.spaces.Box(-1, 1, (2, 3), np.float32),
    "float64": gymnasium.spaces.Box(-1, 1, (2,), np.float64),
    "uint8": gymnasium.spaces.Box(0, 255, (4,), np.uint8),
    "Discrete": gymnasium.spaces.Discrete(7),
    "MultiBinary": gymnasium.spaces.MultiBinary(3),
    "Dict": gymnasium.spaces.Dict({"a": gymnasium.spaces.Box(-1, 1, (2,)), "b": gymnasium.spaces.Discrete(4)}),
}
ACTIONS = {
    "Box": gymnasium.spaces.Box(-1, 1, (2,)),
    "Discrete": gymnasium.spaces.Discrete(3),
    "MultiDiscrete": gymnasium.spaces.MultiDiscrete([2, 3]),
}
PAIRS = {
    "plain": ((RolloutBuffer, buffers.TensorRolloutBuffer), (DictRolloutBuffer, buffers.TensorDictRolloutBuffer)),
    "maskable": (
        (MaskableRolloutBuffer, contrib_buffers.TensorMaskableRolloutBuffer),
        (MaskableDictRolloutBuffer, contrib_buffers.TensorMaskableDictRolloutBuffer),
    ),
    "recurrent": (
        (RecurrentRolloutBuffer, contrib_buffers.TensorRecurrentRolloutBuffer),
        (RecurrentDictRolloutBuffer, contrib_buffers.TensorRecurrentDictRolloutBuffer),
    ),
}
STEPS, ENVS = 6, 4


def fill(buffer, space, actions, kind, seed=0, steps=STEPS):
    """As a collector does, with Discrete observations and actions in the shapes that environments give."""
    rng = np.random.default_rng(seed)
    space.seed(seed)
    actions.seed(seed)
    for _ in range(steps):
        samples = [space.sample() for _ in range(ENVS)]
        if isinstance(space, gymnasium.spaces.Dict):
            obs = {key: np.stack([x[key] for x in samples]) for key in space.spaces}
        else:
            obs = np.stack(samples)
        extra = {}
        if kind == "maskable":
            extra["action_masks"] = rng.random((ENVS, buffer.mask_dims)) < 0.5
        if kind == "recurrent":
            states = [torch.from_numpy(rng.normal(size=(2, ENVS, 5)).astype(np.float32)) for _ in range(4)]
            extra["lstm_states"] = RNNStates(tuple(states[:2]), tuple(states[2:]))
        value, log_prob = torch.from_numpy(rng.normal(size=(2, ENVS)).astype(np.float32))
        buffer.add(
            obs,
            np.stack([actions.sample() for _ in range(ENVS)]),
            rng.normal(size=ENVS),
            rng.random(ENVS) < 0.3,
            value[:, None],
            log_prob,
            **extra,
        )
    buffer.compute_returns_and_advantage(
        torch.from_numpy(rng.normal(size=(ENVS, 1)).astype(np.float32)), rng.random(ENVS) < 0.5
    )


def assert_alike(a, b, where=""):
    if isinstance(a, dict):
        assert sorted(a) == sorted(b)
        for key in a:
            assert_alike(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, tuple):
        for field, x, y in zip(getattr(a, "_fields", range(len(a))), a, b, strict=True):
            assert_alike(x, y, f"{where}.{field}")
    else:
        assert a.dtype == b.dtype, where
        torch.testing.assert_close(
            a.cpu(), b.cpu(), rtol=0, atol=0 if b.device.type == "cpu" else 1e-5, msg=lambda m: where + m
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", PAIRS)
def test_minibatches(kind, space, actions, batch_size, device):
    """Every field of every minibatch of two epochs has Stable-Baselines3's shape, dtype and numbers."""
    if kind == "maskable" and actions == "Box":
        pytest.skip("masks are for discrete actions")
    dictionary = space == "Dict"
    stock_class, our_class = PAIRS[kind][dictionary]
    more = [(STEPS, 2, ENVS, 5)] if kind == "recurrent" else []
    batches = []
    for buffer_class, where in ((stock_class, "cpu"), (our_class, device)):
        buffer = buffer_class(STEPS, SPACES[space], ACTIONS[actions], *more, device=where, n_envs=ENVS, gae_lambda=0.9)
        for rollout in range(2):  # reset() starts anew
            buffer.reset()
            fill(buffer, SPACES[space], ACTIONS[actions], kind, seed=rollout)
        np.random.seed(0)
        batches.append([sample for _ in range(2) for sample in buffer.get(batch_size)])
    assert len(batches[0]) == len(batches[1]) > 1
    for theirs, ours in zip(*batches, strict=True):
        assert type(theirs) is type(ours)
        assert_alike(theirs, ours)


def filled(buffer_class=buffers.TensorRolloutBuffer, device="cpu", **options):
    space, actions = SPACES["Box"], ACTIONS["Box"]
    buffer = buffer_class(STEPS, space, actions, device=device, n_envs=ENVS, gae_lambda=0.9, **options)
    buffer.reset()
    fill(buffer, space, actions, "plain")
    return buffer


@pytest.mark.parametrize("device", DEVICES)
def test_where_tensors_live_and_what_attributes_give(device):
    buffer = filled(device=device)
    assert {x.device.type for x in buffer.tensors.values()} == {device}
    stock = filled(RolloutBuffer)
    for name in (
        "rewards",
        "values",
        "episode_starts",
        "advantages",
        "returns",
        "log_probs",
        "observations",
        "actions",
    ):
        ours = getattr(buffer, name)
        np.testing.assert_allclose(ours, getattr(stock, name), atol=1e-5)
        assert type(ours) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            ours[0] = 1  # it would be lost
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.rewards = buffer.rewards
        rewards = buffer.rewards + 1
        buffer.rewards = rewards.astype(np.float64)
    assert np.array_equal(buffer.rewards, rewards)
    assert buffer.tensors["rewards"].dtype is torch.float32
    assert buffer.tensors["rewards"].device.type == device
    with pytest.raises(AttributeError, match="no attribute 'reward'"):
        buffer.reward  # noqa: B018


def stepped(buffer_class, space, steps, **changed):
    """Some steps, of which one is stored as it is given here."""
    buffer = buffer_class(steps, SPACES[space], ACTIONS["Box"], device="cpu", n_envs=ENVS)
    one = np.ones((ENVS, *SPACES[space].shape), SPACES[space].dtype)
    plain = {
        "obs": one,
        "action": np.arange(ENVS * 2.0).reshape(ENVS, 2),
        "reward": np.arange(ENVS * 1.0),
        "episode_start": np.zeros(ENVS, bool),
        "value": torch.arange(ENVS * 1.0)[:, None],
        "log_prob": torch.arange(ENVS * 2.0)[::2],
    }
    buffer.add(**plain | changed)
    return buffer


FIELDS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs")
ROW = np.arange(ENVS * 1.0)
ACCEPTED = {
    "reward": [
        1.5, np.array(1.5), np.array([1.5]), [1, 2, 3, 4], ROW[None], ROW[::-1], ROW.astype(">f8"), ROW.astype("u2"),
        ROW.astype(np.longdouble), ROW.astype(object), np.broadcast_to(1.5, ENVS), np.float64(2), torch.arange(ENVS),
    ],
    "episode_start": [True, 1, np.array([True]), ROW[::-1] > 1, np.ones((1, ENVS))],
    "value": [torch.tensor(2.0), torch.tensor([2.0]), torch.ones(1, 1), torch.ones(ENVS), torch.ones(1, ENVS).double()],
    "log_prob": [torch.tensor(2.0), torch.tensor([2.0]), torch.ones(1, 1), torch.ones(1, ENVS)],
    "obs": [
        1.5, np.ones(3), np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(1, 2, 3), np.ones((ENVS, 2, 1)),
        np.arange(ENVS * 6.0).reshape(ENVS, 2, 3)[:, ::-1], np.ones((1, ENVS, 2, 3), ">f4"),
    ],
    "action": [np.arange(ENVS * 2.0), np.arange(ENVS * 2.0).reshape(2, ENVS), np.ones((ENVS, 2), ">f8")[::-1]],
}  # fmt: skip
REFUSED = {
    "reward": [ROW[:, None], ROW[:2], np.ones((2, ENVS))],
    "value": [torch.ones(ENVS + 1), torch.ones(ENVS, 2)],
    "log_prob": [torch.ones(ENVS, 1), torch.ones(2)],
    "obs": [np.ones((ENVS, 3)), np.ones(ENVS * 6), np.ones((ENVS, 3, 2)), np.ones((2, ENVS, 2, 3))],
    "action": [np.ones(2), np.ones((ENVS, 1)), 1.0 * ROW],
}


@pytest.mark.parametrize(("name", "x"), [(name, x) for name, given in ACCEPTED.items() for x in given])
def test_add_broadcasts_as_stock_does(name, x):
    stock, ours = (stepped(c, "Box", 2, **{name: x}) for c in (RolloutBuffer, buffers.TensorRolloutBuffer))
    for field in FIELDS:
        theirs, mine = getattr(stock, field), getattr(ours, field)
        assert theirs.dtype == mine.dtype
        np.testing.assert_array_equal(theirs, mine)


@pytest.mark.parametrize(("name", "x"), [(name, x) for name, given in REFUSED.items() for x in given])
def test_add_refuses_what_stock_refuses(name, x):
    with pytest.raises(ValueError, match=r"broadcast|reshape"):
        stepped(RolloutBuffer, "Box", 2, **{name: x})
    field = next(field for field in FIELDS if field.startswith(name))
    shown = list(x.reshape(-1).shape if name == "value" else x.shape)
    error = (
        rf"TensorRolloutBuffer.add: {field} must .* one step of all environments, .* got shape {re.escape(str(shown))}"
    )
    with pytest.raises(ValueError, match=error):
        stepped(buffers.TensorRolloutBuffer, "Box", 2, **{name: x})


def test_add_reshapes_discrete_observations_and_nothing_else():
    for x in (np.arange(ENVS), np.arange(ENVS)[:, None], np.arange(ENVS)[::-1]):
        stock, ours = (stepped(c, "Discrete", 2, obs=x) for c in (RolloutBuffer, buffers.TensorRolloutBuffer))
        np.testing.assert_array_equal(stock.observations, ours.observations)
    for buffer_class in (RolloutBuffer, buffers.TensorRolloutBuffer):
        with pytest.raises(ValueError, match="shape"):
            stepped(buffer_class, "Discrete", 2, obs=np.arange(1))


def test_edges_broadcast_as_in_stock():
    for last, dones in ((torch.tensor(2.0), np.array(True)), (torch.ones(1, ENVS), np.ones(1, bool))):
        stock, ours = filled(RolloutBuffer), filled()
        for x in (stock, ours):
            x.compute_returns_and_advantage(last, dones)
        np.testing.assert_allclose(stock.advantages, ours.advantages, rtol=1e-6)
    ours.compute_returns_and_advantage(torch.ones(ENVS), (np.arange(ENVS) > 1)[::-1])
    stock.compute_returns_and_advantage(torch.ones(ENVS), (np.arange(ENVS) > 1)[::-1])
    np.testing.assert_allclose(stock.advantages, ours.advantages, rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"compute_returns_and_advantage: last_values must broadcast .* got shape \[3\]"
    ):
        ours.compute_returns_and_advantage(torch.ones(3), np.zeros(ENVS, bool))


def test_assigned_arrays_that_torch_does_not_take():
    buffer = filled()
    for x in (buffer.rewards[::-1], buffer.rewards.astype(">f4"), buffer.rewards.astype(np.longdouble)):
        buffer.rewards = x
        np.testing.assert_array_equal(buffer.rewards, x)
        assert buffer.tensors["rewards"].dtype is torch.float32


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e39, np.float64("nan")])
@pytest.mark.parametrize("name", ["gamma", "gae_lambda"])
def test_factors_that_are_not_finite_are_refused(name, factor):
    """Stock gives NaN everywhere; there is nothing to fall back to, and a flag would hide it."""
    buffer = filled(HeadedTensorBuffer, heads=("cost",))
    setattr(buffer, name, factor)
    for call in (
        lambda: buffer.compute_returns_and_advantage(torch.ones(ENVS), np.zeros(ENVS, bool)),
        lambda: buffer.compute_heads({"cost": torch.ones(ENVS)}, np.zeros(ENVS, bool)),
    ):
        with pytest.raises(ValueError, match=f"HeadedTensorBuffer: {name} must be finite in float32, got"):
            call()
    with pytest.raises(ValueError, match="ExtraHeads: head_gammas must be finite in float32"):
        filled(HeadedBuffer, heads=("cost",), head_gammas=(factor,))


def test_an_incomplete_rollout():
    buffer = buffers.TensorRolloutBuffer(STEPS, SPACES["Box"], ACTIONS["Box"], device="cpu", n_envs=ENVS)
    with pytest.raises(RuntimeError, match="TensorRolloutBuffer: the rollout is not complete: 0 of 6"):
        next(buffer.get())


def test_tensor_gamma_and_contained_nan():
    buffer = filled()
    rewards = buffer.tensors["rewards"]
    rewards[2, 1] = float("nan")
    buffer.tensors["episode_starts"][2, 1] = 1  # an episode ends before the NaN
    buffer.gamma = torch.linspace(0.5, 1, STEPS)[:, None]
    last, done = torch.ones(ENVS, 1), np.zeros(ENVS, bool)
    buffer.compute_returns_and_advantage(last, done)
    starts = buffer.tensors["episode_starts"]
    ended = torch.cat([starts[1:], torch.zeros(1, ENVS)])
    expected = reference.gae(
        rewards.double(),
        buffer.tensors["values"].double(),
        ended,
        last_values=last[:, 0].double(),
        gamma=buffer.gamma.double().expand(STEPS, ENVS),
        lambda_=0.9,
        time_dim=0,
    )
    torch.testing.assert_close(buffer.tensors["advantages"].double(), expected[0], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert np.isfinite(buffer.advantages[:2, 1]).all()
    assert np.isnan(buffer.advantages[2, 1])


def test_pickled_buffers():
    for buffer_class in (buffers.TensorRolloutBuffer, buffers.ScanRolloutBuffer):
        buffer = filled(buffer_class)
        again = pickle.loads(pickle.dumps(buffer))
        assert same_bits(buffer.advantages, again.advantages)
        np.random.seed(1)
        one = next(buffer.get(5))
        np.random.seed(1)
        assert_alike(one, next(again.get(5)))


def tensors_of(x):
    """All tensors that an object or a dictionary holds."""
    for part in (x if isinstance(x, dict) else vars(x)).values():
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, dict):
            yield from tensors_of(part)


RESIDENT = [
    lambda device: filled(buffers.TensorRolloutBuffer, device),
    lambda device: filled(HeadedTensorBuffer, device, **HEADS),
    lambda device: filled_dictionary(device),
]


def filled_dictionary(device):
    buffer = buffers.TensorDictRolloutBuffer(STEPS, SPACES["Dict"], ACTIONS["Box"], device=device, n_envs=ENVS)
    fill(buffer, SPACES["Dict"], ACTIONS["Box"], "plain")
    return buffer


@pytest.mark.parametrize("make", RESIDENT)
def test_what_is_kept_follows_the_device(make):
    buffer = make("cpu")
    buffer.gamma = torch.tensor(0.9)
    advantages = buffer.advantages.copy()
    buffer.device = "cpu"
    assert np.array_equal(buffer.advantages, advantages)
    buffer.device = "meta"  # a device that every machine has
    assert buffer.device == torch.device("meta")
    assert {x.device.type for x in tensors_of(buffer)} == {"meta"}
    buffer.reset()
    assert {x.device.type for x in tensors_of(buffer)} == {"meta"}


@pytest.mark.parametrize("make", RESIDENT)
def test_a_buffer_from_a_device_that_is_not_here(make, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    buffer = make("cpu")
    vars(buffer)["device"] = torch.device("cuda:1")  # as a machine with two devices would write it
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), copy.copy(buffer)):
        assert again.device == torch.device("cpu")
        for kept, x in zip(tensors_of(again), tensors_of(buffer), strict=True):
            assert torch.equal(kept, x)
        again.rewards = again.rewards + 1
        assert not np.array_equal(again.rewards, buffer.rewards)
        next(again.get(5))


@pytest.mark.gpu_only
@pytest.mark.parametrize("make", RESIDENT)
def test_a_pickle_from_a_gpu(make):
    buffer = make("cuda")
    again = pickle.loads(pickle.dumps(buffer))
    assert again.device.type == "cuda"
    assert {x.device.type for x in tensors_of(again)} == {"cuda"}
    assert np.array_equal(again.advantages, buffer.advantages)
    again.device = "cpu"
    assert {x.device.type for x in tensors_of(again)} == {"cpu"}
    assert {x.device.type for x in tensors_of(buffer)} == {"cuda"}
    buffer.gamma = torch.tensor(0.9, device="cuda")
    assert {x.device.type for x in tensors_of(buffer.__getstate__())} == {"cpu"}


def test_a_scan_buffer_falls_back_to_its_base():
    before = counts(SCAN)
    buffer, stock = filled(buffers.ScanRolloutBuffer), filled(RolloutBuffer)
    for x in (buffer, stock):
        x.gamma = np.float64(0.9)
        x.compute_returns_and_advantage(torch.ones(ENVS, 1), np.zeros(ENVS, bool))
    assert same_bits(buffer.advantages, stock.advantages)
    assert counts(SCAN) == (before[0] + 1, before[1] + 1)


# ---------------------------------------------------------------------------------------------------------------- files


WITHOUT_US = """
    import sys
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "rl_triton":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Missing())
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
    named, unnamed = sys.argv[1:]
    try:
        PPO.load(named)
    except ModuleNotFoundError as error:
        print(error)
    ours = {"rollout_buffer_class": RolloutBuffer}
    for model in (PPO.load(named, custom_objects=ours), PPO.load(unnamed, **ours)):
        print(type(model.rollout_buffer).__name__)
"""


@pytest.mark.parametrize("buffer_class", [buffers.ScanRolloutBuffer, buffers.TensorRolloutBuffer])
def test_save_and_load_of_a_model_that_names_our_class(buffer_class, tmp_path):
    model = learned(PPO, buffer_class=buffer_class)
    model.save(tmp_path / "model")
    model.save(tmp_path / "with_buffer", include=["rollout_buffer"])
    for name in ("model", "with_buffer"):
        again = PPO.load(tmp_path / name, env=model.get_env(), device="cpu")
        assert type(again.rollout_buffer) is buffer_class
        again.learn(36)


def test_load_where_rl_triton_is_not_installed(tmp_path):
    model = learned(PPO, buffer_class=buffers.ScanRolloutBuffer)
    files = [str(tmp_path / name) for name in ("named.zip", "unnamed.zip")]
    model.save(files[0])
    model.save(files[1], exclude=["rollout_buffer_class"])
    command = [sys.executable, "-c", inspect.cleandoc(WITHOUT_US), *files]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["No module named 'rl_triton'", "RolloutBuffer", "RolloutBuffer"], (
        result.stderr
    )


# ---------------------------------------------------------------------------------------------------------- extra heads


class HeadedBuffer(buffers.ExtraHeads, buffers.ScanRolloutBuffer):
    pass


class HeadedTensorBuffer(buffers.ExtraHeads, buffers.TensorRolloutBuffer):
    pass


class HeadedMaskableBuffer(buffers.ExtraHeads, contrib_buffers.TensorMaskableRolloutBuffer):
    pass


HEADS = {"heads": ("cost", "curiosity"), "head_gammas": (0.999, 0.9), "head_lambdas": (0.5, 1.0)}


def fill_heads(buffer, seed=3):
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(2, 2, STEPS, ENVS)).astype(np.float32)
    for step in range(STEPS):
        buffer.pos, buffer.full = step, False  # the collector moves it
        rewards, values = ({name: kind[i, step] for i, name in enumerate(buffer.heads)} for kind in drawn)
        buffer.add_heads(rewards, {name: torch.from_numpy(x)[:, None] for name, x in values.items()})
    buffer.pos, buffer.full = STEPS, True
    last, dones = rng.normal(size=(2, ENVS)).astype(np.float32), rng.random(ENVS) < 0.5
    buffer.compute_heads(dict(zip(buffer.heads, last, strict=True)), dones)
    return *drawn, last, dones


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buffer_class", [HeadedBuffer, HeadedTensorBuffer])
def test_heads_against_a_plain_loop(buffer_class, device):
    buffer = filled(buffer_class, device=device, **HEADS)
    rewards, values, last, dones = fill_heads(buffer)
    starts = buffer.episode_starts
    ended = torch.from_numpy(np.concatenate([starts[1:], dones[None]]).astype(np.float32))
    for head, (gamma, lambda_) in enumerate(zip(HEADS["head_gammas"], HEADS["head_lambdas"], strict=True)):
        expected = reference.gae(
            torch.from_numpy(rewards[head]).double(),
            torch.from_numpy(values[head]).double(),
            ended,
            last_values=torch.from_numpy(last[head]).double(),
            gamma=gamma,
            lambda_=lambda_,
            time_dim=0,
        )
        for ours, theirs in zip((buffer.head_advantages, buffer.head_returns), expected, strict=True):
            torch.testing.assert_close(ours[head].cpu().double(), theirs, atol=1e-5, rtol=1e-5)
    # and the reward's own advantages are what they are without heads
    assert np.array_equal(filled(type(buffer).__mro__[2], device=device).advantages, buffer.advantages)


@pytest.mark.parametrize("buffer_class", [HeadedBuffer, HeadedTensorBuffer])
@pytest.mark.parametrize("factors", [(1, 0), np.array([1, 0]), torch.tensor([1, 0])], ids=type)
def test_integers_as_factors_values_and_names_of_heads(factors, buffer_class):
    results = []
    for kind, given in ((np.float32, (1.0, 0.0)), (np.int64, factors)):
        buffer = filled(buffer_class, heads=(0, 1), head_gammas=given, head_lambdas=given)
        for buffer.pos in range(STEPS):
            buffer.full = False
            rows = {head: np.arange(ENVS).astype(kind) + head + buffer.pos for head in buffer.heads}
            buffer.add_heads(rows, rows | {1: kind(3)})  # one value for all environments
        buffer.compute_heads({0: np.arange(ENVS).astype(kind), 1: kind(2)}, np.array([0, 1, 0, 1]))
        results.append((buffer.head_values, buffer.head_advantages, buffer.head_returns))
    assert (results[0][0][1] == 3).all()
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("way", ["pickle", "cloudpickle", "deepcopy"])
@pytest.mark.parametrize("buffer_class", [HeadedBuffer, HeadedTensorBuffer])
def test_heads_go_through_pickle(buffer_class, way):
    """The buffer, a minibatch of it, and a model's file that holds it."""
    through = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
        "deepcopy": copy.deepcopy,
    }[way]
    buffer = filled(buffer_class, **HEADS)
    fill_heads(buffer)
    again = through(buffer)
    samples = []
    for x in (buffer, again):
        np.random.seed(0)
        samples.append(next(x.get(5)))
    assert type(samples[0]) is type(samples[1]) is type(through(samples[0]))
    assert_alike(*samples)
    assert_alike(samples[0], through(samples[0]))


@pytest.mark.parametrize("buffer_class", [HeadedBuffer, HeadedTensorBuffer])
def test_a_model_with_heads_is_saved_and_loaded(buffer_class, tmp_path):
    model = make(PPO, buffer_class=buffer_class, rollout_buffer_kwargs=HEADS | {"head_gammas": (1, 0)})
    model.save(tmp_path / "model", include=["rollout_buffer"])
    again = PPO.load(tmp_path / "model", env=model.get_env(), device="cpu")
    assert type(again.rollout_buffer) is buffer_class
    assert again.rollout_buffer.heads == HEADS["heads"]
    again.learn(36)


def test_heads_follow_a_tensor_gamma():
    buffer = filled(HeadedTensorBuffer, heads=("cost",))
    buffer.gamma = torch.linspace(0.5, 1, STEPS)[:, None]
    buffer.head_rewards[0], buffer.head_values[0] = buffer.tensors["rewards"], buffer.tensors["values"]
    last, dones = torch.ones(ENVS), np.zeros(ENVS, bool)
    buffer.compute_heads({"cost": last}, dones)
    buffer.compute_returns_and_advantage(last, dones)
    assert same_bits(buffer.head_advantages[0].numpy(), buffer.advantages)


@pytest.mark.parametrize("buffer_class", [HeadedBuffer, HeadedTensorBuffer])
def test_heads_in_minibatches(buffer_class):
    """Rows of the heads belong to the rows of the other fields."""
    buffer = filled(buffer_class, **HEADS)
    fill_heads(buffer)
    values = torch.as_tensor(np.array(buffer.values))  # before get() flattens it
    table = {values[t, e].item(): (t, e) for t in range(STEPS) for e in range(ENVS)}
    seen = 0
    for batch in buffer.get(5):
        assert batch._fields[-3:] == ("head_values", "head_advantages", "head_returns")
        assert batch.head_returns.shape == (len(batch.old_values), 2)
        for row, value in enumerate(batch.old_values):
            t, e = table[value.item()]
            assert torch.equal(batch.head_values[row], buffer.head_values[:, t, e])
            assert torch.equal(batch.head_advantages[row], buffer.head_advantages[:, t, e])
            assert torch.equal(batch.head_returns[row], buffer.head_returns[:, t, e])
            seen += 1
    assert seen == STEPS * ENVS


def test_heads_follow_the_buffers_factors_by_default():
    buffer = filled(HeadedBuffer, heads=("cost",))
    buffer.gamma, buffer.gae_lambda = 0.5, 0.25
    buffer.head_rewards[0], buffer.head_values[0] = torch.from_numpy(buffer.rewards), torch.from_numpy(buffer.values)
    last, dones = torch.ones(ENVS), np.zeros(ENVS, bool)
    buffer.compute_heads({"cost": last}, dones)
    buffer.compute_returns_and_advantage(last, dones)
    assert same_bits(buffer.head_advantages[0].numpy(), buffer.advantages)


def test_a_model_with_heads():
    """As a user holds it: heads stored from a callback, a full run of PPO and of MaskablePPO."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Heads(BaseCallback):
        def _on_step(self):
            n = self.training_env.num_envs
            named = dict.fromkeys(("cost", "curiosity"), np.full(n, self.num_timesteps, np.float32))
            self.model.rollout_buffer.add_heads(named, named)
            return True

        def _on_rollout_end(self):
            zeros = dict.fromkeys(("cost", "curiosity"), torch.zeros(self.training_env.num_envs))
            self.model.rollout_buffer.compute_heads(zeros, self.locals["dones"])

    for algorithm, buffer_class in ((PPO, HeadedBuffer), (contrib.MaskablePPO, HeadedMaskableBuffer)):
        model = make(algorithm, buffer_class=buffer_class, rollout_buffer_kwargs=HEADS)
        model.learn(36, callback=Heads())
        buffer = model.rollout_buffer
        assert buffer.head_rewards[0, :, 0].tolist() == list(range(3, 37, 3))
        assert next(buffer.get(6)).head_advantages.shape == (6, 2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, r"ExtraHeads: heads must be names, each once, got \(\)"),
        ({"heads": ("a", "a")}, r"ExtraHeads: heads must be names, each once, got \('a', 'a'\)"),
        ({"heads": ("a",), "head_gammas": (1.0, 0.9)}, r"head_gammas must have one entry a head \(1\), got 2"),
    ],
)
def test_bad_heads(options, error):
    with pytest.raises(ValueError, match=error):
        filled(HeadedBuffer, **options)


def test_recurrent_buffers_have_no_heads():
    for base in (RecurrentRolloutBuffer, contrib_buffers.TensorRecurrentRolloutBuffer):
        headed = type("Headed", (buffers.ExtraHeads, base), {})
        with pytest.raises(TypeError, match="ExtraHeads: a recurrent buffer pads its minibatches"):
            headed(STEPS, SPACES["Box"], ACTIONS["Box"], (STEPS, 2, ENVS, 5), device="cpu", n_envs=ENVS, heads=("a",))


def test_heads_must_be_named():
    buffer = filled(HeadedBuffer, **HEADS)
    with pytest.raises(ValueError, match="add_heads: values must name"):
        buffer.add_heads(dict.fromkeys(buffer.heads, np.zeros(ENVS)), {"cost": np.zeros(ENVS)})
    with pytest.raises(RuntimeError, match="add_heads: the rollout is complete"):
        buffer.add_heads(*[dict.fromkeys(buffer.heads, np.zeros(ENVS))] * 2)
    with pytest.raises(ValueError, match="compute_heads: last_values must name"):
        buffer.compute_heads({}, np.zeros(ENVS, bool))


# ------------------------------------------------------------------------------------------------- recompute an epoch


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
def test_recomputed_advantages_are_those_of_the_current_critic(dictionary, patched):
    """Before and after get(): what a new rollout of the same steps with the critic's values of now would hold."""
    scan, tensors = ((buffers.ScanDictRolloutBuffer, buffers.TensorDictRolloutBuffer) if dictionary
                     else (buffers.ScanRolloutBuffer, buffers.TensorRolloutBuffer))  # fmt: skip
    stock_class = DictRolloutBuffer if dictionary else RolloutBuffer
    for buffer_class in (stock_class, scan, tensors):
        model = learned(PPO, dictionary, buffer_class=buffer_class)
        model.collect_rollouts(model.env, model._init_callback(None), model.rollout_buffer, model.n_steps)
        buffer = model.rollout_buffer
        obs = buffer.observations
        kept = {key: x.copy() for key, x in obs.items()} if dictionary else obs.copy()
        rewards, starts, old_values = buffer.rewards.copy(), buffer.episode_starts.copy(), buffer.values.copy()
        first = buffer.advantages.copy()
        with sb3.patched() if patched else contextlib.nullcontext():
            sb3.recompute_advantages(model)  # nothing has changed yet
        np.testing.assert_allclose(buffer.advantages, first, atol=1e-5)
        with torch.no_grad():
            for x in model.policy.parameters():
                x.mul_(1.5)
        next(buffer.get(4))
        with sb3.patched() if patched else contextlib.nullcontext():
            sb3.recompute_advantages(model, batch_size=7)

        with torch.no_grad():
            values = [
                model.policy.predict_values(
                    {key: torch.as_tensor(x[t]) for key, x in kept.items()} if dictionary else torch.as_tensor(kept[t])
                )
                for t in range(model.n_steps)
            ]
            last = model.policy.predict_values(model.policy.obs_to_tensor(model._last_obs)[0])
        ended = np.concatenate([starts[1:], model._last_episode_starts[None]])
        expected = reference.gae(
            torch.from_numpy(rewards).double(),
            torch.cat(values, 1).T.double(),
            torch.from_numpy(ended.astype(np.float32)),
            last_values=last[:, 0].double(),
            gamma=model.gamma,
            lambda_=model.gae_lambda,
            time_dim=0,
        )
        for name, x in zip(("advantages", "returns"), expected, strict=True):
            ours = getattr(buffer, name)
            assert ours.shape == (model.n_steps * model.n_envs, 1)
            np.testing.assert_allclose(ours.reshape(model.n_envs, -1).T, x.numpy(), atol=1e-4)
        assert np.array_equal(buffer.values.reshape(model.n_envs, -1).T, old_values)  # what was collected stays


def test_recompute_says_what_it_cannot():
    model = make(PPO)
    with pytest.raises(RuntimeError, match="recompute_advantages: the rollout is not complete"):
        sb3.recompute_advantages(model)
    with pytest.raises(TypeError, match="recurrent buffer's values depend on states"):
        sb3.recompute_advantages(learned(contrib.RecurrentPPO))
