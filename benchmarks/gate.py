"""Results are compared before anything is timed."""

from __future__ import annotations

import torch

from benchmarks.baselines import Prepared, Results, select
from benchmarks.baselines.scans import SCANS
from benchmarks.cases import Arguments, Case, tensors
from rl_triton import reference

# Relative to the RMS of the expected results. Baselines' vectorised forms round more than a loop; a wrong episode end
# is off by far more.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
ROWS = 8
LONGEST_LOOP = 8192  # beyond, a Python loop takes longer than all that is timed


class GateError(Exception):
    """A result is wrong; the message says where."""


class Gate:
    """Float64 results of some rows of a case, by the plain loop of rl_triton.reference (`against`: "reference"). Where
    T is larger than 8192, and for normalisation, by the vectorised float64 form ("float64 scan"), which the tests
    compare with that loop."""

    def __init__(self, case: Case, arguments: Arguments) -> None:
        self.case = case
        self.rows = torch.linspace(0, case.shape.rows - 1, min(ROWS, case.shape.rows)).long().unique()
        self.tolerance = TOLERANCES[case.dtype]
        normalises = case.op.name == "normalize_advantages"
        self.against = "reference" if case.shape.steps <= LONGEST_LOOP and not normalises else "float64 scan"
        if self.against == "reference":
            chosen = select(case, arguments, self.rows)
            self.expected = tensors(getattr(reference, case.op.name)(**chosen, time_dim=case.time_dim))
            return
        if not normalises:  # whose statistics are over all rows
            arguments = select(case, arguments, self.rows)
        wide = {k: x.double() if _is_float(x) else x for k, x in arguments.items()}
        results = tensors(SCANS[case.op.name](**wide, dim=case.time_dim))
        self.expected = tuple(self._some_rows(x) for x in results) if normalises else results

    def _some_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0 if self.case.layout == "NT" else 1, self.rows.to(x.device)).cpu()

    def check(self, prepared: Prepared) -> dict[str, float]:
        """One call; the largest and the RMS error, relative to the RMS of what is expected. Raises GateError."""
        results = prepared.results(prepared.calls[0]())
        expected = self.expected if prepared.expected is None else prepared.expected(self.rows)
        names = prepared.outputs
        if len(results) != len(names):
            raise GateError(f"{len(results)} results, not {', '.join(names)}")
        errors = [self._compare(*each) for each in zip(names, results, expected, strict=True)]
        if prepared.out_calls is not None:
            self._same_in_out(prepared, results)
        return {"max_error": max(e for e, _ in errors), "rms_error": max(e for _, e in errors)}

    def _compare(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
        if not bool(actual.isfinite().all()):
            raise GateError(f"{name}: not finite everywhere")
        got = self._some_rows(actual).double()
        if got.shape != expected.shape:
            raise GateError(f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
        error, scale = (got - expected).abs(), expected.square().mean().sqrt().clamp(min=1e-30)
        largest, rms = (error.max() / scale).item(), (error.square().mean().sqrt() / scale).item()
        if not largest <= self.tolerance:
            raise GateError(f"{name}: error {largest:.3g} of the results' RMS, allowed {self.tolerance:g}")
        return largest, rms

    def _same_in_out(self, prepared: Prepared, results: Results) -> None:
        """Into tensors full of NaN: every element is written, with the same bits."""
        again = prepared.results(prepared.out_calls[0]())
        for name, x, y in zip(prepared.outputs, results, again, strict=True):
            if not torch.equal(x, y):
                raise GateError(f"{name}: out= holds other bits than a plain call gives")


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
