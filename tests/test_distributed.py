"""Modules that call the functions, in the wrappers that spread a module over processes and devices."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rl_triton as rlt

two_gpus = [pytest.mark.gpu_only, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
DEVICES = ["cpu", pytest.param("cuda", marks=two_gpus)]


class ActorCritic(torch.nn.Module):
    """The loss of a window: a policy gradient, and a critic that sees through its targets where `through`."""

    def __init__(self, through=False):
        super().__init__()
        self.body, self.critic, self.policy = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)
        self.through = through

    def estimates(self, obs, actions, rewards, done):
        hidden = self.body(obs).tanh()
        values = self.critic(hidden).squeeze(-1)
        log_probs = self.policy(hidden[:, :-1]).log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        edge = dict(last_values=values[:, -1], differentiable=self.through)
        gae = rlt.gae(rewards, values[:, :-1], done, **edge)
        vtrace = rlt.vtrace(rewards, values[:, :-1], done, log_rhos=log_probs - log_probs.detach(), **edge)
        return values[:, :-1], log_probs, gae, vtrace

    def forward(self, *window):
        values, log_probs, gae, vtrace = self.estimates(*window)
        return (values - gae.returns).square().mean() - (log_probs * vtrace.advantages).mean()


class Advantages(ActorCritic):
    """For a wrapper that gathers results."""

    def forward(self, *window):
        return self.estimates(*window)[2]


def window(seed, device, n_rows=6, n_steps=9):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(n_rows, n_steps + 1, 4, generator=generator)
    actions = torch.randint(3, (n_rows, n_steps), generator=generator)
    rewards, done = torch.randn(2, n_rows, n_steps, generator=generator)
    return [x.to(device) for x in (obs, actions, rewards, done > 1)]


def sharded(module, device):
    return fully_shard(module, mesh=init_device_mesh(device.type, (2,)))


def distributed_data_parallel(module, device):
    return torch.nn.parallel.DistributedDataParallel(module)


WRAPPERS = {"DDP": distributed_data_parallel, "FSDP": sharded}


def train(rank, store, kind):
    """A process: the gradient of each wrapper is the mean over the processes of that of the plain module."""
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for through in (False, True):
            torch.manual_seed(0)
            plain = ActorCritic(through).to(device)
            modules = {name: wrap(copy.deepcopy(plain), device) for name, wrap in WRAPPERS.items()}
            sum(plain(*window(seed, device)) for seed in range(2)).div(2).backward()
            expected = [p.grad for p in plain.parameters()]
            for name, module in modules.items():
                module(*window(rank, device)).backward()
                for p, want in zip(module.parameters(), expected, strict=True):
                    grad = p.grad.full_tensor() if name == "FSDP" else p.grad
                    torch.testing.assert_close(grad, want, msg=lambda text, name=name: f"{name}: {text}")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", DEVICES)
def test_two_processes(kind, tmp_path):
    mp.spawn(train, (str(tmp_path / "store"), kind), nprocs=2)


@pytest.mark.parametrize("kind", DEVICES)
def test_data_parallel(kind):
    """Threads, one a device, whose results are gathered; on the CPU it is the module itself."""
    if kind == "cpu" and torch.cuda.is_available():
        pytest.skip("DataParallel takes the GPUs that there are")
    torch.manual_seed(0)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda:0")
    module = Advantages().to(device)
    given = window(0, device)
    expected = module(*given)
    for _ in range(3):
        result = torch.nn.DataParallel(module)(*given)
        assert type(result) is rlt.GAE
        for x, want in zip(result, expected, strict=True):
            torch.testing.assert_close(x, want)
