"""The examples run, on a small budget."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.cpu_only
def test_sb3_ppo(tmp_path):
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    plot = tmp_path / "curves.png"
    command = [sys.executable, str(EXAMPLES / "sb3_ppo.py"), "--total-timesteps", "2000", "--plot", str(plot)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "largest difference of final parameters" in result.stdout, result.stderr
    assert "served 8, fallen back 0" in " ".join(result.stdout.split())
    assert "the final parameters differ" not in result.stdout
    assert plot.stat().st_size > 10_000
    assert result.returncode == 1  # two thousand steps do not solve CartPole, and the program says so


@pytest.mark.cpu_only
def test_torchrl_ppo(tmp_path):
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    pytest.importorskip("torchrl", reason="TorchRL is not installed")
    budget = ["--total-frames", "2048", "--n-envs", "16", "--n-steps", "32", "--n-epochs", "1", "--n-minibatches", "2"]
    command = [sys.executable, str(EXAMPLES / "torchrl_ppo.py"), *budget, "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    printed = " ".join(result.stdout.split())
    assert "served 4, fallen back 0" in printed, result.stderr
    assert "advantages differ" not in printed
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert list(runs) == ["TorchRL, default", "TorchRL, vectorized", "rl_triton"]
    for run in runs.values():
        assert [len(seconds) for seconds in run["seconds"].values()] == [4, 4, 4]
        assert 0 < run["share_of_update"] < 1
        assert run["largest_difference"] < 1e-3
    assert result.returncode == 1  # two thousand steps do not solve CartPole, and the program says so


def example(name):
    """An example as a module."""
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    pytest.importorskip("tensorboard", reason="needs the extra `examples`")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(name, folder, *options):
    """Its output and the results that it wrote, by the name of their folder."""
    pytest.importorskip("tyro", reason="needs the extra `examples`")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--runs", str(folder), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    written = {path.parent.name: json.loads(path.read_text()) for path in Path(folder).glob("*/results.json")}
    assert written, result.stderr
    assert all(plot.stat().st_size > 5_000 for plot in Path(folder).glob("*/curve*.png"))
    return " ".join(result.stdout.split()), written


@pytest.mark.cpu_only
@pytest.mark.parametrize(("env_id", "credit"), [("cartpole-swingup", "rl_triton"), ("hopper", "loop")])
def test_ppo_gpu_envs(tmp_path, env_id, credit):
    options = ["--env-id", env_id, "--credit", credit, "--no-cuda", "--num-envs", "16", "--num-steps", "16"]
    printed, written = run("ppo_gpu_envs", tmp_path, *options, "--total-timesteps", "1024", "--eval-envs", "4")
    assert f"({credit})" in printed
    (results,) = written.values()
    assert set(results["phases"]) == {"rollout", "credit", "optimisation"}
    assert all(seconds > 0 for seconds in results["phases"].values())
    assert results["results"]["random_return"] != 0
    assert results["failures"]  # a thousand steps solve nothing
    assert all(failure in printed for failure in results["failures"])
    assert len(list(tmp_path.glob("*/events*"))) == 1


@pytest.mark.cpu_only
@pytest.mark.slow
def test_ppo_gpu_envs_compiled(tmp_path):
    """What LeanRL compiles: policy, environment, advantages, loss; normalised observations; stopped by time."""
    options = ["--credit", "compiled_loop", "--compile", "reduce-overhead", "--norm-obs", "--max-minutes", "0"]
    size = ["--no-cuda", "--num-envs", "16", "--num-steps", "4", "--hidden", "8", "--eval-envs", "2"]
    printed, written = run("ppo_gpu_envs", tmp_path, *options, *size)
    assert "(compiled_loop)" in printed
    (results,) = written.values()
    assert results["updates"] == 1


def test_normalised_observations():
    """Mean and standard deviation over all that was seen, in whatever portions it came."""
    agent = example("ppo_gpu_envs").Agent(3, 1, 8, norm_obs=True)
    obs = torch.randn(7, 50, 3, generator=torch.Generator().manual_seed(0)) * 4.0 + torch.tensor([-30.0, 0.0, 2.0])
    for portion in obs.split([1, 2, 4]):
        agent.observe(portion)
    flat = obs.flatten(0, 1)
    torch.testing.assert_close(agent.mean, flat.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(agent.std, flat.std(0, correction=0), rtol=1e-5, atol=1e-5)
    scaled = agent.scaled(flat)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("task", ["cartpole-swingup", "hopper"])
def test_compiled_environments_are_the_same(task):
    """Step for step what the plain ones are, restarts included; torch.compile without a compiler behind it."""
    module = example("ppo_gpu_envs")
    options = dict(env_id=task, num_envs=8, cuda=False)
    plain, compiled = (
        module.make_env(module.Args(**options), 8, torch.device("cpu"), varied=True, compile="none") for _ in range(2)
    )
    compiled.transition = torch.compile(compiled.transition, backend="eager")
    for env in (plain, compiled):
        torch.manual_seed(0)
        env.reset()
        env.steps[:4] = env.time_limit - 2
    for seed in range(4):
        results = []
        for env in (plain, compiled):
            torch.manual_seed(seed)
            results.append(env.step(torch.randn(8, env.action_size)))
        for x, y in zip(*(r[:4] + (r[4]["final_obs"],) for r in results), strict=True):
            torch.testing.assert_close(x, y)
        assert torch.equal(plain.steps, compiled.steps)
    assert (plain.steps[:4] < 4).all()  # they did restart


@pytest.mark.cpu_only
def test_ppo_atari_stops_and_goes_on(tmp_path):
    pytest.importorskip("ale_py", reason="needs the extra `examples`")
    options = ["--no-cuda", "--num-envs", "2", "--num-steps", "16", "--max-frames", "60", "--threads", "1"]
    printed, written = run("ppo_atari", tmp_path, *options, "--total-timesteps", "64", "--num-minibatches", "2")
    assert "share of credit assignment in an update" in printed
    ((name, results),) = written.items()
    assert results["largest_difference"] < 1e-5
    assert results["steps"]  # episodes that the frame limit cut
    rollout = torch.load(tmp_path / name / "rollout.pt")
    assert rollout["truncated"].any()
    assert not rollout["valid"].all()

    arguments = tmp_path / name / "args.json"
    arguments.write_text(arguments.read_text().replace('"total_timesteps": 64', '"total_timesteps": 3200'))
    resume = ["--resume", str(tmp_path / name), "--max-minutes", "0"]
    printed, written = run("ppo_atari", tmp_path, *resume)
    # Two updates, and the one at whose end the time was over.
    assert torch.load(tmp_path / name / "checkpoint.pt")["progress"]["iteration"] == 3
    assert written[name]["total_steps"] == 96
    assert written[name]["largest_difference"] < 1e-5
    assert written[name]["steps"][: len(results["steps"])] == results["steps"]


@pytest.mark.cpu_only
def test_impala_vtrace(tmp_path):
    options = ["--seeds", "1", "--lag", "4", "--total-timesteps", "8192", "--num-envs", "8"]
    printed, written = run("impala_vtrace", tmp_path, *options)
    assert "share of credit assignment" in printed
    (results,) = written.values()
    (corrected,), (uncorrected,) = results["runs"]["corrected"], results["runs"]["uncorrected"]
    assert corrected["largest_ratio"] > 1.0
    assert uncorrected["largest_ratio"] == 1.0
    assert len(corrected["returns"]) > 20


def windows():
    """Random windows of 9 x 5 with every kind of boundary, reset rows behind each end."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        real = [torch.randn(9, 5, generator=generator) for _ in range(4)]
        ended, truncated = (torch.rand(9, 5, generator=generator) < 0.25 for _ in range(2))
        valid = torch.ones(9, 5, dtype=torch.bool)
        for t in range(1, 9):
            valid[t] = ~(valid[t - 1] & (ended[t - 1] | truncated[t - 1]))
        boundary = dict(terminated=ended & valid, truncated=truncated & valid, bootstrap_values=real[2])
        if seed % 3 == 0:
            boundary |= dict(truncated=None, bootstrap_values=None)
            valid = torch.ones(9, 5, dtype=torch.bool)
            boundary["terminated"] = ended
        yield real, boundary | dict(last_values=real[3][0], time_dim=0), valid


@pytest.mark.parametrize("name", ["ppo_gpu_envs", "ppo_atari"])
def test_loops_that_the_library_is_compared_with(name):
    module = example(name)
    for (rewards, values, *_), boundary, valid in windows():
        if name == "ppo_gpu_envs":
            if not valid.all():
                boundary["terminated"] &= False  # its environments have no reset rows
            valid = None
        both = [
            function(rewards, values, **boundary, valid=valid, gamma=0.9, lambda_=0.8)
            for function in (module.CREDIT["rl_triton"], module.loop)
        ]
        for ours, plain in zip(*both, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_loop_of_vtrace():
    module = example("impala_vtrace")
    for (rewards, values, log_rhos, _), boundary, valid in windows():
        options = dict(log_rhos=log_rhos, gamma=0.9, rho_bar=1.0, c_bar=1.0)
        both = [f(rewards, values, **boundary, valid=valid, **options) for f in module.CREDIT.values()]
        for ours, plain in zip(*both, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_cart_pole_obeys_mechanics():
    """Without a push, energy and momentum are kept; a push does work on both."""
    env = example("ppo_gpu_envs").CartPoleSwingUp(8, torch.device("cpu"))
    state = env.initial().double()
    state[:, 1] = torch.linspace(-1, 1, 8)
    idle, push = torch.zeros(8, 1, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)

    def momentum(state):
        return (env.CART + env.POLE) * state[:, 1] + env.POLE * env.HALF * state[:, 3] * state[:, 2].cos()

    first, moved = state, state
    for _ in range(500):
        moved = env.physics(moved, idle)
    torch.testing.assert_close(env.energy(moved), env.energy(first), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(momentum(moved), momentum(first), rtol=1e-5, atol=1e-5)
    pushed = env.physics(first, push)
    torch.testing.assert_close(momentum(pushed) - momentum(first), torch.full((8,), env.FORCE * env.DT).double())
    work = env.FORCE * (pushed[:, 0] - first[:, 0])
    torch.testing.assert_close(env.energy(pushed) - env.energy(first), work, rtol=1e-4, atol=1e-6)


def test_hopper_obeys_mechanics():
    """In the air, whatever leg and hip do, its centre of mass falls freely and its angular momentum stays."""
    env = example("ppo_gpu_envs").Hopper(8, torch.device("cpu"))
    state = env.initial().double()
    state[:, [1, 7]] += 5.0
    state[:, 3] += torch.linspace(-1, 1, 8)
    action = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).double().clamp(-1, 1)
    total = env.BODY + env.FOOT

    def centre(state):
        return (env.BODY * state[:, 0:2] + env.FOOT * state[:, 6:8]) / total

    def speed(state):
        return (env.BODY * state[:, 3:5] + env.FOOT * state[:, 8:10]) / total

    def spin(state):
        about = env.INERTIA * state[:, 5]
        for mass, place, rate in ((env.BODY, slice(0, 2), slice(3, 5)), (env.FOOT, slice(6, 8), slice(8, 10))):
            arm, velocity = state[:, place] - centre(state), state[:, rate] - speed(state)
            about = about + mass * (arm[:, 0] * velocity[:, 1] - arm[:, 1] * velocity[:, 0])
        return about

    moved = state
    for _ in range(5):
        moved = env.physics(moved, action)
    fall = torch.tensor([0.0, -env.GRAVITY]).double() * env.DT * env.SUBSTEPS * 5
    torch.testing.assert_close(speed(moved) - speed(state), fall.expand(8, 2))
    assert (moved[:, 5] - state[:, 5]).abs().max() > 0.5  # the body does turn
    torch.testing.assert_close(spin(moved), spin(state), rtol=0.02, atol=0.02)


def test_environments_restart_within_the_step():
    """What a step returns where an episode ended: the new episode's observation, and the old one's in infos."""
    module = example("ppo_gpu_envs")
    env = module.CartPoleSwingUp(4, torch.device("cpu"))
    env.reset()
    env.steps[:] = torch.tensor([0, env.time_limit - 1, 0, env.time_limit - 1])
    env.state[:, 0] = torch.tensor([0.0, 0.0, env.TRACK + 1.0, env.TRACK + 1.0])
    obs, _, terminated, truncated, infos = env.step(torch.zeros(4, 1))
    assert terminated.tolist() == [False, False, True, True]
    assert truncated.tolist() == [False, True, False, False]
    assert env.steps.tolist() == [1, 0, 0, 0]
    assert torch.equal(obs[0], infos["final_obs"][0])
    assert (obs[1:] != infos["final_obs"][1:]).any(dim=1).all()
    assert infos["final_obs"][2:, 0].min() > 1.0 > obs[:, 0].abs().max()
