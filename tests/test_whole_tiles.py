"""A window of whole tiles is computed without masks: each row has the bits that it has in any other window."""

import itertools

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
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("weight", range(5))
def test_round_sizes_are_whole(shape, rows_adjacent, weight, splits):
    config = _config.choose(*shape, rows_adjacent, weight, splits)
    assert shape[0] % config.rows == 0
    assert shape[1] % (config.chunks * config.steps) == 0


@pytest.mark.parametrize("rows_adjacent", [False, True])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("weight", range(5))
def test_every_shape_has_a_tile_without_more_of_it_than_needed(rows_adjacent, weight, splits):
    few = [1, 2, 3, 8, 9, 24, 31, 33, 80, 96, 97, 128, 129, 512, 1023, 1024]
    sizes = [*few, 2047, 2048, 6144, 12288, 16384, 24576, 32768, 32769, 49152, 1 << 20]
    for n_rows, n_steps in itertools.product(sizes, sizes):
        config = _config.choose(n_rows, n_steps, rows_adjacent, weight, splits)
        assert config.steps < 2 * n_steps
        assert (config.chunks - 1) * config.steps < 2 * n_steps
        tiles = -(-n_steps // (config.chunks * config.steps))
        assert config.prefetch == (tiles > 1)
        assert 1 <= config.parts <= max(1, tiles // 2)


def test_what_cannot_be_split_is_not():
    assert _config.choose(64, 16384, True, splits=False).parts == 1
    assert _config.choose(64, 16384, True).parts > 1


@pytest.mark.parametrize("rows_adjacent", [False, True])
def test_tiles_of_expectations(rows_adjacent):
    for actions, n_rows, n_steps in itertools.product([1, 2, 3, 18, 64, 128, 129, 1000], [1, 24, 4096], [1, 80, 4096]):
        block, rows, time, num_warps = _config.choose_expected(actions, n_rows, n_steps, rows_adjacent)
        assert min(actions, 128) <= block < 2 * actions
        assert rows * time * block >= 32 * num_warps
        assert (rows if rows_adjacent else time) < 2 * (n_rows if rows_adjacent else n_steps)
