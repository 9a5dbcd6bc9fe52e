"""Batched values of final observations, against Stable-Baselines3's loop, rollout by rollout."""

import copy
import gc
import pickle
import weakref

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from sb3_rollouts import counts
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_triton.adapters import sb3, status
from rl_triton.adapters.sb3 import _terminal_values

NAME = "stable_baselines3.common.base_class.BaseAlgorithm._update_info_buffer"
HOOKED = BaseAlgorithm._update_info_buffer


@pytest.fixture(autouse=True)
def stock_afterwards():
    yield
    sb3.unpatch()
    assert BaseAlgorithm._update_info_buffer is HOOKED


class Drifting(gymnasium.Env):
    """Random observations; ends itself now and then, is cut now and then, and sometimes both."""

    def __init__(self, space, seed=0, action_space=None):
        self.observation_space = space
        self.action_space = action_space or gymnasium.spaces.Box(-1, 1, (2,))
        self.space_seed, self.rng = seed, np.random.default_rng(seed)
        self.observation_space.seed(seed)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        end, cut = self.rng.random() < 0.1, self.rng.random() < 0.3
        return self.observation_space.sample(), float(self.rng.normal()), end, cut, {}

    def action_masks(self):
        return np.ones(2, bool)


BOX = gymnasium.spaces.Box(-1, 1, (3,))
SPACES = {
    "Box": BOX,
    "Discrete": gymnasium.spaces.Discrete(5),
    "MultiBinary": gymnasium.spaces.MultiBinary(4),
    "Image": gymnasium.spaces.Box(0, 255, (36, 36, 3), np.uint8),
    "Dict": gymnasium.spaces.Dict({"a": BOX, "b": gymnasium.spaces.Discrete(3)}),
}


def make(algorithm=PPO, *, space="Box", n_envs=8, action_space=None, **options):
    spaces = [copy.deepcopy(SPACES[space]) for _ in range(n_envs)]
    env = DummyVecEnv([lambda i=i: Drifting(spaces[i], i, action_space) for i in range(n_envs)])
    policy = options.pop("policy", "MultiInputPolicy" if space == "Dict" else "MlpPolicy")
    if space == "Image":
        policy = "CnnPolicy"
    return algorithm(policy, env, **{"n_steps": 8, "seed": 2, "device": "cpu"} | options)


class Watching(BaseCallback):
    """Copies what a callback can see, at each moment."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_training_start(self):
        self.policy_as_made = list(vars(self.model.policy))

    def _copy(self, when):
        names = sorted(name for name in self.locals if name not in ("self", "env", "callback", "rollout_buffer"))
        local = {name: copy.deepcopy(self.locals[name]) for name in names}
        assert self.locals["self"] is self.model
        assert list(vars(self.model.policy)) == self.policy_as_made
        self.seen.append((when, names, local))

    def _on_rollout_start(self):
        self.rewards = None

    def _on_step(self):
        self._copy("step")
        return True

    def _on_rollout_end(self):
        self._copy("end")


def run(batched, algorithm=PPO, rollouts=2, **options):
    model, watching = make(algorithm, **options), Watching()
    with sb3.patched(terminal_values="batched" if batched else "single"):
        model.learn(rollouts * model.n_steps * model.n_envs, callback=watching)
    return model, watching.seen


def assert_alike(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_alike(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_alike(x, y, f"{where}[{i}]")
    elif isinstance(a, (np.ndarray, np.generic, torch.Tensor)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5, err_msg=where)
    elif isinstance(a, (int, float, str, bool, type(None))):
        assert a == b, where


@pytest.mark.parametrize("space", SPACES)
def test_rewards_and_locals(space):
    """One rollout before the first update: the same rewards to 1e-5, and the same locals in callbacks."""
    stock, stock_seen = run(False, space=space, rollouts=1)
    before = counts(NAME)
    ours, seen = run(True, space=space, rollouts=1)
    served, fallen_back = np.subtract(counts(NAME), before)
    assert served > 8
    assert fallen_back == 0
    np.testing.assert_allclose(stock.rollout_buffer.rewards, ours.rollout_buffer.rewards, atol=1e-5)
    assert not np.allclose(stock.rollout_buffer.rewards, stock.rollout_buffer.rewards.round())
    assert [when for when, _, _ in seen] == ["step"] * 8 + ["end"]
    for theirs, mine in zip(stock_seen, seen, strict=True):
        assert theirs[:2] == mine[:2]
        assert_alike(theirs[2], mine[2])


def test_the_comparison_would_show_a_missing_or_swapped_value(monkeypatch):
    stock, _ = run(False, rollouts=1)

    def rewards():
        return run(True, rollouts=1)[0].rollout_buffer.rewards

    assert np.allclose(stock.rollout_buffer.rewards, rewards(), atol=1e-5)
    answer = _terminal_values.Batch.answer
    for mutant in (lambda *args: answer(*args) * 0, lambda *args: answer(*args) + 1e-3):
        monkeypatch.setattr(_terminal_values.Batch, "answer", mutant)
        assert not np.allclose(stock.rollout_buffer.rewards, rewards(), atol=1e-5)
    monkeypatch.setattr(_terminal_values.Batch, "answer", answer)
    monkeypatch.setattr(_terminal_values, "_stacked", lambda observations: np.stack(observations[::-1]))
    assert not np.allclose(stock.rollout_buffer.rewards, rewards(), atol=1e-5)


@pytest.mark.parametrize("name", ["A2C", "PPO", "TRPO", "MaskablePPO"])
def test_algorithms(name):
    contrib = None if name in ("A2C", "PPO") else pytest.importorskip("sb3_contrib", reason="sb3-contrib is missing")
    algorithm = {"A2C": A2C, "PPO": PPO}.get(name) or getattr(contrib, name)
    options = {"action_space": gymnasium.spaces.Discrete(2)} if name == "MaskablePPO" else {}
    stock, _ = run(False, algorithm, **options)
    before = counts(NAME)
    ours, _ = run(True, algorithm, **options)
    served, fallen_back = np.subtract(counts(NAME), before)
    assert served > 16
    assert fallen_back == 0
    for key, x in stock.policy.state_dict().items():
        torch.testing.assert_close(x, ours.policy.state_dict()[key], atol=1e-4, rtol=1e-3)


def test_how_often_the_critic_is_called(monkeypatch):
    calls = []
    predict = ActorCriticPolicy.predict_values

    def counted(self, obs):
        calls.append(len(obs))
        return predict(self, obs)

    monkeypatch.setattr(ActorCriticPolicy, "predict_values", counted)
    run(False, n_envs=64, rollouts=1)
    single = calls.copy()
    calls.clear()
    run(True, n_envs=64, rollouts=1)
    assert len(single) > 100
    assert len(calls) == 8 + 1  # one a step, one at the end
    assert sum(calls) == sum(single)


def test_a_recurrent_critic_is_left_alone():
    contrib = pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    options = {"policy": "MlpLstmPolicy", "n_epochs": 1, "rollouts": 1}
    stock, _ = run(False, contrib.RecurrentPPO, **options)
    before = counts(NAME)
    ours, _ = run(True, contrib.RecurrentPPO, **options)
    served, fallen_back = np.subtract(counts(NAME), before)
    assert (served, fallen_back > 0) == (0, True)
    assert status()[NAME]["fallen_back"][_terminal_values.OWN_CRITIC] > 0
    assert np.array_equal(stock.rollout_buffer.rewards, ours.rollout_buffer.rewards)


class OwnCritic(ActorCriticPolicy):
    def predict_values(self, obs):
        return super().predict_values(obs) + 1.0


def test_a_users_own_critic():
    stock, _ = run(False, policy=OwnCritic, rollouts=1)
    before = counts(NAME)[0]
    ours, _ = run(True, policy=OwnCritic, rollouts=1)
    assert counts(NAME)[0] > before
    np.testing.assert_allclose(stock.rollout_buffer.rewards, ours.rollout_buffer.rewards, atol=1e-5)


class OwnObservations(ActorCriticPolicy):
    def obs_to_tensor(self, observation):
        x, vectorized = super().obs_to_tensor(observation)
        return x.mul_(3), vectorized


def test_a_users_own_obs_to_tensor_is_asked_for_each():
    """It changes the very tensor that Stable-Baselines3's made, so that ours looks untouched."""
    stock, _ = run(False, policy=OwnObservations, rollouts=1)
    served = counts(NAME)[0]
    ours, _ = run(True, policy=OwnObservations, rollouts=1)
    np.testing.assert_array_equal(stock.rollout_buffer.rewards, ours.rollout_buffer.rewards)
    assert counts(NAME)[0] == served
    assert status()[NAME]["fallen_back"][_terminal_values.OVERRIDDEN] > 0


def test_obs_to_tensor_is_pickled_by_value_without_what_waits():
    cloudpickle = pytest.importorskip("cloudpickle")
    sb3.patch(terminal_values="batched")
    held = BaseModel.obs_to_tensor
    sb3.unpatch()
    assert BaseModel.obs_to_tensor is not held
    model = make()
    x = model.observation_space.sample()
    copied = pickle.loads(cloudpickle.dumps(held))
    assert torch.equal(copied(model.policy, x)[0], model.policy.obs_to_tensor(x)[0])


def test_a_compiled_policy_and_methods_set_on_it():
    """torch.compile wraps a policy; a user may also have set predict_values on the object, which comes back."""

    def run_compiled(batched):
        model = make()
        own = torch.compile(model.policy.predict_values, backend="eager")
        model.policy.predict_values = own
        model.policy = torch.compile(model.policy, backend="eager")
        with sb3.patched(terminal_values="batched" if batched else "single"):
            model.learn(model.n_steps * model.n_envs)
        assert model.policy._orig_mod.__dict__["predict_values"] is own
        assert "obs_to_tensor" not in model.policy._orig_mod.__dict__
        return model.rollout_buffer.rewards

    rewards = run_compiled(False)
    before = counts(NAME)[0]
    np.testing.assert_allclose(rewards, run_compiled(True), atol=1e-5)
    assert counts(NAME)[0] > before


class Failing(ActorCriticPolicy):
    def predict_values(self, obs):
        if 1 < len(obs) < 8:
            raise KeyError("no value")
        return super().predict_values(obs)


def test_an_error_in_the_critic_leaves_the_policy_as_it_was():
    model = make(policy=Failing)
    before = list(vars(model.policy))
    sb3.patch(terminal_values="batched")
    with pytest.raises(KeyError, match="no value"):
        model.learn(64)
    assert list(vars(model.policy)) == before
    assert not _terminal_values._waiting


class ReadOnlyRewards(DummyVecEnv):
    def step_wait(self):
        obs, rewards, dones, infos = super().step_wait()
        rewards.flags.writeable = False
        return obs, rewards, dones, infos


def test_an_error_in_the_loop_leaves_the_policy_as_it_was():
    """While the patch is still on, too: neither pickles nor copies know of it."""
    env = ReadOnlyRewards([lambda i=i: Drifting(copy.deepcopy(BOX), i) for i in range(8)])
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu")
    before = list(vars(model.policy))
    sb3.patch(terminal_values="batched")
    with pytest.raises(ValueError, match="read-only"):
        model.learn(64)
    assert list(vars(model.policy)) == before
    for again in (pickle.loads(pickle.dumps(model.policy)), copy.deepcopy(model.policy)):
        assert list(vars(again)) == before
    sb3.unpatch()
    assert not _terminal_values._waiting


def two_are_cut(model, shape=(3,)):
    """As the collector begins; returns the final observations that it will ask for."""
    infos = [{"terminal_observation": np.ones(shape, np.float32), "TimeLimit.truncated": True} for _ in range(2)]
    model._update_info_buffer(infos, np.array([True, True]))
    return [info["terminal_observation"] for info in infos]


@pytest.mark.parametrize("where", ["_update_info_buffer", "obs_to_tensor", "predict_values"])
def test_an_error_at_each_step(where):
    model = make(n_envs=2, batch_size=16, policy=Failing)
    policy, before = model.policy, dict(vars(model.policy))
    model.ep_info_buffer, model.ep_success_buffer = (None if where == "_update_info_buffer" else []), []
    with sb3.patched(terminal_values="batched"):
        if where == "_update_info_buffer":
            with pytest.raises(AssertionError):
                two_are_cut(model)
        elif where == "obs_to_tensor":
            first, _ = two_are_cut(model, shape=(5,))
            with pytest.raises(ValueError, match="observation shape"):
                policy.obs_to_tensor(first)
        else:
            first, _ = two_are_cut(model)
            row, _ = policy.obs_to_tensor(first)
            with pytest.raises(KeyError, match="no value"):
                policy.predict_values(row)
        assert vars(policy) == before
    assert not _terminal_values._waiting


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("then", ["unpatch", "another question", "the next step"])
def test_what_was_begun_is_withdrawn(then, own):
    """Between the two calls the policy has a method that is not its own, which never outlives what comes next."""
    model = make(n_envs=2, batch_size=16)
    policy = model.policy
    if own:
        policy.predict_values = policy.predict_values
    policy.last = "what comes behind it in the dictionary"
    before = dict(vars(policy))
    model.ep_info_buffer, model.ep_success_buffer = [], []
    sb3.patch(terminal_values="batched")
    first, _ = two_are_cut(model)
    row, _ = policy.obs_to_tensor(first)
    assert vars(policy) != before
    if then == "unpatch":
        sb3.unpatch()
    elif then == "another question":
        other = torch.zeros(5, 3)
        assert torch.equal(policy.predict_values(other), type(policy).predict_values(policy, other))
    else:
        model._update_info_buffer([{}, {}], np.array([False, False]))
    assert vars(policy) == before
    assert list(vars(policy)) == list(before)
    assert not _terminal_values._waiting
    assert torch.equal(policy.predict_values(row), type(policy).predict_values(policy, row))


def test_a_policy_that_is_waited_for_can_go():
    model = make(n_envs=2, batch_size=16)
    model.ep_info_buffer, model.ep_success_buffer = [], []
    with sb3.patched(terminal_values="batched"):
        two_are_cut(model)
        policy = weakref.ref(model.policy)
        del model
        gc.collect()
        assert policy() is None
        assert not _terminal_values._waiting


def test_observations_that_cannot_be_stacked_go_one_by_one():
    """Final observations of two shapes, both of which the policy accepts."""
    model = make(n_envs=2, batch_size=16)
    policy = model.policy
    before = status().get(NAME, {"fallen_back": {}})["fallen_back"].get(_terminal_values.UNLIKE, 0)
    final = [np.zeros(3, np.float32), np.zeros((1, 3), np.float32)]
    infos = [{"terminal_observation": x, "TimeLimit.truncated": True} for x in final]
    expected = [policy.predict_values(policy.obs_to_tensor(x)[0])[0] for x in final]
    with sb3.patched(terminal_values="batched"):
        model.ep_info_buffer, model.ep_success_buffer = [], []
        model._update_info_buffer(infos, np.array([True, True]))
        values = [policy.predict_values(policy.obs_to_tensor(x)[0])[0] for x in final]
    assert all(map(torch.equal, expected, values))
    assert status()[NAME]["fallen_back"][_terminal_values.UNLIKE] == before + 2


def test_what_is_not_asked_for_is_withdrawn():
    model = make(n_envs=2, batch_size=16)
    infos = [{"terminal_observation": np.zeros(3, np.float32), "TimeLimit.truncated": True}] * 2
    model.ep_info_buffer, model.ep_success_buffer = [], []
    before = list(vars(model.policy))
    with sb3.patched(terminal_values="batched"):
        model._update_info_buffer(infos, np.array([True, True]))
        assert list(vars(model.policy)) == before
        assert model.policy in _terminal_values._waiting
        model._update_info_buffer([{}, {}], np.array([False, False]))
        assert not _terminal_values._waiting
    assert list(vars(model.policy)) == before
    assert status()[NAME]["fallen_back"][_terminal_values.NOT_USED] >= 2


def test_a_scope_of_one_model():
    mine, other = make(), make()
    with sb3.patched(mine, terminal_values="batched"):
        before = counts(NAME)
        other.learn(64)
        assert counts(NAME) == before
        mine.learn(64)
        assert counts(NAME)[0] > before[0]


def test_nothing_happens_off_policy():
    from stable_baselines3 import SAC

    before = counts(NAME)
    with sb3.patched(terminal_values="batched"):
        env = make_vec_env(lambda: Drifting(copy.deepcopy(BOX)), n_envs=2)
        SAC("MlpPolicy", env, learning_starts=10, buffer_size=100, device="cpu").learn(40)
    assert counts(NAME) == before
