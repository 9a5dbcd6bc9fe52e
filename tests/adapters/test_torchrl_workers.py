"""Our advantages around TorchRL's worker processes and CUDA graphs."""

import functools
import os
import warnings

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed")

from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import CudaGraphModule, TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Categorical, Composite, LazyMemmapStorage, ReplayBuffer, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE, TDLambdaEstimator

from rl_triton.adapters import status, torchrl

N_ENVS, N_STEPS = 3, 8
ROUTES = ["patch", "classes"]


@pytest.fixture(autouse=True)
def stock_afterwards():
    yield
    torchrl.unpatch()


def n_served():
    return sum(entry["served"] for entry in status().values())


class Walk(EnvBase):
    """Random walks; one that has gone far enough ends, in a terminal state if it is on the right."""

    def __init__(self):
        super().__init__(batch_size=[N_ENVS])
        self.observation_spec = Composite(observation=Unbounded((N_ENVS, 1)), shape=(N_ENVS,))
        self.action_spec = Categorical(2, shape=(N_ENVS,), dtype=torch.int64)
        self.reward_spec = Unbounded((N_ENVS, 1))
        flag = Categorical(2, shape=(N_ENVS, 1), dtype=torch.bool)
        names = ("done", "terminated", "truncated")
        self.done_spec = Composite({name: flag.clone() for name in names}, shape=(N_ENVS,))

    def _set_seed(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def _reset(self, tensordict):
        flags = {key: torch.zeros(N_ENVS, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        return TensorDict({"observation": torch.zeros(N_ENVS, 1), **flags}, [N_ENVS])

    def _step(self, tensordict):
        noise = torch.randn(N_ENVS, 1, generator=self.generator)
        position = tensordict["observation"] + noise + tensordict["action"][:, None] - 0.5
        ends = {"terminated": position > 1.5, "truncated": position < -1.5}
        ends["done"] = ends["terminated"] | ends["truncated"]
        return TensorDict({"observation": position, "reward": position.sin(), **ends}, [N_ENVS])


def critic():
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(1, 1), in_keys=["observation"], out_keys=["state_value"]).requires_grad_(False)


def policy():
    torch.manual_seed(1)
    logits = TensorDictModule(nn.Linear(1, 2), in_keys=["observation"], out_keys=["logits"]).requires_grad_(False)
    return ProbabilisticActor(
        logits,
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        distribution_kwargs={"validate_args": False},  # it would read device data, which a capture forbids
        return_log_prob=True,
    )


def by_both_routes(data):
    """Advantages by TorchRL's class, which a patch serves or not, and by ours, and how many calls of each were served
    in this process; as single transitions."""
    results = {}
    for make in (GAE, torchrl.GAE):
        before = n_served()
        results[make.__module__.split(".")[0]] = {
            "advantages": make(gamma=0.9, lmbda=0.8, value_network=critic())(data.clone())["advantage"],
            "served": torch.full(data.batch_size, n_served() - before),
            "process": torch.full(data.batch_size, os.getpid()),
        }
    return data.update(results).reshape(-1)


def collect(**options):
    """A batch of two worker processes."""
    collector = MultiSyncCollector(
        [Walk, Walk],
        policy(),
        frames_per_batch=2 * N_ENVS * N_STEPS,
        total_frames=2 * N_ENVS * N_STEPS,
        auto_register_policy_transforms=False,
        cat_results=0,
        **options,
    )
    try:
        collector.set_seed(0)
        (data,) = collector
    finally:
        collector.shutdown()
    return data


def same(a, b, keys=("advantage", "value_target")):
    for key in keys:
        torch.testing.assert_close(a[key], b[key], rtol=2e-5, atol=2e-5)


def check(data):
    """Of every transition: both calls served, in which processes, and the numbers of TorchRL's loop."""
    data = data.reshape(2 * N_ENVS, N_STEPS)
    assert data["next", "done"].any()
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=critic())(data.exclude("torchrl", "rl_triton"))["advantage"]
    for route in ("torchrl", "rl_triton"):
        assert (data[route, "served"] == 1).all()
        torch.testing.assert_close(data[route, "advantages"], expected, rtol=2e-5, atol=2e-5)
    return set(data["torchrl", "process"].flatten().tolist())


def estimator_of(route):
    """Of TorchRL, for the patch to serve, or ours."""
    make = GAE if route == "patch" else torchrl.GAE
    return make(gamma=0.9, lmbda=0.8, value_network=critic())


def test_a_batch_of_worker_processes():
    """Collected by two workers, advantages in the process that learns."""
    with torchrl.patched():
        data = collect(postproc=by_both_routes)
    assert check(data) == {os.getpid()}


def test_in_worker_processes(tmp_path):
    """A collector that writes to a replay buffer has its workers compute advantages; they patch for themselves."""
    n = 2 * N_ENVS * N_STEPS
    storage = LazyMemmapStorage(n, scratch_dir=tmp_path, shared_init=True)  # the first worker to write lays it out
    buffer = ReplayBuffer(storage=storage, shared=True, batch_size=1)
    assert collect(replay_buffer=buffer, postproc=by_both_routes, init_fn=torchrl.patch) is None
    assert not torchrl.is_patched()
    processes = check(buffer[:])
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_lazy_stacks_under_the_patch():
    """Rollouts of environments that differ, stacked without being copied."""

    def rollouts():
        torch.manual_seed(3)
        done = torch.rand(4, N_STEPS, 1) < 0.2
        flags = {"done": done, "terminated": done & (torch.rand(4, N_STEPS, 1) < 0.5)}
        x = torch.randn(3, 4, N_STEPS, 1)
        following = {"observation": x[0], "reward": x[1], **flags}
        dense = TensorDict({"observation": x[2], "next": following}, [4, N_STEPS])
        rows = [row.set("only_here", torch.zeros(N_STEPS, i + 1)) for i, row in enumerate(dense.unbind(0))]
        return LazyStackedTensorDict.lazy_stack(rows, 0)

    for make in (GAE, TDLambdaEstimator):
        for vectorized in (False, True):
            estimator = make(gamma=0.9, lmbda=0.8, value_network=critic(), vectorized=vectorized)
            before = n_served()
            with torchrl.patched():
                ours = estimator(rollouts())
            assert n_served() == before + 1
            assert isinstance(ours, LazyStackedTensorDict)
            same(ours, estimator(rollouts()))


def transitions(seed, device):
    generator = torch.Generator().manual_seed(seed)
    shape = (16, 32)
    terminated = torch.rand(*shape, 1, generator=generator) < 0.05
    done = terminated | (torch.rand(*shape, 1, generator=generator) < 0.05)
    observation, following, reward = torch.randn(3, *shape, 1, generator=generator)
    ends = {"done": done, "terminated": terminated}
    return TensorDict(
        {
            "observation": observation,
            "action": torch.randint(2, shape, generator=generator),
            "action_log_prob": torch.randn(*shape, generator=generator) * 0.1 - 0.7,
            "next": {"observation": following, "reward": reward, **ends},
        },
        shape,
        device=device,
    )


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]


def graphed(function, **keys):
    """A CudaGraphModule, which only passes calls on where there is no GPU, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CudaGraphModule(function, **keys)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", ROUTES)
def test_advantages_as_a_cuda_graph_module(route, device):
    """Warm-up, capture, then replays on batches that the capture has not seen."""
    estimator = estimator_of(route).to(device)
    plain = GAE(gamma=0.9, lmbda=0.8, value_network=critic()).to(device)
    if route == "patch":
        torchrl.patch()
    module, before = graphed(estimator), n_served()
    results = [module(transitions(seed, device)).clone() for seed in range(5)]  # a replay writes where the last one did
    calls = n_served() - before
    torchrl.unpatch()
    assert calls == (3 if device == "cuda" else 5)  # one to warm up; one before the capture and one in it; no replay
    for seed, result in enumerate(results):
        same(result, plain(transitions(seed, device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_loss_as_a_cuda_graph_module(route, device):
    """The loss estimates the advantages itself; forward and backward are one graph."""

    def make(estimator_class):
        network = critic().requires_grad_(True)
        loss = ClipPPOLoss(policy().requires_grad_(True), network, entropy_bonus=False).to(device)
        loss.make_value_estimator(estimator_class.for_loss(loss, gamma=0.9, lmbda=0.8))
        return loss

    def step(loss, data):
        loss.zero_grad(set_to_none=False)
        out = loss(data)
        total = out["loss_objective"] + out["loss_critic"]
        total.backward()
        gradients = {f"gradient {i}": p.grad.clone() for i, p in enumerate(loss.parameters())}
        return TensorDict({"total": total.detach(), **gradients})

    plain = make(GAE)
    expected = [step(plain, transitions(seed, device)) for seed in range(5)]
    loss = make(GAE if route == "patch" else torchrl.GAE)
    if route == "patch":
        torchrl.patch()
    before = n_served()
    module = graphed(functools.partial(step, loss), in_keys=[], out_keys=[])
    results = [module(transitions(seed, device)) for seed in range(5)]
    assert n_served() > before
    for ours, theirs in zip(results, expected, strict=True):
        same(ours, theirs, theirs.keys())
