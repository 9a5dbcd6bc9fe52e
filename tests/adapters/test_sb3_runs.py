"""Whole models with the patch: same seeds, scopes, threads, processes, files."""

import contextlib
import copy
import gc
import inspect
import multiprocessing
import pickle
import subprocess
import sys
import threading
import warnings

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")

from sb3_rollouts import NAME, STOCK, counts, make_buffer, same_bits
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import SubprocVecEnv

from rl_triton.adapters import _patching, sb3, status
from rl_triton.adapters.sb3 import _compute, _patch


@pytest.fixture(autouse=True)
def all_served_and_stock_afterwards(monkeypatch):
    monkeypatch.setattr(_compute, "SHORT", 0)
    yield
    sb3.unpatch()
    assert RolloutBuffer.compute_returns_and_advantage is STOCK
    assert not _patch._scopes


class Masked(gymnasium.Wrapper):
    """For MaskablePPO; the others do not look."""

    def action_masks(self):
        return np.ones(2, bool)


def make(algorithm=PPO, *, n_envs=4, policy="MlpPolicy", **options):
    env = make_vec_env("CartPole-v1", n_envs=n_envs, seed=1, wrapper_class=Masked)
    return algorithm(policy, env, **{"n_steps": 32, "seed": 3, "device": "cpu"} | options)


def same_parameters(a, b):
    theirs, ours = a.policy.state_dict(), b.policy.state_dict()
    return all(torch.equal(theirs[name], ours[name]) for name in theirs)


def learned(patched, *arguments, callback=None, rollouts=2, **options):
    with sb3.patched() if patched else contextlib.nullcontext():
        model = make(*arguments, **options)
        model.learn(rollouts * model.n_steps * model.n_envs, callback=callback and callback())
    return model


def contrib(name):
    return getattr(pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed"), name)


# -------------------------------------------------------------------------------------------------- same seed, same run


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("A2C", {}),
        ("PPO", {"n_epochs": 2}),
        ("TRPO", {}),
        ("RecurrentPPO", {"policy": "MlpLstmPolicy", "n_epochs": 2}),
        ("MaskablePPO", {"n_epochs": 2}),
    ],
)
def test_same_seed_same_parameters(name, options):
    algorithm = {"A2C": A2C, "PPO": PPO}.get(name) or contrib(name)
    before = counts()
    ours = learned(True, algorithm, **options)
    assert counts() == (before[0] + 2, before[1])
    assert same_parameters(learned(False, algorithm, **options), ours)


class Curious(BaseCallback):
    """Adds to the rewards and computes again, as users of intrinsic rewards do."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        buffer.rewards += 0.01 * np.abs(buffer.observations).sum(-1)
        buffer.compute_returns_and_advantage(self.locals["values"], self.locals["dones"])


def test_callbacks_that_recompute():
    before = counts()
    ours = learned(True, callback=Curious)
    assert counts() == (before[0] + 4, before[1])
    stock = learned(False, callback=Curious)
    assert same_parameters(stock, ours)
    assert same_bits(stock.rollout_buffer.advantages, ours.rollout_buffer.advantages)


def test_a_compiled_policy():
    def run(patched):
        torch.manual_seed(0)
        with sb3.patched() if patched else contextlib.nullcontext():
            model = make(A2C)
            model.policy.forward = torch.compile(model.policy.forward, backend="eager")
            model.learn(model.n_steps * model.n_envs)
        return model

    before = counts()
    ours = run(True)
    assert counts() == (before[0] + 1, before[1])
    assert same_parameters(run(False), ours)


def test_a_compiled_call_traces_stocks_own_code():
    stock, last_values, dones = make_buffer(6, 3)
    STOCK(stock, last_values, dones)
    buffer, last_values, dones = make_buffer(6, 3)
    before = counts()
    with sb3.patched():
        compiled = torch.compile(lambda b, *edge: b.compute_returns_and_advantage(*edge), backend="eager")
        compiled(buffer, last_values, dones)
    assert counts()[1] == before[1]
    np.testing.assert_allclose(stock.advantages, buffer.advantages, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- scopes


def served_by(model):
    before = counts()[0]
    model.learn(model.n_steps * model.n_envs)
    return counts()[0] - before


def test_a_scope_of_one_model():
    mine, other = make(), make()
    names = set(vars(mine)), set(vars(mine.rollout_buffer))
    sb3.patch(mine)
    assert sb3.is_patched(mine)
    assert not sb3.is_patched(other)
    assert not sb3.is_patched()
    assert (served_by(mine), served_by(other)) == (1, 0)
    assert status()[NAME]["fallen_back"][_patch.NOT_SELECTED] >= 1
    mine.rollout_buffer = copy.deepcopy(mine.rollout_buffer)  # whatever buffer it has at the call
    assert served_by(mine) == 1
    assert (set(vars(mine)), set(vars(mine.rollout_buffer))) >= names
    assert b"rl_triton" not in pickle.dumps(mine.rollout_buffer)
    sb3.unpatch(other)
    assert sb3.is_patched(mine)
    sb3.unpatch(mine)
    assert served_by(mine) == 0


def test_a_scope_of_one_buffer():
    buffer, *edge = make_buffer(12, 2)
    with sb3.patched(buffer):
        before = counts()[0]
        buffer.compute_returns_and_advantage(*edge)
        make_buffer(12, 2)[0].compute_returns_and_advantage(*edge)
        assert counts()[0] == before + 1


def test_the_options_of_a_model_come_before_those_for_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # nothing is computed
    model = make()
    devices = []

    def device_of(x):
        return _patch._find(x).device.type

    with sb3.patched(model, device="cuda"):
        with sb3.patched(device="cpu"):
            devices.append((device_of(model.rollout_buffer), device_of(make().rollout_buffer)))
        assert not sb3.is_patched()
    assert devices == [("cuda", "cpu")]


def test_scopes_end_in_any_order():
    a, b = make(), make()
    first, second, third = sb3.patched(a), sb3.patched(), sb3.patched(b)
    for scope in (first, second, third):
        scope.__enter__()
    second.__exit__(None, None, None)
    assert (served_by(a), served_by(b), served_by(make())) == (1, 1, 0)
    first.__exit__(None, None, None)
    assert (served_by(a), served_by(b)) == (0, 1)
    third.__exit__(None, None, None)
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


@pytest.mark.parametrize("terminal_values", ["single", "batched"])
def test_the_patch_of_a_model_ends_with_it(terminal_values):
    hooked = BaseAlgorithm._update_info_buffer, BasePolicy.obs_to_tensor
    model = make()
    sb3.patch(model, terminal_values=terminal_values)
    assert status()[NAME]["active"]
    del model
    gc.collect()
    assert RolloutBuffer.compute_returns_and_advantage is STOCK
    assert (BaseAlgorithm._update_info_buffer, BasePolicy.obs_to_tensor) == hooked
    assert not _patch._scopes
    assert not status()[NAME]["active"]
    sb3.unpatch()


def test_others_stay_when_a_model_goes():
    gone, kept = make_buffer(4, 2)[0], make_buffer(4, 2)[0]
    sb3.patch(gone)
    sb3.patch(kept)
    with sb3.patched():
        del gone
        gc.collect()
        assert sb3.is_patched()
    assert sb3.is_patched(kept)
    assert len(_patch._scopes) == 1


def test_an_address_that_is_used_again():
    """Another buffer in the place of one that is gone is not patched, though the scope of that may stay a while."""
    buffer = make_buffer(6, 2)[0]
    sb3.patch(buffer)
    with _patch._changing():
        address, others = id(buffer), []
        del buffer
        while not others or id(others[-1]) != address:
            assert len(others) < 10_000, "no address was used again"
            others.append(RolloutBuffer.__new__(RolloutBuffer))
        assert len(_patch._scopes) == 1
        assert not sb3.is_patched(others[-1])
        assert _patch._find(others[-1]) is None


def test_a_model_that_goes_in_the_middle_of_a_change():
    """The garbage collector ends no scope there; the change does, when it is done."""
    buffer = make_buffer(4, 2)[0]
    sb3.patch(buffer)
    with _patch._changing():
        del buffer
        gc.collect()
        assert len(_patch._scopes) == 1
    assert not _patch._scopes
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


def test_a_model_that_goes_while_another_thread_changes_something():
    """The garbage collector waits for nobody: who asks next ends the scope."""
    buffer = make_buffer(4, 2)[0]
    sb3.patch(buffer)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with _patching.locked():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    del buffer
    gc.collect()  # would wait here for ever
    leave.set()
    thread.join()
    assert len(_patch._scopes) == 1
    assert not sb3.is_patched()
    assert not _patch._scopes


def test_thousands_of_models_go_at_once():
    models = [make_buffer(1, 1)[0] for _ in range(1500)]
    models.append(models)  # a cycle, so that one collection finds them all
    for model in models[:-1]:
        sb3.patch(model)
    del model, models
    gc.collect()
    assert not _patch._scopes
    assert RolloutBuffer.compute_returns_and_advantage is STOCK


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ((3,), {}),
            "sb3.patch: model must be an on-policy algorithm, a RolloutBuffer, or None for all of them, got int",
        ),
        (((), {"terminal_values": "all"}), "sb3.patch: terminal_values must be 'single' or 'batched', got 'all'"),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises((TypeError, ValueError)) as raised:
        sb3.patch(*arguments[0], **arguments[1])
    assert str(raised.value) == error
    assert not sb3.is_patched()


def test_patch_again_changes_the_options(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sb3.patch(device="cuda")
    sb3.patch(device="cpu")
    assert [scope.device.type for scope in _patch._scopes] == ["cpu"]


# ------------------------------------------------------------------------------------------ others who change the class


def test_a_replacement_that_somebody_made_later_stays():
    """Without functools.wraps nothing tells a wrapper from a replacement; neither is overwritten."""
    sb3.patch()
    under = RolloutBuffer.compute_returns_and_advantage

    def theirs(self, last_values, dones):
        return under(self, last_values, dones)

    RolloutBuffer.compute_returns_and_advantage = theirs
    try:
        assert not sb3.is_patched()
        with pytest.warns(UserWarning, match="was replaced after rl_triton patched it"):
            sb3.patch()
        assert RolloutBuffer.compute_returns_and_advantage is theirs
        with pytest.warns(UserWarning, match="the wrapper is left in place"):
            sb3.unpatch()
        assert RolloutBuffer.compute_returns_and_advantage is theirs
    finally:
        RolloutBuffer.compute_returns_and_advantage = under
        sb3.patch()
        sb3.unpatch()


def test_who_puts_the_original_back_is_asked_no_more():
    sb3.patch()
    RolloutBuffer.compute_returns_and_advantage = STOCK
    assert not sb3.is_patched()
    sb3.patch()
    assert sb3.is_patched()
    sb3.unpatch()


def test_a_replacement_from_before_is_examined(monkeypatch):
    """What somebody put in place of the method before us is compared as Stable-Baselines3's own body is."""
    with sb3.patched():
        pass

    def theirs(self, last_values, dones):
        self.advantages[...] = 1.0
        self.returns = self.advantages + self.values

    monkeypatch.setattr(RolloutBuffer, "compute_returns_and_advantage", theirs)
    with pytest.raises(RuntimeError, match="does not compute the advantages that"):
        sb3.patch()
    assert RolloutBuffer.compute_returns_and_advantage is theirs
    monkeypatch.undo()


def run_python(code, *, env=None):
    result = subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_reload():
    """Reloading Stable-Baselines3's module makes a new class, which is not patched; ours keeps its state."""
    output = run_python("""
        import importlib
        from stable_baselines3.common import buffers
        from rl_triton.adapters import sb3, status
        old, method = buffers.RolloutBuffer, buffers.RolloutBuffer.compute_returns_and_advantage
        sb3.patch()
        importlib.reload(sb3)
        print(sb3.is_patched())
        importlib.reload(buffers)
        print(sb3.is_patched(), [entry["active"] for entry in status().values()])
        new = buffers.RolloutBuffer.compute_returns_and_advantage
        sb3.patch()
        print(sb3.is_patched())
        sb3.unpatch()
        print(buffers.RolloutBuffer.compute_returns_and_advantage is new, old.compute_returns_and_advantage is method)
    """)
    assert output == ["True", "False", "[True]", "True", "True", "True"]


def test_a_second_copy_does_not_patch_over_the_first():
    output = run_python("""
        import functools, sys
        from stable_baselines3.common.buffers import RolloutBuffer
        from rl_triton.adapters import sb3 as first
        first.patch()
        one = RolloutBuffer.compute_returns_and_advantage
        for name in [name for name in sys.modules if name.split(".")[0] == "rl_triton"]:
            if "adapters" in name:
                del sys.modules[name]
        del sys.modules["rl_triton"].adapters
        from rl_triton.adapters import sb3 as second
        assert second is not first
        def refused():
            try:
                second.patch()
            except RuntimeError as error:
                return "another copy of rl_triton" in str(error)
        print(refused(), RolloutBuffer.compute_returns_and_advantage is one)
        @functools.wraps(one)
        def wrapper(self, *args):
            return one(self, *args)
        RolloutBuffer.compute_returns_and_advantage = wrapper
        print(refused(), second.is_patched())
    """)
    assert output == ["True", "True", "True", "False"]


# ------------------------------------------------------------------------------------------------ threads and processes


def test_models_in_threads():
    """As Optuna's n_jobs runs trials: each patches for itself, all get what a single one gets."""
    checked, errors = [], []

    class Checked(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values, dones):
            super().compute_returns_and_advantage(last_values, dones)
            stock = copy.deepcopy(self)
            STOCK(stock, last_values, dones)
            checked.append(same_bits(stock.advantages, self.advantages) and same_bits(stock.returns, self.returns))

    def trial():
        try:
            for _ in range(2):
                learned(True, A2C, rollout_buffer_class=Checked)
        except Exception as error:
            errors.append(error)

    before = counts()

    threads = [threading.Thread(target=trial) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert checked == [True] * 12
    assert counts() == (before[0] + 12, before[1])


def test_calls_and_scopes_in_threads():
    expected, last_values, dones = make_buffer(50, 4)
    STOCK(expected, last_values, dones)
    wrong = []

    def work(seed):
        for i in range(40):
            buffer, last_values, dones = make_buffer(50, 4)
            with sb3.patched(buffer) if (i + seed) % 2 else sb3.patched():
                buffer.compute_returns_and_advantage(last_values, dones)
            if not same_bits(expected.advantages, buffer.advantages):
                wrong.append(i)

    before = counts()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counts() == (before[0] + 160, before[1])


def computed_in_child(queue):
    buffer, last_values, dones = make_buffer(12, 2)
    before = counts()[0]
    buffer.compute_returns_and_advantage(last_values, dones)
    queue.put((sb3.is_patched(), counts()[0] - before))


def scopes_left_in_child(queue):
    buffer = make_buffer(4, 2)[0]
    sb3.patch(buffer)
    del buffer
    gc.collect()
    queue.put(len(_patch._scopes))


def result_of_child(method, work):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    result = queue.get(timeout=120)
    child.join(60)
    return result


def forked_while_a_thread_is_in(block, work):
    """Result of a child that is forked while another thread is inside the block."""
    inside, done = threading.Event(), threading.Event()

    def stay():
        with block():
            inside.set()
            done.wait(120)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait(30)
    try:
        return result_of_child("fork", work)
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
class TestForkedChild:
    def test_inherits_the_patch_though_a_thread_held_the_lock(self):
        with sb3.patched():
            assert forked_while_a_thread_is_in(_patching.locked, computed_in_child) == (True, 1)

    def test_ends_patches_of_models_that_are_gone_though_a_thread_was_in_a_change(self):
        assert forked_while_a_thread_is_in(_patch._changing, scopes_left_in_child) == 0


def test_a_spawned_child_does_not_inherit_the_patch():
    with sb3.patched():
        result = result_of_child("spawn", computed_in_child)
    assert result == (False, 0)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_environments_in_subprocesses(method):
    """Workers only step environments: they need no patch, whatever started them."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    before = counts()
    with sb3.patched():
        env = make_vec_env(
            "CartPole-v1", n_envs=1, seed=1, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": method}
        )
        model = PPO("MlpPolicy", env, n_steps=64, n_epochs=1, seed=3, device="cpu")
        model.learn(64)
        env.close()
    assert counts() == (before[0] + 1, before[1])
    assert same_parameters(learned(False, n_envs=1, n_steps=64, n_epochs=1, rollouts=1), model)


# ---------------------------------------------------------------------------------------------------------------- files


def test_save_and_load_know_nothing_of_the_patch(tmp_path):
    with sb3.patched():
        model = learned(True, n_steps=64)
        model.save(tmp_path / "patched")
        model.save(tmp_path / "with_buffer", include=["rollout_buffer"])
        pickled = pickle.dumps(model.rollout_buffer)
    for name in ("patched.zip", "with_buffer.zip"):
        assert b"rl_triton" not in (tmp_path / name).read_bytes()
    assert b"rl_triton" not in pickled
    loaded = PPO.load(tmp_path / "patched", env=model.get_env(), device="cpu")
    loaded.learn(64)
    with sb3.patched():
        before = counts()
        PPO.load(tmp_path / "with_buffer", env=model.get_env(), device="cpu").learn(64)
        assert counts()[0] == before[0] + 1


def test_importing_and_patching_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb3.patch()
        buffer, *edge = make_buffer(12, 2)
        buffer.compute_returns_and_advantage(*edge)


def test_set_parameters(tmp_path):
    with sb3.patched():
        model = learned(True)
        model.save(tmp_path / "model")
        other = make(seed=9)
        other.set_parameters(tmp_path / "model")
        assert same_parameters(model, other)
        assert served_by(other) == 1
