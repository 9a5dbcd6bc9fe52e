"""Every conformance case: small inputs with right answers, from public bug reports. See data/cases.md."""

import json
from pathlib import Path

import pytest
import torch

import rl_triton as rlt

CASES = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())["cases"]
DEFAULT_DTYPES = {"terminated": "float32", "truncated": "float32", "valid": "float32"}


def number(x):
    return [number(y) for y in x] if isinstance(x, list) else float(x)


def of(*algorithms):
    cases = [case for case in CASES if case["algorithm"] in algorithms]
    assert cases
    return [pytest.param(case, id=f"{case['id']} {case['kind']}") for case in cases]


class Inputs:
    """A case's inputs as tensors of its layout."""

    def __init__(self, case, device, dtypes):
        self.case, self.device = case, device
        self.time_dim = 0 if case["layout"].startswith("T") else 1
        self.tensors = {name: self.build(x, dtypes.get(name, "float32")) for name, x in case["inputs"].items()}

    def build(self, x, dtype):
        x = torch.tensor(number(x), dtype=torch.float64).to(getattr(torch, dtype)).to(self.device)
        if self.case.get("build") == "noncontiguous view" and x.dim() == 2:
            x = x.t().contiguous().t()
        return x

    def __getitem__(self, name):
        return self.tensors[name]

    def get(self, name):
        return self.tensors.get(name)

    def rows(self, name):
        x = self.tensors.get(name)
        return x.unsqueeze(-1) if x is not None and self.case["layout"].endswith(",1") else x


def gae_arguments(case, inputs):
    """Every way in which the library takes the case's boundary."""
    truncated, next_values = inputs.get("truncated"), inputs.get("next_values")
    last = inputs.rows("last_values")
    if case["convention"] == "canonical":
        yield dict(terminated=inputs["terminated"], truncated=truncated, next_values=next_values)
        yield dict(terminated=inputs["terminated"], truncated=truncated, bootstrap_values=next_values, last_values=last)
    elif case["convention"] == "sb3":
        yield dict(
            terminated=inputs["episode_starts"], flags_at="start", last_done=inputs.rows("last_dones"), last_values=last
        )
    elif case["convention"] == "cleanrl":
        yield dict(terminated=inputs["dones"], flags_at="start", last_done=inputs.rows("next_done"), last_values=last)
    elif case["convention"] == "next_step":
        ended = (inputs["terminated"] != 0) | (inputs["truncated"] != 0)
        before = inputs["prev_done"] if inputs.get("prev_done") is not None else torch.zeros_like(ended[:, 0])
        reset = torch.cat([before.bool()[:, None], ended[:, :-1]], dim=1)
        final_values = torch.cat([inputs["values"][:, 1:], last[:, None]], dim=1)
        yield dict(
            terminated=inputs["terminated"], truncated=truncated, bootstrap_values=final_values, last_values=last,
            valid=~reset,
        )  # fmt: skip
    elif case["convention"] == "response_mask":
        valid = inputs["valid"]
        steps = torch.arange(valid.shape[1], device=valid.device)
        is_last = steps == (valid * steps).argmax(dim=1, keepdim=True)
        by_length = inputs.get("cut_by_length")
        ends = is_last if by_length is None else is_last & (by_length[:, None] == 0)
        yield dict(terminated=ends, valid=valid, last_values=last)
    else:
        raise AssertionError(case["convention"])


def check(case, results):
    for name, expected in case["expected"].items():
        expected = torch.tensor(number(expected), dtype=torch.float64)
        actual = results[name]
        if "expected_shape" in case:
            assert list(actual.shape) == case["expected_shape"]
        if "expect_requires_grad" in case:
            assert actual.requires_grad is case["expect_requires_grad"]
        torch.testing.assert_close(
            actual.double().cpu(), expected, rtol=case.get("rtol", 1e-6), atol=case.get("rtol", 1e-6), equal_nan=True
        )


def dtype_choices(case):
    yield DEFAULT_DTYPES
    for name, dtypes in case.get("dtypes", {}).items():
        for dtype in dtypes:
            yield DEFAULT_DTYPES | {name: dtype}


@pytest.mark.parametrize("case", of("gae"))
def test_gae(case, backend):
    for dtypes in dtype_choices(case):
        inputs = Inputs(case, backend.device, dtypes)
        for boundary in gae_arguments(case, inputs):
            result = rlt.gae(
                inputs["rewards"],
                inputs["values"],
                boundary.pop("terminated"),
                **boundary,
                gamma=case["params"]["gamma"],
                lambda_=case["params"]["lam"],
                time_dim=inputs.time_dim,
            )
            check(case, result._asdict())


@pytest.mark.parametrize("case", of("scan"))
def test_scan(case, backend):
    inputs = Inputs(case, backend.device, {})
    y = rlt.affine_scan(
        inputs["b"],
        inputs["a"],
        initial=inputs.get("seed_values"),
        reverse=case["params"]["reverse"],
        time_dim=inputs.time_dim,
    )
    check(case, {"y": y})


def bootstrapped(case, inputs):
    """The case's boundary for an op that takes last_values, in both forms."""
    flags = dict(terminated=inputs["terminated"], truncated=inputs.get("truncated"))
    yield flags | dict(next_values=inputs["next_values"])
    values = inputs.get("values")
    if values is not None:
        cut = (inputs["terminated"] != 0) | (inputs["truncated"] != 0)
        shifted = values.narrow(inputs.time_dim, 1, values.shape[inputs.time_dim] - 1)
        kept = inputs["next_values"].narrow(inputs.time_dim, 0, shifted.shape[inputs.time_dim])
        if (shifted != kept)[~cut.narrow(inputs.time_dim, 0, shifted.shape[inputs.time_dim])].any():
            return  # its values of successors are not the values of the next rows
    last = inputs.rows("last_values")
    if last is None:
        last = inputs["next_values"].select(inputs.time_dim, -1)
    yield flags | dict(bootstrap_values=inputs["next_values"], last_values=last)


def parameter(x, inputs):
    return torch.tensor([x], device=inputs.device) if isinstance(x, list) else x


def common(case, inputs):
    options = dict(gamma=parameter(case["params"]["gamma"], inputs), time_dim=inputs.time_dim)
    return options | (dict(lambda_=case["params"]["lam"]) if "lam" in case["params"] else {})


@pytest.mark.parametrize("case", of("td_lambda", "discounted", "nstep"))
def test_returns(case, backend):
    for dtypes in dtype_choices(case):
        inputs = Inputs(case, backend.device, dtypes)
        for boundary in bootstrapped(case, inputs):
            terminated = boundary.pop("terminated")
            options = boundary | common(case, inputs)
            if case["algorithm"] == "td_lambda":
                returns = rlt.td_lambda_returns(inputs["rewards"], inputs["values"], terminated, **options)
            elif case["algorithm"] == "discounted":
                returns = rlt.discounted_returns(inputs["rewards"], terminated, **options)
            else:
                values = inputs["values"] if "next_values" not in boundary else None
                n = case["params"]["n"]
                returns = rlt.n_step_returns(inputs["rewards"], terminated, n=n, values=values, **options)
            check(case, {"returns": returns})


@pytest.mark.parametrize("case", of("vtrace"))
def test_vtrace(case, backend):
    inputs = Inputs(case, backend.device, DEFAULT_DTYPES)
    target, behavior = inputs["target_log_probs"], inputs["behavior_log_probs"]
    bars = {name: case["params"][name] for name in ("rho_bar", "c_bar", "pg_rho_bar") if name in case["params"]}
    for ratios in (dict(log_rhos=target - behavior), dict(target_log_probs=target, behavior_log_probs=behavior)):
        for boundary in bootstrapped(case, inputs):
            terminated = boundary.pop("terminated")
            options = boundary | common(case, inputs) | bars | ratios
            result = rlt.vtrace(inputs["rewards"], inputs["values"], terminated, **options)
            check(case, {"vs": result.targets, "pg_advantages": result.advantages})


@pytest.mark.parametrize("case", of("retrace"))
def test_retrace(case, backend):
    inputs = Inputs(case, backend.device, DEFAULT_DTYPES | {"actions": "int64"})
    pi, mu, actions = inputs["pi"], inputs["mu"], inputs["actions"]
    taken = actions[..., None]
    taken_pi, taken_mu = pi.gather(-1, taken)[..., 0], mu.gather(-1, taken)[..., 0]
    next_q, next_pi = inputs["next_q"], inputs["next_pi"]
    expectations = (
        dict(next_q_values=next_q, next_policy_probs=next_pi),
        dict(expected_next_q=(next_q * next_pi).sum(-1)),
    )
    ratios = (
        dict(log_rhos=(taken_pi / taken_mu).log()),
        dict(policy_probs=pi, behavior_probs=mu, actions=actions),
        dict(policy_probs=taken_pi, behavior_probs=taken_mu),
        dict(policy_probs=pi, behavior_probs=taken_mu, actions=actions.to(torch.int32)),
    )
    bars = {name: case["params"][name] for name in ("rho_bar", "c_bar") if name in case["params"]}
    for expectation in expectations:
        for ratio in ratios:
            options = common(case, inputs) | expectation | ratio | bars | dict(truncated=inputs["truncated"])
            result = rlt.retrace(inputs["rewards"], inputs["q"], inputs["terminated"], **options)
            check(case, {"q_targets": result.targets, "advantages": result.advantages})


@pytest.mark.parametrize("case", of("eligibility"))
def test_eligibility_traces(case, backend):
    inputs = Inputs(case, backend.device, {"dones": "bool"})
    traces = rlt.eligibility_traces(inputs["gradients"], inputs["dones"], **common(case, inputs))
    check(case, {"traces": traces})


@pytest.mark.parametrize("case", of("prefix_sum"))
def test_episodic_cumsum(case, backend):
    inputs = Inputs(case, backend.device, {"flags": "bool"})
    flags_at = {"ends_at": "end", "starts_at": "start"}[case["params"]["boundary"]]
    sums = rlt.episodic_cumsum(
        inputs["inputs"],
        inputs["flags"],
        initial=inputs.get("seed_values"),
        flags_at=flags_at,
        time_dim=inputs.time_dim,
    )
    check(case, {"sums": sums})


@pytest.mark.parametrize("case", of("normalize"))
def test_normalize_advantages(case, backend):
    inputs = Inputs(case, backend.device, {"valid": "bool"})
    options = {name: case["params"][name] for name in ("unbiased", "eps")}
    normalized = rlt.normalize_advantages(inputs["x"], valid=inputs["valid"], **options)
    if case["id"] == "nor-01":  # of its two accepted answers ours is 0
        case = case | {"expected": case["alternatives"][0]}
    check(case, {"normalized": normalized})


def test_every_case_is_run():
    """A case of an algorithm that nothing above runs would pass unseen."""
    run = {"gae", "scan", "td_lambda", "discounted", "nstep", "vtrace", "retrace"}
    run |= {"eligibility", "prefix_sum", "normalize"}
    assert {case["algorithm"] for case in CASES} == run
