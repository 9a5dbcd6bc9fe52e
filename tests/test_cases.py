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


def test_every_case_is_run():
    """A case of an algorithm that nothing above runs would pass unseen."""
    run = {"gae", "scan"}
    later = {"td_lambda", "discounted", "nstep", "vtrace", "retrace", "eligibility", "prefix_sum", "normalize"}
    assert {case["algorithm"] for case in CASES} == run | later
