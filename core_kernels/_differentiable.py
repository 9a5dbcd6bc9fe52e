"""The estimators as differentiable tensor expressions around the scan: what `differentiable=True` runs.

This is the skeleton of `_scan.py` once more, on whole tensors instead of tiles: read the inputs, resolve the
boundaries, form (α, β), scan, form the results. Autograd follows the elementwise lines, `_autograd.py` the scan, so
every input has its gradient, and a second one. Reading is by `torch.where`, so what the forward pass does not read has
a gradient of exactly 0, and is free to hold NaN. Nothing loops over time in Python or waits for the device.

Memory is a small multiple of the inputs, for the graph; an n-step window keeps that multiple log2(n) times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from rl_triton import _plan
from rl_triton._algorithm import Algorithm, Expectation, Taken
from rl_triton._autograd import clipped, exponential, joined, one_scan, quotient, scaled, scan
from rl_triton.boundaries import Resets, Successors

Factor = float | torch.Tensor
_EDGE, _VALID, _ENDED = 0, 1, 2  # what follows a row, as in boundaries.py


class _Call(NamedTuple):
    """What the functions below share: the shape of every per-step tensor, its time axis, the arithmetic."""

    shape: torch.Size
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def n_steps(self) -> int:
        return self.shape[self.dim]

    def zeros(self, *, rows: bool = False) -> torch.Tensor:
        shape = (*self.shape[: self.dim], *self.shape[self.dim + 1 :]) if rows else self.shape
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def per_row(self, x: torch.Tensor | None) -> torch.Tensor:
        return self.zeros(rows=True) if x is None else x.to(self.dtype)

    def steps(self) -> torch.Tensor:
        """t, of every per-step entry."""
        t = torch.arange(self.n_steps, device=self.device)
        return t.reshape([-1 if d == self.dim else 1 for d in range(len(self.shape))]).expand(self.shape)

    def read(self, source: Any, valid: torch.Tensor | None = None) -> torch.Tensor:
        """A per-step tensor in the arithmetic dtype; 0 on rows that are no transition."""
        if isinstance(source, Expectation):
            x = scaled(source.probs.to(self.dtype), source.values.to(self.dtype)).sum(-1)
        elif isinstance(source, Taken):
            actions = source.actions.long()
            if valid is not None:
                actions = torch.where(valid, actions, 0)
            x = source.table.gather(-1, actions.unsqueeze(-1)).squeeze(-1).to(self.dtype)
        else:
            x = source.to(self.dtype)
        return x if valid is None else torch.where(valid, x, 0.0)

    def following(self, x: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        """Each row's neighbour one step later; `beyond` for the last."""
        return joined(beyond, x.narrow(self.dim, 1, self.n_steps - 1), self.dim, in_front=False)

    def passed_on(self, x: torch.Tensor, known: torch.Tensor, beyond: torch.Tensor) -> torch.Tensor:
        """x where it is known, else that of the nearest later row where it is: a scan whose maps are x and identity."""
        own = torch.where(known, x, 0.0)
        return scan(own, torch.where(known, 0.0, 1.0).to(self.dtype), beyond, self.dim, reverse=True)


class _Bounds(NamedTuple):
    """The boundary rules on a whole window; the names are those of `boundaries.successors`."""

    valid: torch.Tensor | None
    cut: torch.Tensor
    v_next: torch.Tensor
    v_follow: torch.Tensor
    reset: torch.Tensor
    reset_value: torch.Tensor


def _successors(call: _Call, b: Successors, closed: bool) -> _Bounds:
    flagged = b.terminated.bool()
    if b.last_done is not None:
        flagged = call.following(flagged, b.last_done.bool())
    next_values: Any = None if b.next_values is None else call.read(b.next_values)
    flag_value = call.zeros()
    if b.truncated is not None:
        cut_short = b.truncated.bool() & ~flagged
        beyond = next_values if b.bootstrap_values is None else call.read(b.bootstrap_values)
        flag_value = torch.where(cut_short, beyond, flag_value)
        flagged = flagged | cut_short
    edge_value = call.per_row(b.last_values)
    values = call.zeros() if b.values is None else call.read(b.values)

    if b.valid is None:
        valid, cut = None, flagged
        at_edge = call.steps() == call.n_steps - 1
        reset = torch.zeros_like(flagged)
        v_follow = call.following(values, edge_value)
    else:
        valid = b.valid.bool()
        nothing = torch.zeros_like(flagged.select(call.dim, 0))
        reset = flagged & ~valid
        known = call.following(valid | flagged, nothing)
        v_follow = call.passed_on(call.following(torch.where(valid, values, flag_value), edge_value), known, edge_value)
        kind = torch.where(call.following(reset, nothing), float(_ENDED), float(_VALID)).to(call.dtype)
        kind = call.passed_on(kind, known, call.per_row(None))
        at_edge = kind == _EDGE
        cut = flagged | (kind == _ENDED)

    v_open = v_follow
    if next_values is not None:
        v_open = torch.where(cut, v_open, next_values)
        v_follow = torch.where(at_edge, v_open, v_follow)
    v_next = torch.where(flagged, flag_value, v_open)
    return _Bounds(valid, cut | at_edge if closed else cut, v_next, v_follow, reset, flag_value)


def _resets(call: _Call, b: Resets) -> _Bounds:
    cut = b.done.bool()
    if not b.start:
        before = torch.zeros_like(cut.select(call.dim, 0))
        cut = joined(before, cut.narrow(call.dim, 0, call.n_steps - 1), call.dim, in_front=True)
    valid = None if b.valid is None else b.valid.bool()
    nothing = call.zeros()
    reset = torch.zeros_like(cut) if valid is None else cut & ~valid
    return _Bounds(valid, cut, nothing, nothing, reset, nothing)


def _unbounded(call: _Call) -> _Bounds:
    nothing, never = call.zeros(), torch.zeros(call.shape, dtype=torch.bool, device=call.device)
    return _Bounds(None, never, nothing, nothing, never, nothing)


# ------------------------------------------------------------------------------------------- the estimators' equations


class _Forms(NamedTuple):
    """An `Algorithm` on tensors; the arguments are those of its kernel forms."""

    coefficients: Callable[..., tuple[torch.Tensor, Factor]]
    outputs: Callable[..., tuple[torch.Tensor, ...]]
    beyond: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
    target: Callable[..., torch.Tensor] | None = None


def _state_alone(x, state, ahead, f, variant):
    return (state,)


def _gae_coefficients(x, v_next, cut, f, variant):
    return (x[0] + scaled(f[0], v_next)) - x[1], f[2]


def _gae_outputs(x, state, ahead, f, variant):
    return state, state + x[1]


def _td_lambda_coefficients(x, v_next, cut, f, variant):
    gamma, lambda_, decay = f[:3]
    if variant[0] == "floats":
        weight = torch.where(cut, x[0].new_full((), gamma), x[0].new_full((), f[3]))
    else:  # λ is not read at a cut
        weight = torch.where(cut, 1.0, 1.0 - lambda_ + torch.zeros_like(x[0])) * gamma
    return x[0] + scaled(weight, v_next), decay


def _discounted_coefficients(x, v_next, cut, f, variant):
    return x[0] + torch.where(cut, scaled(f[0], v_next), 0.0), f[0]


def _ratio_of_logs(x, variant):
    return exponential(x[2] if variant[0] == "log_rhos" else x[2] - x[3])


def _vtrace_coefficients(x, v_next, cut, f, variant):
    gamma, lambda_, rho_bar, c_bar, _ = f
    w = _ratio_of_logs(x, variant)
    delta = (x[0] + scaled(gamma, v_next)) - x[1]
    return scaled(clipped(w, rho_bar), delta), scaled(gamma, scaled(lambda_, clipped(w, c_bar)))


def _vtrace_outputs(x, state, ahead, f, variant):
    v_next, v_follow, cut, state_next, _ = ahead
    target_next = torch.where(cut, v_next, v_follow + state_next)
    advantage = (x[0] + scaled(f[0], target_next)) - x[1]
    return x[1] + state, scaled(clipped(_ratio_of_logs(x, variant), f[4]), advantage)


def _retrace_ratio(x, variant):
    if variant[0] == "log_rhos":
        return exponential(x[2])
    return quotient(x[2], x[3]) if variant[0] == "probs" else torch.ones_like(x[0])


def _retrace_coefficients(x, v_next, cut, f, variant):
    gamma, lambda_, c_bar, _ = f
    source, trace = variant
    if trace == "retrace":
        c = scaled(lambda_, clipped(_retrace_ratio(x, variant), c_bar))
    elif trace == "tree_backup":
        c = scaled(lambda_, x[3] if source == "log_rhos" else x[2])
    elif trace == "importance_sampling":
        c = _retrace_ratio(x, variant)
    else:
        c = torch.zeros_like(x[0]) + lambda_
    delta = (x[0] + scaled(gamma, v_next)) - x[1]
    return scaled(c, delta), scaled(gamma, c)


def _retrace_target(x, v_next, cut, state_next, f, variant):
    delta = (x[0] + scaled(f[0], v_next)) - x[1]
    return x[1] + (delta + torch.where(cut, 0.0, scaled(f[0], state_next)))


def _retrace_outputs(x, state, ahead, f, variant):
    v_next, _, cut, state_next, target_next = ahead
    advantage = (x[0] + scaled(f[0], torch.where(cut, v_next, target_next))) - x[1]
    target = _retrace_target(x, v_next, cut, state_next, f, variant)
    return target, scaled(clipped(_retrace_ratio(x, variant), f[3]), advantage)


def _trace_coefficients(x, v_next, cut, f, variant):
    if variant[0] == "accumulating":
        return x[0], f[2]
    # The formula is not continuous at x = 0: the branch that is taken there does not depend on x.
    # A tensor for the decay too: of two numbers the result would have the default dtype.
    return torch.where(x[0] != 0, x[0], 0.0), torch.where(x[0] != 0, 0.0, f[2] + torch.zeros_like(x[0]))


def _first_factor(x, v_next, cut, f, variant):
    return x[0], f[0]


def _same(v: torch.Tensor) -> torch.Tensor:
    return v


_FORMS = {
    "affine_scan": _Forms(_first_factor, _state_alone),
    "discounted_returns": _Forms(_discounted_coefficients, _state_alone, beyond=_same),
    "eligibility_traces": _Forms(_trace_coefficients, _state_alone),
    "episodic_cumsum": _Forms(_first_factor, _state_alone),
    "gae": _Forms(_gae_coefficients, _gae_outputs),
    "n_step_returns": _Forms(_discounted_coefficients, _state_alone, beyond=_same),
    "retrace": _Forms(_retrace_coefficients, _retrace_outputs, target=_retrace_target),
    "td_lambda_returns": _Forms(_td_lambda_coefficients, _state_alone, beyond=_same),
    "vtrace": _Forms(_vtrace_coefficients, _vtrace_outputs),
}


# -------------------------------------------------------------------------------------------------------- the skeleton


def estimate(
    algorithm: Algorithm,
    dim: int,
    *,
    like: torch.Tensor,
    inputs: Mapping[str, Any],
    factors: Mapping[str, Factor | None],
    boundary: Any,
    carry: tuple[torch.Tensor | None, torch.Tensor | None],
    return_carry: bool,
    dtype: torch.dtype,
    arithmetic: torch.dtype,
    window: int | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """What `_run.estimate` returns, with its graph. The arguments are checked."""
    forms, variant = _FORMS[algorithm.name], algorithm.variant
    call = _Call(like.shape, dim, arithmetic, like.device)
    closed = carry[0] is None
    initial = forms.beyond(call.per_row(getattr(boundary, "last_values", None))) if closed else call.per_row(carry[0])
    target_beyond = call.per_row(carry[1])
    if like.numel() == 0:
        given = (*inputs.values(), *factors.values(), *boundary, *carry)
        return _empty(forms, given, like, dtype, (initial, target_beyond), return_carry)

    if algorithm.name == "affine_scan":
        return (_bare_scan(call, inputs["alpha"], factors["beta"], carry[0], algorithm.reverse, dtype),), (None, None)

    if isinstance(boundary, Successors):
        bounds = _successors(call, boundary, closed)
    else:
        bounds = _resets(call, boundary) if isinstance(boundary, Resets) else _unbounded(call)
    valid, cut, v_next, v_follow, reset, reset_value = bounds
    x = tuple(call.read(source, valid) for source in inputs.values())
    f: list[Any] = []
    for factor in factors.values():
        if factor is None:  # the product of γ and λ; a cut does not read λ
            f.append(torch.where(cut, 0.0, f[1] + call.zeros()) * f[0])
        else:
            f.append(call.read(factor, valid) if isinstance(factor, torch.Tensor) else factor)

    alpha, beta = forms.coefficients(x, v_next, cut, f, variant)
    if not isinstance(beta, torch.Tensor):
        beta = alpha.new_full((), beta).expand(alpha.shape)
    beta = torch.where(cut, 0.0, beta)
    if window is not None:
        one_step = x[0] + scaled(f[0], v_next)
        ahead = _look_ahead(call, alpha, beta, valid, one_step, window)
        return (_stored(ahead, valid, dtype),), (None, None)

    if valid is not None:  # a row that is no transition passes the state on; one that carries a flag replaces it
        alpha = torch.where(valid, alpha, torch.where(reset, forms.beyond(reset_value), 0.0))
        beta = torch.where(valid, beta, torch.where(reset, 0.0, 1.0))
    if forms.target is not None:  # results read the state of the row after, not their own
        read = _read_by_the_row_before(call, valid, cut, reset, return_carry)
        alpha, beta = torch.where(read, alpha, 0.0), torch.where(read, beta, 0.0)
    edgeless = closed and not isinstance(boundary, (Successors, Resets))
    state = scan(alpha, beta, None if edgeless else initial, dim, algorithm.reverse)
    state_next = call.following(state, initial) if algorithm.lookahead >= 1 else state
    target = target_next = None
    if forms.target is not None:
        target = forms.target(x, v_next, cut, state_next, f, variant)
        if valid is not None:
            target = call.passed_on(torch.where(valid, target, reset_value), valid | reset, target_beyond)
        target_next = call.following(target, target_beyond)
    results = forms.outputs(x, state, (v_next, v_follow, cut, state_next, target_next), f, variant)

    final: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if return_carry:  # copies, so that whoever writes to a carry does not write to a result
        at = 0 if algorithm.reverse else -1
        final = (state.select(dim, at).clone(), None if target is None else target.select(dim, at).clone())
    return tuple(_stored(y, valid, dtype) for y in results), final


def _bare_scan(
    call: _Call, alpha: torch.Tensor, beta: Any, initial: torch.Tensor | None, reverse: bool, dtype: torch.dtype
) -> torch.Tensor:
    """`affine_scan`: one node, and a plan for the next call, where all tensors are of the dtype of the arithmetic."""
    given = call.read(alpha), beta, initial if initial is None else call.per_row(initial), call.dim, reverse
    if isinstance(beta, torch.Tensor):
        given = given[0], call.read(beta), *given[2:]
        _plan.record(_plan.Node(one_scan, given))
    return _stored(scan(*given), None, dtype)


def _read_by_the_row_before(
    call: _Call, valid: torch.Tensor | None, cut: torch.Tensor, reset: torch.Tensor, first: bool
) -> torch.Tensor:
    """Whether a row's state goes into anything. That of the first row does if it is returned."""
    dim = call.dim
    into = ~cut
    edge = torch.full_like(into.select(dim, 0), first)
    if valid is not None:  # a row that is no transition passes the state on to whoever reads its own
        passes = torch.where(valid | reset, 0.0, 1.0).to(call.dtype)
        into = scan((valid & into).to(call.dtype), passes, edge.to(call.dtype), dim, reverse=False) > 0
    return joined(edge, into.narrow(dim, 0, call.n_steps - 1), dim, in_front=True)


def _stored(y: torch.Tensor, valid: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (y if valid is None else torch.where(valid, y, 0.0)).to(dtype)


def _empty(forms, given, like, dtype, beyond, return_carry):
    """No elements: empty results whose graph reaches every tensor, and what is scanned in comes out."""
    nothing = torch.zeros(like.shape, dtype=dtype, device=like.device)
    for source in given:
        for x in (source,) if isinstance(source, torch.Tensor) else source if isinstance(source, tuple) else ():
            if x.dtype.is_floating_point:
                nothing = nothing + x.sum().to(dtype)
    n_results = 1 if forms.outputs is _state_alone else 2
    state, target = (x.clone() for x in beyond)
    final = (state, None if forms.target is None else target) if return_carry else (None, None)
    return tuple(nothing.clone() for _ in range(n_results)), final


def _look_ahead(
    call: _Call,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    valid: torch.Tensor | None,
    one_step: torch.Tensor,
    n: int,
) -> torch.Tensor:
    """G[t], n steps or fewer from t: the maps of n-1 steps, composed by doubling, of the n-th's one-step return.

    An entry is a window of some steps that begins at t: its map (a, b) and the row that follows it. Where a cut or the
    edge comes first b is 0, so what follows is not read.
    """
    dim = call.dim
    after = call.steps() + 1
    if valid is not None:
        here = torch.where(valid, call.steps(), call.n_steps)
        nearest = here.flip(dim).cummin(dim).values.flip(dim)
        after = call.following(nearest, torch.full_like(nearest.select(dim, 0), call.n_steps))
    after = after.clamp(max=call.n_steps - 1)

    def then(first, second):
        a, b, row = first
        a_then, b_then, row_then = (x.gather(dim, row) for x in second)
        return a + scaled(b, a_then), scaled(b, b_then), row_then

    doubled, steps, left = (alpha, beta, after), None, n - 1
    while left:
        if left & 1:
            steps = doubled if steps is None else then(steps, doubled)
        left >>= 1
        if left:
            doubled = then(doubled, doubled)
    if steps is None:
        return one_step
    a, b, row = steps
    return a + scaled(b, one_step.gather(dim, row))
