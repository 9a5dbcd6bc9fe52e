"""A window of whole tiles is computed without masks: each row has the bits that it has in any other window."""

import pytest
import torch
from calls import FUNCTIONS, NAMES, calls, flat

import rl_triton as rlt
from rl_triton import _config, _launch
from rl_triton._config import LaunchConfig, configured

N_ROWS, N_STEPS = 8, 16  # both differ from the number of actions, so a tensor's axes can be told by their sizes
CONFIGS = (
    LaunchConfig(rows=8, chunks=4, steps=2, axis=1, num_warps=1, prefetch=True),
    LaunchConfig(rows=8, chunks=4, steps=2, axis=0, num_warps=1, prefetch=True),
    LaunchConfig(rows=8, chunks=8, steps=2, axis=0, num_warps=2),
    LaunchConfig(rows=8, chunks=4, steps=1, axis=1, num_warps=1, parts=2),
)


def fewer_rows(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(x.shape.index(N_ROWS), 0, N_ROWS - 1)


@pytest.mark.parametrize("config", CONFIGS, ids=["axis 1", "axis 0", "not prefetched", "split"])
@pytest.mark.parametrize("name", FUNCTIONS if _launch.interpreting() else NAMES)  # the interpreter is slow
def test_bits(name, config):
    device = "cpu" if _launch.interpreting() else "cuda"
    call = calls(N_ROWS, N_STEPS, device)[name]
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
