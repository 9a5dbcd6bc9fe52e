"""The recorder on real vector environments whose value function is known, so that every advantage must be zero."""

import enum
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium", reason="gymnasium is not installed")

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import rl_triton as rlt
from rl_triton.adapters import gymnasium as adapter
from rl_triton.adapters.gymnasium import Recorder

GAMMA = 0.5
ENDLESS = 100.0
MODES = list(AutoresetMode)


class Walk(gym.Env):
    """Position x, which every step raises by one and pays out; the episode terminates at `end`, where there is one.

    Episodes begin at 0, 10, 20, ..., so that no observation of one has the value of one of another.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, end=ENDLESS, first=0.0):
        self.length, self.episode = end, first

    def observe(self):
        return np.array([self.x, self.end], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.episode
        self.end = self.x + self.length
        self.episode += 10.0
        return self.observe(), {}

    def step(self, action):
        reward, self.x = self.x, self.x + 1
        return self.observe(), reward, self.x >= self.end, False, {}


class Nested(gym.ObservationWrapper):
    """The same in a dict with a tuple in it."""

    def __init__(self, env):
        super().__init__(env)
        one = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = gym.spaces.Dict(place=one, more=gym.spaces.Tuple([one]))

    def observation(self, observation):
        return {"place": observation[:1], "more": (observation[1:],)}


def value_of(obs):
    """V of the walk: the sum of gamma^k (x + k) over the steps that are left, which are infinitely many without end."""
    x, end = obs[..., 0].double(), obs[..., 1].double()

    def endless(x):
        return x / (1 - GAMMA) + GAMMA / (1 - GAMMA) ** 2

    left = end - x
    return torch.where(left >= ENDLESS / 2, endless(x), endless(x) - GAMMA**left * endless(end))


class Torch:
    """A vector environment that returns tensors."""

    def __init__(self, envs):
        self.envs = envs

    def reset(self, **options):
        return torch.from_numpy(self.envs.reset(**options)[0]), {}

    def step(self, actions):
        obs, *rest, infos = self.envs.step(actions)
        if "final_obs" in infos:
            rows = [np.zeros(2, np.float32) if x is None else x for x in infos["final_obs"]]
            infos["final_obs"] = torch.from_numpy(np.stack(rows))
        return torch.from_numpy(obs), *map(torch.from_numpy, rest), infos


def make(mode, kind=SyncVectorEnv, nested=False):
    """Time limits of 3 to 7 steps, terminations after 4 and 6, and one environment in which both come at once."""

    def env(end, limit, first):
        def build():
            walk = gym.wrappers.TimeLimit(Walk(end, first), limit)
            return Nested(walk) if nested else walk

        return build

    specified = [(ENDLESS, 3, 0.0), (ENDLESS, 7, 1.0), (4.0, 90, 2.0), (6.0, 5, 3.0), (5.0, 5, 4.0)]
    return kind([env(*each) for each in specified], autoreset_mode=mode)


def tensor(obs):
    if isinstance(obs, dict):
        return torch.cat([tensor(obs["place"]), tensor(obs["more"][0])], dim=-1)
    return torch.as_tensor(obs)


def windows(envs, mode, T, count, critic=value_of, spoil=None):
    """`count` windows, and the values of their observations."""
    recorder = Recorder(mode)
    obs, _ = envs.reset(seed=0)
    actions = np.zeros(5, dtype=np.int64)
    for _ in range(count):
        values = []
        for _ in range(T):
            values.append(value_of(tensor(obs)))
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            recorder.step(obs, rewards, terminated, truncated, infos)
            done = np.asarray(terminated | truncated)
            if mode == AutoresetMode.DISABLED and done.any():
                obs, _ = envs.reset(options={"reset_mask": done})
        values = torch.stack(values)
        yield recorder.window(values, value_of(tensor(obs)), critic), values


def advantages(window, values, lambda_=0.9, **changes):
    return rlt.gae(window.rewards, values, **window.boundary | changes, gamma=GAMMA, lambda_=lambda_).advantages


@pytest.mark.parametrize("T", [1, 4, 5, 17])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
def test_true_values_leave_no_advantage(mode, T, kind, monkeypatch):
    if kind == "device":  # the branch for flags that cannot be read at once, without a device that they are on
        monkeypatch.setattr(adapter, "_on_host", lambda x: isinstance(x, np.ndarray))
    envs = make(mode) if kind == "numpy" else Torch(make(mode))
    cut = reset_first = 0
    for window, values in windows(envs, mode, T, count=max(3, 24 // T)):
        for lambda_ in (0.0, 0.9, 1.0):
            assert advantages(window, values, lambda_).abs().max() < 1e-5
        assert window.terminated.shape == values.shape
        assert (window.valid is not None) == (mode == AutoresetMode.NEXT_STEP)
        cut += 0 if window.truncated is None else int(window.truncated.sum())
        reset_first += 0 if window.valid is None else int((~window.valid[0]).sum())
    assert cut > 5
    if mode == AutoresetMode.NEXT_STEP:
        assert reset_first > 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_the_recorder_is_for(mode):
    """Each of its results, left out, gives wrong advantages on these environments."""
    worst = dict.fromkeys(("merged", "ignored", "no_valid", "no_bootstrap"), 0.0)
    for window, values in windows(make(mode), mode, 5, count=4):
        if window.truncated is None:
            continue

        def wrong(name, window=window, values=values, **changes):
            worst[name] = max(worst[name], float(advantages(window, values, **changes).abs().max()))

        without = dict(truncated=None, bootstrap_values=None)
        wrong("merged", terminated=window.terminated | window.truncated, **without)
        wrong("ignored", **without)
        wrong("no_valid", valid=None)
        wrong("no_bootstrap", bootstrap_values=torch.zeros_like(values))
    if mode != AutoresetMode.NEXT_STEP:
        assert worst.pop("no_valid") == 0.0  # there, every row is a transition
    assert all(error > 0.1 for error in worst.values()), worst


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_critic_is_called_once_and_only_for_what_was_cut(mode):
    batches = []

    def critic(obs):
        batches.append(obs.clone())
        assert not torch.is_grad_enabled()
        return value_of(obs)[:, None]

    recorded = list(windows(make(mode), mode, 6, count=3, critic=critic))
    assert len(batches) == (0 if mode == AutoresetMode.NEXT_STEP else 3)
    for batch, (window, _) in zip(batches, recorded, strict=False):
        cut = window.truncated & ~window.terminated
        assert len(batch) == cut.sum()
        assert torch.equal(window.bootstrap_values[cut], value_of(batch))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_nothing_truncated(mode):
    envs = SyncVectorEnv([lambda: Walk(4.0)], autoreset_mode=mode)

    def critic(obs):
        raise AssertionError("nothing was truncated")

    recorder = Recorder(mode)
    obs, _ = envs.reset()
    values = []
    for _ in range(6):
        values.append(value_of(tensor(obs)))
        obs, *step = envs.step(np.zeros(1, dtype=np.int64))
        recorder.step(obs, *step)
        done = step[1] | step[2]
        if mode == AutoresetMode.DISABLED and done.any():
            obs, _ = envs.reset(options={"reset_mask": done})
    window = recorder.window(torch.stack(values), value_of(tensor(obs)), critic)
    assert window.truncated is None
    assert window.bootstrap_values is None
    assert window.terminated.any()
    assert advantages(window, torch.stack(values)).abs().max() < 1e-5


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_observations_in_dicts_and_tuples(mode):
    def critic(obs):
        assert set(obs) == {"place", "more"}
        return value_of(tensor(obs))

    for window, values in windows(make(mode, nested=True), mode, 6, count=3, critic=critic):
        assert window.truncated is not None
        assert advantages(window, values).abs().max() < 1e-5


@pytest.mark.cpu_only
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_processes(mode):
    envs = make(mode, kind=AsyncVectorEnv)
    try:
        for window, values in windows(envs, mode, 6, count=2):
            assert window.truncated is not None
            assert advantages(window, values).abs().max() < 1e-5
    finally:
        envs.close()


@pytest.mark.cpu_only
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=lambda mode: mode.name)
def test_atari(mode):
    """ale_py's vector environment: its final observations come as one array, without a mask."""
    vector_env = pytest.importorskip("ale_py.vector_env", reason="ale_py is not installed")
    envs = vector_env.AtariVectorEnv(
        "pong", num_envs=2, num_threads=1, max_num_frames_per_episode=24, noop_max=1, autoreset_mode=mode
    )
    recorder = Recorder(envs.metadata["autoreset_mode"])
    envs.reset(seed=0)
    seen = []
    for _ in range(9):
        obs, *step = envs.step(np.zeros(2, dtype=np.int64))
        seen.append(torch.from_numpy(obs).double().mean((1, 2, 3)))
        recorder.step(obs, *step)

    def critic(frames):
        assert frames.dtype == torch.uint8
        assert frames.shape[1:] == (4, 84, 84)
        return frames.double().mean((1, 2, 3))

    after = torch.stack(seen)  # as values of the observations after each step
    values = torch.cat([torch.zeros(1, 2, dtype=torch.float64), after[:-1]])
    window = recorder.window(values, after[-1], critic)
    assert window.truncated.any()
    if mode == AutoresetMode.NEXT_STEP:
        assert torch.equal(window.bootstrap_values[window.truncated], after[window.truncated])
        assert torch.equal(~window.valid[1:], window.truncated[:-1])
    else:
        assert (window.bootstrap_values[window.truncated] > 0).all()
        assert not torch.equal(window.bootstrap_values[window.truncated], after[window.truncated])


@pytest.mark.gpu_only
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_on_a_gpu(mode):
    """Flags that live on the device are not read until the window ends."""

    class Cuda(Torch):
        def step(self, actions):
            *step, infos = super().step(actions)
            if mode == AutoresetMode.SAME_STEP:
                infos = {"final_obs": infos.get("final_obs", step[0]).cuda()}
            return *(x.cuda() for x in step), infos

    envs = Cuda(make(mode))
    recorder = Recorder(mode)
    obs, _ = envs.reset(seed=0)
    for _ in range(3):
        values, dones = [], []
        for _ in range(6):
            values.append(value_of(obs.cuda()))
            obs, *step = envs.step(np.zeros(5, dtype=np.int64))
            torch.cuda.set_sync_debug_mode("error")
            try:
                recorder.step(obs, *step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done = (step[1] | step[2]).cpu().numpy()
            dones.append(done)
            if mode == AutoresetMode.DISABLED and done.any():
                obs, _ = envs.reset(options={"reset_mask": done})
        window = recorder.window(torch.stack(values), value_of(obs.cuda()), value_of)
        assert np.stack(dones).any()
        assert window.rewards.is_cuda
        assert advantages(window, torch.stack(values)).abs().max() < 1e-5


def test_a_final_observation_that_is_missing_on_a_device(monkeypatch):
    monkeypatch.setattr(adapter, "_on_host", lambda x: isinstance(x, np.ndarray))
    recorder = Recorder("SAME_STEP")
    no, yes = torch.zeros(2), torch.ones(2)
    recorder.step(None, no, no, no, {"final_obs": torch.ones(2, 3)})
    recorder.step(None, no, no, yes, {})
    with pytest.raises(ValueError, match="environment 0 was truncated in step 1 of the window"):
        recorder.window(torch.zeros(2, 2), torch.zeros(2), lambda obs: obs[:, 0])


def test_reset_between_windows():
    """A reset by hand replaces the one that was due: the next row is a transition."""
    recorder = Recorder("NEXT_STEP")
    flags = np.array([False]), np.array([True])
    for reset in (False, True):
        recorder.step(None, np.zeros(1), *flags)
        with pytest.raises(ValueError, match=r"1 steps were recorded since the last window; take window\(...\) before"):
            recorder.reset()
        recorder.window(torch.zeros(1, 1), torch.zeros(1))
        if reset:
            recorder.reset()
        recorder.step(None, np.zeros(1), np.array([False]), np.array([False]))
        assert recorder.window(torch.zeros(1, 1), torch.zeros(1)).valid.item() is reset


def test_rewards_take_the_dtype_of_the_values():
    for dtype in (torch.float32, torch.float64):
        recorder = Recorder("SAME_STEP")
        recorder.step(None, np.ones(2), np.zeros(2, bool), np.zeros(2, bool))
        window = recorder.window(torch.zeros(1, 2, dtype=dtype), torch.zeros(2, dtype=dtype))
        assert window.rewards.dtype == dtype


def test_what_was_recorded_is_a_copy():
    recorder = Recorder("DISABLED")
    obs, rewards, flag = np.ones((1, 2), np.float32), np.ones(1), np.array([True])
    recorder.step(obs, rewards, ~flag, flag)
    obs[...], rewards[...], flag[...] = 7, 7, False
    window = recorder.window(torch.zeros(1, 1), torch.zeros(1, 1), lambda batch: batch.sum(-1))
    assert (window.rewards.item(), window.truncated.item(), window.bootstrap_values.item()) == (1, True, 2)


def test_spellings_of_a_mode():
    class Other(enum.Enum):
        NEXT_STEP = "NextStep"

    assert {Recorder(mode).mode for mode in (Other.NEXT_STEP, "NextStep", "NEXT_STEP", "next_step")} == {"NEXT_STEP"}
    with pytest.raises(ValueError, match="autoreset_mode must be one of NEXT_STEP, SAME_STEP, DISABLED .* got None"):
        Recorder(None)


def test_errors():
    recorder = Recorder("SAME_STEP")
    no, yes = np.zeros(2, bool), np.array([False, True])
    with pytest.raises(ValueError, match="no step was recorded"):
        recorder.window(torch.zeros(0, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="environment 1 was truncated in step 0 .* pass the infos of VectorEnv.step"):
        recorder.step(np.zeros((2, 3)), np.zeros(2), no, yes)
    with pytest.raises(ValueError, match="environment 1 was truncated in step 0"):
        recorder.step(None, np.zeros(2), no, yes, {"final_obs": np.array([None, None])})
    with pytest.raises(ValueError, match=r"truncated must have one entry for each environment, \[2\], got \[3\]"):
        recorder.step(None, np.zeros(2), no, np.zeros(3, bool))
    with pytest.raises(TypeError, match="truncated is Tensor, rewards ndarray"):
        recorder.step(None, np.zeros(2), no, torch.zeros(2))
    final = np.array([None, np.zeros(3)], dtype=object)
    recorder.step(None, np.zeros(2), no, yes, {"final_obs": final})
    with pytest.raises(ValueError, match=r"values must have the shape of the window, \[1, 2\], got \[2, 1\]"):
        recorder.window(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"last_values must have one entry for each of 2 environments, got \[2, 2\]"):
        recorder.window(torch.zeros(1, 2), torch.zeros(2, 2))
    with pytest.raises(TypeError, match="last_values must be a torch.Tensor, got float"):
        recorder.window(torch.zeros(1, 2), 0.0)
    with pytest.raises(ValueError, match="1 episodes were truncated; pass value_of"):
        recorder.window(torch.zeros(1, 2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"value_of must return \[1\] or \[1, 1\], one a row, got \[1, 3\]"):
        recorder.window(torch.zeros(1, 2), torch.zeros(2), lambda obs: obs)
    assert len(recorder) == 1  # a refused call loses nothing
    recorder.window(torch.zeros(1, 2), torch.zeros(2), lambda obs: obs[:, 0])
    with pytest.raises(
        ValueError, match=r"rewards is ndarray of shape \[3\], and was ndarray of shape \[2\] in the wi"
    ):
        recorder.step(None, np.zeros(3), np.zeros(3, bool), np.zeros(3, bool))


CASES = json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["cases"]
NEXT_STEP_CASES = [case for case in CASES if case.get("convention") == "next_step"]


@pytest.mark.parametrize("case", NEXT_STEP_CASES, ids=lambda case: case["id"])
def test_next_step_cases(case):
    """The conformance cases, recorded step by step; a window before leaves what `prev_done` says."""
    given = {name: np.array(x, dtype=float) for name, x in case["inputs"].items()}
    recorder = Recorder("NEXT_STEP")
    no = np.zeros(len(given["rewards"]), bool)
    recorder.step(None, np.zeros(len(no)), given.get("prev_done", no) != 0, no)
    recorder.window(torch.zeros(1, len(no)), torch.zeros(len(no)))
    for t in range(given["rewards"].shape[1]):
        recorder.step(None, given["rewards"][:, t], given["terminated"][:, t], given["truncated"][:, t])
    values = torch.from_numpy(given["values"]).t().float()
    window = recorder.window(values, torch.from_numpy(given["last_values"]).float())
    result = rlt.gae(
        window.rewards, values, **window.boundary, gamma=case["params"]["gamma"], lambda_=case["params"]["lam"]
    )
    for name, expected in case["expected"].items():
        torch.testing.assert_close(getattr(result, name), torch.tensor(expected).t(), rtol=1e-6, atol=1e-6)


def test_there_are_next_step_cases():
    assert {case["id"] for case in NEXT_STEP_CASES} == {"gae-11", "gae-12", "gae-15"}
