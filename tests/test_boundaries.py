"""Section by section, the rules of boundaries.py, one example each that a careless scan gets wrong."""

import pytest
import torch
from windows import SMALL, SMALL_CONFIGS

import rl_triton as rlt
from rl_triton._config import configured
from rl_triton.testing import make_rollout

NAN, INF = float("nan"), float("inf")


def gae(backend, rewards, values, terminated, **options):
    def on_device(x):
        return torch.tensor(x, dtype=torch.float32, device=backend.device) if isinstance(x, list) else x

    options = {"gamma": 1.0, "lambda_": 1.0, "last_values": None} | {k: on_device(v) for k, v in options.items()}
    result = rlt.gae(*(on_device([x]) for x in (rewards, values, terminated)), **options)
    return result.advantages[0].tolist()


def test_start_flags_on_a_gap(backend):
    """The first flagged row from t up to the next valid row cuts t."""
    options = {"flags_at": "start", "last_done": [0.0], "valid": [[1.0, 0.0, 1.0]], "last_values": [2.0]}
    assert gae(backend, [1, 0, 1], [0, 9, 0], [0, 1, 0], **options) == [1, 0, 3]


def test_a_flag_on_an_invalid_row_cuts_and_decides(backend):
    options = {"valid": [[1.0, 0.0, 0.0, 1.0]], "truncated": [[0.0, 0.0, 1.0, 0.0]]}
    boot = {"bootstrap_values": [[NAN, NAN, 5.0, NAN]]}
    assert gae(backend, [1, NAN, NAN, 1], [0, NAN, NAN, 0], [0, 0, 0, 0], **options, **boot) == [6, 0, 0, 1]
    assert gae(backend, [1, NAN, NAN, 1], [0, NAN, NAN, 0], [0, 1, 0, 0], **options, **boot) == [1, 0, 0, 1]
    options["next_values"] = [[7.0, NAN, 5.0, 2.0]]
    assert gae(backend, [1, NAN, NAN, 1], [0, NAN, NAN, 0], [0, 0, 0, 0], **options) == [6, 0, 0, 3]


def test_gaps_join_their_neighbours(backend):
    options = {"valid": [[1.0, 0.0, 0.0, 1.0]], "last_values": [4.0], "gamma": 0.5, "lambda_": 0.5}
    # V' of step 0 is V of row 3, one discount away.
    assert gae(backend, [0, NAN, NAN, 0], [0, NAN, NAN, 8], [0, 0, 0, 0], **options) == [4 - 1.5, 0, 0, -6]


def test_the_last_valid_row_is_the_edge(backend):
    assert gae(backend, [1, 1, NAN], [0, 0, NAN], [0, 0, 0], valid=[[1.0, 1.0, 0.0]], last_values=[4.0]) == [6, 5, 0]
    assert gae(backend, [1, 1, NAN], [0, 0, NAN], [0, 0, 1], valid=[[1.0, 1.0, 0.0]], last_values=[NAN]) == [2, 1, 0]
    next_values = {"next_values": [[3.0, 4.0, NAN]], "valid": [[1.0, 1.0, 0.0]]}
    assert gae(backend, [1, 1, NAN], [0, 0, NAN], [0, 0, 0], **next_values) == [1 + 3 + 5, 5, 0]


def test_nothing_valid(backend):
    assert gae(backend, [NAN, NAN], [NAN, NAN], [0, 1], valid=[[0.0, 0.0]], last_values=[NAN]) == [0, 0]


def test_both_flags_is_a_termination(backend):
    options = {"truncated": [[0.0, 1.0]], "bootstrap_values": [[NAN, NAN]], "last_values": [NAN]}
    assert gae(backend, [1, 2], [0, 0], [0, 1], **options) == [3, 2]


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_single_step(backend, flag):
    terminated, options = [0], {"last_values": [NAN]}
    if flag == "terminated":
        terminated = [1]
    else:
        options |= {"truncated": [[1.0]], "bootstrap_values": [[5.0]]}
    assert gae(backend, [1], [2], terminated, **options) == [-1 if flag == "terminated" else 4]
    assert gae(backend, [1], [2], [0], last_values=[10.0]) == [9]
    assert gae(backend, [1], [2], [0], next_values=[[10.0]]) == [9]


def test_next_values_need_not_be_the_shift_of_values(backend):
    """A target network: equations as written."""
    assert gae(backend, [0, 0], [1, 1], [0, 0], next_values=[[3.0, 5.0]]) == [2 + 4, 4]


def test_last_values_are_not_read_beside_next_values(backend):
    assert gae(backend, [0, 0], [1, 1], [0, 0], next_values=[[3.0, 5.0]], last_values=[NAN]) == [6, 4]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=["axis 1", "axis 0", "split"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["rewards", "values"])
def test_containment(backend, bad, where, config):
    """A bad number reaches its own episode, backwards, and nobody else: no other episode, no other row."""
    n_steps = 40
    rollout = make_rollout(3, n_steps, terminated=0.0, device=backend.device, poison=False)
    rollout["terminated"][:, 9] = True
    rollout["truncated"] = torch.zeros_like(rollout["terminated"])
    rollout["truncated"][:, 24] = True
    rollout["bootstrap_values"] = torch.where(rollout["truncated"], 1.0, NAN)
    with configured(config):
        clean = rlt.gae(**rollout)
        rollout[where][1, 17] = bad
        dirty = rlt.gae(**rollout)
    for k in range(2):
        touched = ~torch.isfinite(dirty[k])
        assert touched[1, 10:18].all()
        assert touched.sum() == 8
        assert torch.equal(dirty[k][~touched], clean[k][~touched])


@pytest.mark.parametrize("gamma", [0.0, "tensor"])
def test_zero_gamma_reads_no_successor(backend, gamma):
    gamma = torch.zeros((), device=backend.device) if gamma == "tensor" else gamma
    assert gae(backend, [1, 2], [0, 0], [0, 0], gamma=gamma, last_values=[INF]) == [1, 2]


def test_zero_lambda_reads_no_later_advantage(backend):
    assert gae(backend, [1, INF], [0, 0], [0, 0], lambda_=0.0) == [1, INF]


def test_padding_may_hold_anything(backend):
    rollout = make_rollout(4, 30, truncated=0.1, valid=0.5, device=backend.device)
    clean = rlt.gae(**rollout)
    gaps = ~rollout["valid"]
    for bad in (NAN, INF, 1e38):
        for name in ("rewards", "values"):
            rollout[name] = torch.where(gaps, bad, rollout[name])
        result = rlt.gae(**rollout)
        assert torch.equal(result.advantages, clean.advantages)
        assert torch.equal(result.returns, clean.returns)
        assert not result.advantages[gaps].any()


def test_nonzero_flags_are_true(backend):
    rollout = make_rollout(3, 20, device=backend.device)
    expected = rlt.gae(**rollout)
    for on, dtype in (
        (2, torch.uint8),
        (-3, torch.int8),
        (0.5, torch.float32),
        (NAN, torch.float64),
        (256, torch.int32),
    ):
        flags = torch.where(rollout["terminated"], on, 0).to(dtype)
        assert torch.equal(rlt.gae(**rollout | {"terminated": flags}).advantages, expected.advantages)
    minus_zero = torch.where(rollout["terminated"], 1.0, -0.0)
    assert torch.equal(rlt.gae(**rollout | {"terminated": minus_zero}).advantages, expected.advantages)


def test_start_flags_equal_shifted_end_flags(backend):
    rollout = make_rollout(4, 33, device=backend.device, terminated=0.3, poison=False)
    ends = rollout["terminated"]
    starts = torch.cat([torch.ones_like(ends[:, :1]), ends[:, :-1]], dim=1)
    options = {"flags_at": "start", "last_done": ends[:, -1]}
    with configured(SMALL):
        shifted = rlt.gae(**rollout | {"terminated": starts}, **options)
        assert torch.equal(shifted.advantages, rlt.gae(**rollout).advantages)
