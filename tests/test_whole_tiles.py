"""A window of whole tiles is computed without masks: each row has the bits that it has in any other window."""

import pytest
import torch
from calls import FUNCTIONS, NAMES, Call, calls, flat

import rl_triton as rlt
from rl_triton import _config, _launch
from rl_triton._config import LaunchConfig, configured
from rl_triton.estimators.adjoint import adjoint

N_ROWS, N_STEPS = 8, 16  # both differ from the number of actions, so a tensor's axes can be told by their sizes
CONFIGS = (
    LaunchConfig(rows=8, chunks=4, steps=2, axis=1, num_warps=1, prefetch=True),
    LaunchConfig(rows=8, chunks=4, steps=2, axis=0, num_warps=1, prefetch=True),
    LaunchConfig(rows=8, chunks=8, steps=2, axis=0, num_warps=2),
    LaunchConfig(rows=8, chunks=4, steps=1, axis=1, num_warps=1, parts=2),
)


def transposed(device: str) -> dict[str, Call]:
    """The gradients of linear calls, every kind of result and of flag among them."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(N_ROWS, N_STEPS, generator=generator).to(device) for _ in range(2))
    done, cut = (torch.rand(N_ROWS, N_STEPS, generator=generator).to(device) < 0.2 for _ in range(2))
    options = {"gamma": 0.97, "lambda_": 0.9}
    return {
        "gae, transposed": Call(
            adjoint,
            {"terminated": done, "truncated": cut, "of_advantages": a, "of_returns": b},
            {"op": "gae", "has_next_values": False} | options,
        ),
        "td_lambda_returns, transposed": Call(
            adjoint,
            {"terminated": done, "last_done": cut[:, 0].contiguous(), "of_returns": b},
            {"op": "td_lambda_returns", "has_next_values": True, "of_advantages": None, "last_values": False} | options,
        ),
    }


CALLS = [*(FUNCTIONS if _launch.interpreting() else NAMES), *transposed("cpu")]  # the interpreter is slow


def fewer_rows(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(x.shape.index(N_ROWS), 0, N_ROWS - 1)


@pytest.mark.parametrize("config", CONFIGS, ids=["axis 1", "axis 0", "not prefetched", "split"])
@pytest.mark.parametrize("name", CALLS)
def test_bits(name, config):
    device = "cpu" if _launch.interpreting() else "cuda"
    call = (calls(N_ROWS, N_STEPS, device) | transposed(device))[name]
    with rlt.backend("triton"), configured(config):
        whole = flat(call())
        hanging_over = flat(call(**{key: fewer_rows(x) for key, x in call.tensors.items() if x.dim()}))
    for x, y in zip(whole, hanging_over, strict=True):
        assert torch.equal(fewer_rows(x), y)


@pytest.mark.parametrize("shape", [(4096, 128), (16384, 512), (65536, 512), (64, 16384)], ids=str)
@pytest.mark.parametrize("rows_adjacent", [False, True])
def test_round_sizes_are_whole(shape, rows_adjacent):
    config = _config.choose(*shape, rows_adjacent)
    assert shape[0] % config.rows == 0
    assert shape[1] % (config.chunks * config.steps) == 0
