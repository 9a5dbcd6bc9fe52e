"""n_step_returns where a chunk's results reach into the chunks, and the tiles, behind it."""

import pytest
import torch

import rl_triton as rlt
from rl_triton import reference
from rl_triton._config import LaunchConfig, configured
from rl_triton.testing import assert_close, make_rollout

# Windows of 32 rows and 32 steps are whole tiles of each: 1, 2, 4 or 8 steps a thread, in one tile or several.
CONFIGS = [
    LaunchConfig(4, 8, 4, num_warps=1),
    LaunchConfig(2, 16, 2, num_warps=1),
    LaunchConfig(8, 4, 8, num_warps=2),
    LaunchConfig(32, 8, 1, axis=0),
    LaunchConfig(32, 1, 8, axis=0, num_warps=1),
    LaunchConfig(16, 2, 4, axis=0, num_warps=2),
]
ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2}
FEATURES = ["ended", "truncated", "start", "next_values", "gammas", "no edge value"]


def window(features, layout, n_rows, n_steps, dtype, device):
    """Arguments of `n_step_returns`; NaN wherever nothing may be read."""
    truncated = 0.2 if "truncated" in features else None
    x = make_rollout(n_rows, n_steps, layout=layout, dtype=dtype, truncated=truncated, device=device, seed=n_steps)
    x |= {"time_dim": 1 if layout == "NT" else 0, "gamma": 0.9}
    if features == "start":
        generator = torch.Generator().manual_seed(0)
        done = torch.rand(n_rows, generator=generator) < 0.5
        edge = torch.where(done, float("nan"), torch.randn(n_rows, generator=generator))
        x |= {"flags_at": "start", "last_done": done.to(device), "last_values": edge.to(device=device, dtype=dtype)}
    elif features == "next_values":
        del x["last_values"]
        x["next_values"] = torch.where(x["terminated"], float("nan"), x.pop("values"))
    elif features == "gammas":
        gamma = torch.rand(x["rewards"].shape, generator=torch.Generator().manual_seed(1))
        x["gamma"] = torch.where(gamma < 0.2, 0.0, gamma).to(device=device, dtype=dtype)
    elif features == "no edge value":
        x |= {"last_values": None, "terminated": torch.zeros_like(x["terminated"])}
    return x


@pytest.mark.parametrize("layout", ["NT", "TN"])
@pytest.mark.parametrize("features", FEATURES)
def test_windows_of_whole_and_of_broken_tiles(features, layout, backend):
    """Over the seams of chunks and tiles, for as many steps as the near kernel takes and one more."""
    turn = FEATURES.index(features)
    for k, config in enumerate(CONFIGS if backend.name == "triton" else CONFIGS[:1]):
        n = (5, 16, 17, 2, 1, 9)[(k + turn) % 6]
        n_rows, n_steps = ((32, 32), (5, 27), (32, 32))[(k + turn // 2) % 3]
        dtype = list(ROUNDING)[(k // 2 + turn) % 3]
        x = window(features, layout, n_rows, n_steps, dtype, backend.device)
        with configured(config):
            returns = rlt.n_step_returns(**x, n=n)
        assert returns.dtype == dtype
        assert_close(returns, reference.n_step_returns(**x, n=n), max_error=ROUNDING[dtype])


@pytest.mark.parametrize("layout", ["NT", "TN"])
@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_what_lies_beyond_a_cut_is_not_read(gamma, layout, backend):
    """NaN and inf behind a cut, behind the n-th step, and, where γ is 0, behind the step itself."""
    x = make_rollout(3, 40, layout="NT", terminated=0.0, poison=False, device=backend.device)
    x["terminated"][:, 19] = True
    x["rewards"][1, 20:] = float("nan")
    x["values"][1, 20:] = float("inf")
    expected = reference.n_step_returns(**x, n=5, gamma=gamma)
    assert torch.isfinite(expected[:, :20]).all()
    turned = {k: v.t().contiguous() if layout == "TN" and v.dim() == 2 else v for k, v in x.items()}
    returns = rlt.n_step_returns(**turned, n=5, gamma=gamma, time_dim=-1 if layout == "NT" else 0)
    assert_close(returns if layout == "NT" else returns.t(), expected, max_error=2e-6)
