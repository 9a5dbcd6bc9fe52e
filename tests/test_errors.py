"""Bad input: the type of the error and its words, which must name the argument and the way out."""

import re

import numpy as np
import pytest
import torch

import rl_triton as rlt

DROP = object()


def arguments(**changes):
    x = torch.zeros(4, 6)
    base = {"rewards": x, "values": x.clone(), "terminated": x.bool(), "last_values": torch.zeros(4)}
    return {k: v for k, v in (base | changes).items() if v is not DROP}


CASES = {
    "numpy": (TypeError, {"rewards": np.zeros((4, 6))}, "rewards is a numpy.ndarray; pass torch.from_numpy(rewards)"),
    "list": (TypeError, {"values": [[0.0]]}, "values must be a torch.Tensor, got list"),
    "terminated None": (TypeError, {"terminated": None}, "terminated must be a torch.Tensor, got NoneType"),
    "subclass": (
        TypeError,
        {"values": torch.zeros(4, 6).as_subclass(type("Mine", (torch.Tensor,), {}))},
        "values is a Mine; tensor subclasses are not supported: pass the plain tensor",
    ),
    "sparse": (TypeError, {"rewards": torch.zeros(4, 6).to_sparse()}, "rewards must be a strided tensor"),
    "complex": (TypeError, {"rewards": torch.zeros(4, 6, dtype=torch.complex64)}, "rewards has dtype torch.complex64"),
    "complex flags": (TypeError, {"terminated": torch.zeros(4, 6).cfloat()}, "terminated has dtype torch.complex64"),
    "unsupported device": (
        ValueError,
        {"rewards": torch.zeros(4, 6, device="meta")},
        "rewards is on device 'meta'; supported are 'cuda' and 'cpu'",
    ),
    "0-d": (ValueError, {"rewards": torch.tensor(1.0)}, "rewards is a single number; it needs a time axis"),
    "wrong shape": (
        ValueError,
        {"values": torch.zeros(4, 5)},
        "values has shape [4, 5], but rewards has shape [4, 6]; they must be equal",
    ),
    "transposed": (
        ValueError,
        {"values": torch.zeros(6, 4)},
        "values has shape [6, 4], but rewards has shape [4, 6]; they must be equal. It looks transposed: pass "
        "values.t(), and time_dim=0 if all are [T, N]",
    ),
    "transposed flags": (ValueError, {"terminated": torch.zeros(6, 4)}, "terminated.t()"),
    "trailing unit axis": (
        ValueError,
        {"values": torch.zeros(4, 6, 1)},
        "It has a trailing unit axis: pass values.squeeze(-1)",
    ),
    "trailing unit axis of rewards": (
        ValueError,
        {"rewards": torch.zeros(4, 6, 1), "time_dim": 1},
        "rewards has a trailing unit axis: pass values.unsqueeze(-1)",
    ),
    "one step longer": (
        ValueError,
        {"values": torch.zeros(4, 7)},
        "It is one step longer along time: pass values[..., :-1] and last_values=values[..., -1]",
    ),
    "one step longer, time first": (
        ValueError,
        {"values": torch.zeros(5, 6), "time_dim": 0},
        "pass values[:-1] and last_values=values[-1]",
    ),
    "truncated without bootstrap": (
        ValueError,
        {"truncated": torch.zeros(4, 6)},
        "truncated was given without the value of the final observations; pass bootstrap_values",
    ),
    "bootstrap without truncated": (
        ValueError,
        {"bootstrap_values": torch.zeros(4, 6)},
        "bootstrap_values needs truncated",
    ),
    "bootstrap and next values": (
        ValueError,
        {"bootstrap_values": torch.zeros(4, 6), "truncated": torch.zeros(4, 6), "next_values": torch.zeros(4, 6)},
        "bootstrap_values and next_values exclude each other",
    ),
    "no edge": (
        ValueError,
        {"last_values": DROP},
        "the window's edge needs a value: pass last_values (V of the observation after the last step, one per row) or "
        "next_values; last_values=None says that it is zero",
    ),
    "last_values [N, 1]": (
        ValueError,
        {"last_values": torch.zeros(4, 1)},
        "last_values has shape [4, 1], but needs one entry per row, shape [4]: that of rewards, [4, 6], without its "
        "time axis (time_dim=1). Pass last_values.squeeze(-1)",
    ),
    "last_values [1, N]": (ValueError, {"last_values": torch.zeros(1, 4)}, "Pass last_values.squeeze(0)"),
    "last_values per step": (
        ValueError,
        {"last_values": torch.zeros(4, 6)},
        "Pass its last step, last_values[..., -1]",
    ),
    "last_values float": (TypeError, {"last_values": 0.0}, "last_values must be a torch.Tensor, got float"),
    "start with truncated": (
        ValueError,
        {"flags_at": "start", "truncated": torch.zeros(4, 6), "last_done": torch.zeros(4)},
        "truncated was given with flags_at='start', where one merged flag says that a row starts an episode. Pass end "
        "flags instead: done[t] = start[t+1]",
    ),
    "start without last_done": (
        ValueError,
        {"flags_at": "start"},
        "flags_at='start' needs last_done, one flag per row",
    ),
    "last_done without start": (
        ValueError,
        {"last_done": torch.zeros(4)},
        "last_done was given with flags_at='end'",
    ),
    "unknown flags_at": (ValueError, {"flags_at": "begin"}, "flags_at must be 'end' or 'start', got 'begin'"),
    "time_dim out of range": (ValueError, {"time_dim": 2}, "time_dim=2 is out of range for rewards of shape [4, 6]"),
    "time_dim float": (TypeError, {"time_dim": 1.0}, "time_dim must be an int, got float"),
    "gamma string": (TypeError, {"gamma": "0.9"}, "gamma must be a float or a tensor, got str"),
    "gamma bool": (TypeError, {"gamma": True}, "gamma must be a float or a tensor, got bool"),
    "gamma numpy": (TypeError, {"gamma": np.zeros(3)}, "gamma is a numpy.ndarray; pass torch.from_numpy(gamma)"),
    "gamma shape": (
        ValueError,
        {"gamma": torch.zeros(6)},
        "gamma has shape [6]; a tensor gamma is 0-d, or has as many axes as rewards, [4, 6], each of size 1 or equal",
    ),
    "lambda_ shape": (ValueError, {"lambda_": torch.zeros(4, 5)}, "lambda_ has shape [4, 5]"),
    "valid shape": (ValueError, {"valid": torch.zeros(4)}, "valid has shape [4], but rewards has shape [4, 6]"),
    "carry shape": (ValueError, {"carry": torch.zeros(6)}, "carry has shape [6], but needs one entry per row"),
    "out not a tuple": (
        TypeError,
        {"out": torch.zeros(4, 6)},
        "out must be a tuple of 2 tensors (advantages, returns), got Tensor",
    ),
    "out too short": (TypeError, {"out": (torch.zeros(4, 6),)}, "out must be a tuple of 2 tensors"),
    "out shape": (
        ValueError,
        {"out": (torch.zeros(4, 6), torch.zeros(6, 4))},
        "out[1] (returns) has shape [6, 4], but the result has shape [4, 6]",
    ),
    "out dtype": (
        TypeError,
        {"out": (torch.zeros(4, 6).double(), torch.zeros(4, 6))},
        "out[0] (advantages) has dtype torch.float64, but the result has dtype torch.float32",
    ),
    "out device": (
        ValueError,
        {"out": (torch.zeros(4, 6, device="meta"), torch.zeros(4, 6))},
        "out[0] (advantages) is on meta, but the inputs are on cpu",
    ),
    "out requires grad": (
        ValueError,
        {"out": (torch.zeros(4, 6, requires_grad=True), torch.zeros(4, 6))},
        "out[0] (advantages) requires grad, and results carry no graph: pass out[0].detach()",
    ),
    "out expanded": (
        ValueError,
        {"out": (torch.zeros(1, 6).expand(4, 6), torch.zeros(4, 6))},
        "out[0] (advantages) has shape [4, 6] and strides [0, 1], a view in which several elements may be one",
    ),
    "out over itself": (
        ValueError,
        {"out": (torch.zeros(4, 6), torch.zeros(40).as_strided((4, 6), (4, 1)))},
        "out[1] (returns) has shape [4, 6] and strides [4, 1], a view in which several elements may be one",
    ),
    "out negated": (
        ValueError,
        {"out": (torch.zeros(4, 6, dtype=torch.complex64).conj().imag, torch.zeros(4, 6))},
        "out[0] (advantages) is a negated view",
    ),
    "out sparse": (
        TypeError,
        {"out": (torch.zeros(4, 6).to_sparse(), torch.zeros(4, 6))},
        "out[0] (advantages) must be a strided tensor",
    ),
}


@pytest.mark.parametrize(("error", "changes", "words"), CASES.values(), ids=CASES.keys())
def test_words(error, changes, words, monkeypatch):
    def never(problem):
        raise AssertionError("a kernel was about to run")

    monkeypatch.setattr("rl_triton._backend.run", never)
    with pytest.raises(error, match="^gae: .*" + re.escape(words)) as caught:
        rlt.gae(**arguments(**changes))
    assert type(caught.value) is error


def test_out_sharing_memory():
    given = arguments()
    block = torch.zeros(3, 4, 6)
    for name in ("rewards", "values"):
        with pytest.raises(ValueError, match=rf"out\[0\] \(advantages\) shares memory with {name}; results cannot"):
            rlt.gae(**given, out=(given[name], torch.zeros(4, 6)))
    with pytest.raises(ValueError, match=r"out\[1\] \(returns\) shares memory with out\[0\] \(advantages\)"):
        rlt.gae(**given, out=(block[0], block[0]))
    shifted = torch.zeros(30)
    given["rewards"] = shifted[:24].view(4, 6)
    with pytest.raises(ValueError, match="shares memory with rewards"):
        rlt.gae(**given, out=(shifted[6:].view(4, 6), torch.zeros(4, 6)))
    array = np.zeros(30, dtype=np.float32)
    given["rewards"] = torch.from_numpy(array[:24].reshape(4, 6))  # tensors with storages of their own
    with pytest.raises(ValueError, match="shares memory with rewards"):
        rlt.gae(**given, out=(torch.from_numpy(array[6:].reshape(4, 6)), torch.zeros(4, 6)))
    with pytest.raises(ValueError, match=r"out\[0\] \(advantages\) shares memory with carry; results cannot"):
        rlt.gae(**arguments(carry=block[1][:, 0]), out=(block[1], block[0]))
    with pytest.raises(ValueError, match=r"eligibility_traces: out shares memory with initial; results cannot"):
        rlt.eligibility_traces(block[0], block[0], initial=block[1][:, 0], out=block[1])


@pytest.mark.gpu_only
def test_mixed_devices():
    for name in ("values", "terminated", "last_values", "carry"):
        given = arguments(carry=torch.zeros(4))
        given[name] = given[name].cuda()
        with pytest.raises(
            ValueError, match=rf"{name} is on cuda:0, but rewards is on cpu; .* pass {name}\.to\('cpu'\)"
        ):
            rlt.gae(**given)
    with pytest.raises(ValueError, match="gamma is on cuda:0, but rewards is on cpu"):
        rlt.gae(**arguments(gamma=torch.tensor(0.9, device="cuda")))


def test_affine_scan_words():
    x = torch.zeros(4, 6)
    with pytest.raises(TypeError, match="affine_scan: alpha is a numpy.ndarray"):
        rlt.affine_scan(x.numpy(), 0.5)
    with pytest.raises(ValueError, match=r"affine_scan: beta has shape \[6\]; a tensor beta is 0-d"):
        rlt.affine_scan(x, x[0])
    with pytest.raises(ValueError, match=r"affine_scan: initial has shape \[6\], but needs one entry per row"):
        rlt.affine_scan(x, 0.5, initial=x[0])
    for name, given in (("alpha", {"alpha": x}), ("initial", {"alpha": torch.zeros(4, 6), "initial": x[:, 0]})):
        with pytest.raises(ValueError, match=f"affine_scan: out shares memory with {name}"):
            rlt.affine_scan(**given, beta=0.5, out=x)
    with pytest.raises(TypeError, match="affine_scan: out must be a torch.Tensor, got tuple"):
        rlt.affine_scan(x, 0.5, out=(x,))


def window(**changes):
    x = torch.zeros(4, 6)
    base = {"rewards": x, "terminated": x.bool()}
    return {k: v for k, v in (base | changes).items() if v is not DROP}


X, ROWS = torch.zeros(4, 6), torch.zeros(4)
ACTIONS = torch.zeros(4, 6, 3)
VTRACE = {"values": X, "last_values": ROWS}
RETRACE = {"q_values": X, "expected_next_q": X}
OTHERS = {
    "discounted: no edge": (
        rlt.discounted_returns,
        {},
        ValueError,
        "discounted_returns: the window's edge needs a value",
    ),
    "discounted: truncated": (
        rlt.discounted_returns,
        {"truncated": X, "last_values": ROWS},
        ValueError,
        "discounted_returns: truncated was given without the value of the final observations",
    ),
    "td_lambda: no values": (
        rlt.td_lambda_returns,
        {"values": None, "last_values": ROWS},
        ValueError,
        "td_lambda_returns: values is None; pass V(s_t) in values, or V of every step's successor in next_values",
    ),
    "td_lambda: one step longer": (
        rlt.td_lambda_returns,
        {"values": torch.zeros(4, 7), "last_values": ROWS},
        ValueError,
        "pass values[..., :-1] and last_values=values[..., -1]",
    ),
    "n_step: no values": (
        rlt.n_step_returns,
        {"n": 3, "last_values": ROWS},
        ValueError,
        "n_step_returns: pass V(s_t) in values, or V of every step's successor in next_values",
    ),
    "n_step: n float": (
        rlt.n_step_returns,
        {"n": 3.0, "values": X, "last_values": ROWS},
        TypeError,
        "n_step_returns: n must be an int, got float",
    ),
    "n_step: n zero": (
        rlt.n_step_returns,
        {"n": 0, "values": X, "last_values": ROWS},
        ValueError,
        "n_step_returns: n must be 1 or more, got 0",
    ),
    "vtrace: no ratio": (
        rlt.vtrace,
        VTRACE,
        ValueError,
        "vtrace: the ratios of the policies are missing: pass log_rhos, or both target_log_probs and "
        "behavior_log_probs",
    ),
    "vtrace: half a ratio": (rlt.vtrace, VTRACE | {"target_log_probs": X}, ValueError, "vtrace: the ratios of the"),
    "vtrace: two ratios": (
        rlt.vtrace,
        VTRACE | {"target_log_probs": X, "log_rhos": X},
        ValueError,
        "vtrace: log_rhos excludes target_log_probs and behavior_log_probs",
    ),
    "vtrace: ratio shape": (
        rlt.vtrace,
        VTRACE | {"log_rhos": torch.zeros(4, 6, 1)},
        ValueError,
        "log_rhos has shape [4, 6, 1], but rewards has shape [4, 6]; they must be equal. It has a trailing unit axis",
    ),
    "vtrace: bar": (
        rlt.vtrace,
        VTRACE | {"log_rhos": X, "rho_bar": None},
        TypeError,
        "vtrace: rho_bar must be a float or a tensor, got NoneType",
    ),
    "retrace: no expectation": (
        rlt.retrace,
        {"q_values": X},
        ValueError,
        "retrace: the value of the successors is missing: pass expected_next_q, or both next_q_values and "
        "next_policy_probs (the policy of the next state)",
    ),
    "retrace: two expectations": (
        rlt.retrace,
        RETRACE | {"next_q_values": ACTIONS},
        ValueError,
        "retrace: expected_next_q excludes next_q_values and next_policy_probs",
    ),
    "retrace: actions differ": (
        rlt.retrace,
        {"q_values": X, "next_q_values": ACTIONS, "next_policy_probs": ACTIONS[..., :2]},
        ValueError,
        "retrace: next_q_values has 3 actions, but next_policy_probs has 2; they must be equal",
    ),
    "retrace: no action axis": (
        rlt.retrace,
        {"q_values": X, "next_q_values": X, "next_policy_probs": X},
        ValueError,
        "retrace: next_q_values has shape [4, 6], but needs that of rewards, [4, 6], with an axis of at least one "
        "action appended",
    ),
    "retrace: trace": (
        rlt.retrace,
        RETRACE | {"trace": "td"},
        ValueError,
        "retrace: trace must be one of 'retrace', 'tree_backup', 'importance_sampling', 'q_lambda', got 'td'",
    ),
    "retrace: tree backup": (
        rlt.retrace,
        RETRACE | {"trace": "tree_backup"},
        ValueError,
        "retrace: trace='tree_backup' needs policy_probs",
    ),
    "retrace: half a ratio": (
        rlt.retrace,
        RETRACE | {"policy_probs": X},
        ValueError,
        "retrace: the ratio needs both policy_probs and behavior_probs; behavior_probs is missing",
    ),
    "retrace: two ratios": (
        rlt.retrace,
        RETRACE | {"policy_probs": X, "log_rhos": X},
        ValueError,
        "retrace: log_rhos and policy_probs both give the ratio; pass one of them",
    ),
    "retrace: actions missing": (
        rlt.retrace,
        RETRACE | {"policy_probs": ACTIONS, "behavior_probs": X},
        ValueError,
        "retrace: policy_probs has an action axis, so actions is needed",
    ),
    "retrace: actions unused": (
        rlt.retrace,
        RETRACE | {"actions": X.long()},
        ValueError,
        "retrace: actions was given, but no probabilities with an action axis to pick them from",
    ),
    "retrace: float actions": (
        rlt.retrace,
        RETRACE | {"policy_probs": ACTIONS, "behavior_probs": ACTIONS, "actions": X},
        TypeError,
        "retrace: actions has dtype torch.float32, but an integer dtype is needed",
    ),
    "retrace: carry": (
        rlt.retrace,
        RETRACE | {"carry": ROWS},
        TypeError,
        "retrace: carry must be the pair (c D, targets) that a later window returned",
    ),
}


@pytest.mark.parametrize(("function", "changes", "error", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_words_of_the_others(function, changes, error, words, monkeypatch):
    def never(problem):
        raise AssertionError("a kernel was about to run")

    monkeypatch.setattr("rl_triton._backend.run", never)
    with pytest.raises(error, match=re.escape(words)):
        function(**window(**changes))


def test_words_of_the_forward_ops():
    done = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="eligibility_traces: kind must be 'accumulating' or 'replacing', got 'dutch'"):
        rlt.eligibility_traces(X, done, kind="dutch")
    for function in (rlt.eligibility_traces, rlt.episodic_cumsum):
        with pytest.raises(ValueError, match="flags_at must be 'end' or 'start', got 'begin'"):
            function(X, done, flags_at="begin")
        with pytest.raises(ValueError, match=r"x has shape \[6, 4\], but done has shape \[4, 6\]; .* transposed"):
            function(X.t(), done)
        with pytest.raises(ValueError, match=r"x has shape \[4, 5, 2\], but needs that of done, \[4, 6\], with or"):
            function(torch.zeros(4, 5, 2), done)
        with pytest.raises(ValueError, match=r"initial has shape \[4\], but needs one entry per row, shape \[4, 3\]"):
            function(ACTIONS, done, initial=ROWS)


def test_data_is_looked_at_on_demand(monkeypatch):
    nan = X.clone()
    nan[2, 3] = float("nan")
    flags = X.clone()
    flags[1, 4] = 2
    ends = (nan != nan).float()
    valid = torch.ones_like(X)
    probs = torch.ones_like(ACTIONS)
    given = RETRACE | {"policy_probs": probs, "behavior_probs": probs, "actions": X.long()}

    def calls():
        yield (
            lambda: rlt.gae(**arguments(rewards=nan)),
            "gae: rewards holds NaN in steps that count: 1 of 24, the first at",
        )
        yield lambda: rlt.gae(**arguments(terminated=flags)), r"terminated holds numbers other than 0 and 1 .* \(1, 4\)"
        yield lambda: rlt.gae(**arguments(valid=2 * valid)), "valid holds numbers other than 0 and 1"
        yield lambda: rlt.retrace(**window(**given | {"actions": X.long() + 3})), r"indices outside 0\.\.2"
        yield lambda: rlt.retrace(**window(**given | {"behavior_probs": 0 * probs})), "behavior_probs holds 0 for taken"
        yield lambda: rlt.eligibility_traces(X, flags), "done holds numbers other than 0 and 1"
        yield lambda: rlt.gae(**arguments(gamma=float("nan"))), "gamma is NaN"
        yield lambda: rlt.gae(**arguments(lambda_=nan)), "lambda_ is NaN in steps that count: 1 of 24"
        yield lambda: rlt.gae(**arguments(last_values=nan[:, 3])), "last_values holds NaN in rows that go on beyond the"
        given_next = {"truncated": ends, "last_values": DROP, "next_values": nan}
        yield lambda: rlt.gae(**arguments(**given_next)), r"next_values holds NaN in steps that read it"
        cut = {"truncated": ends, "bootstrap_values": nan}
        yield lambda: rlt.gae(**arguments(**cut)), "bootstrap_values holds NaN at truncated steps: 1 of 24"
        yield lambda: rlt.td_lambda_returns(**arguments(values=nan)), "values holds NaN in steps that count"

    for call, words in calls():
        if "indices" not in words:  # reading outside a table is not tried
            call()
    monkeypatch.setattr("rl_triton._checks.READS_DATA", True)
    for call, words in calls():
        with pytest.raises(ValueError, match=words):
            call()
    rlt.gae(**arguments())
    valid[2, 3] = 0
    rlt.gae(**arguments(rewards=nan, valid=valid))
    # What is not read may hold anything: values beyond an end, of steps that were not truncated, beyond a cut window.
    rlt.gae(**arguments(terminated=ends, truncated=ends, bootstrap_values=nan))
    rlt.gae(**arguments(terminated=ends, last_values=DROP, next_values=nan))
    closed = {"last_values": nan[:, 3], "last_done": ends[:, 3], "flags_at": "start"}
    rlt.gae(**arguments(**closed))
    behind = torch.ones_like(X)
    behind[:, 4:] = 0
    at_end = torch.zeros_like(X)
    at_end[2, 4] = 1
    rlt.gae(**arguments(valid=behind, terminated=at_end, last_values=nan[:, 3]))
    rlt.retrace(**window(**given))
