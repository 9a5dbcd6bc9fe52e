"""Where an episode ends, what lies beyond, and which rows are no transition at all.

A window holds T steps of independent rows. Step t goes from s_t to s'_t, its true successor: the final observation
where the episode ended, never the observation after an automatic reset.

    terminated[t]        s'_t is terminal: its value is 0 and is never read
    truncated[t]         the episode was cut after step t though s'_t is not terminal
    bootstrap_values[t]  V(s'_t), read only where truncated and not terminated
    last_values          V(s') of the open window edge, one per row
    next_values[t]       V(s'_t) for every t, in place of the two above and of the shift of `values`
    valid[t]             0 where the row is no transition: padding, a reset row, a dead agent, a tool token

    cut[t] = terminated or truncated;  v'[t] = 0 if terminated, else next_values[t] if given,
    else bootstrap_values[t] if truncated, else values[t+1], or last_values at the edge.

Invalid rows are skipped: everything on them but their flags is ignored, their results are 0, and t+1 is the next valid
row. Flags are read on every row: the first flagged row from t up to, not including, the next valid row cuts t and
decides its value. The last valid row is the window's edge. A masked-out NaN or inf is selected away, never multiplied
by zero.

`Successors` is the validated description that both backends read; the kernel form of the rules is here, the CPU form
in `_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rl_triton import _checks
from rl_triton._algorithm import Expectation
from rl_triton._scan import load, load_flag, pick
from rl_triton._triton import jit, tl


class Successors(NamedTuple):
    """Boundaries of a scan that runs backward in time. Absent tensors are None; the order is the kernel's."""

    last_values: torch.Tensor | None
    """V(s') of the window's edge, one per row; None is zero."""
    terminated: torch.Tensor
    """End flags, or start flags where `last_done` is given."""
    truncated: torch.Tensor | None
    bootstrap_values: torch.Tensor | None
    next_values: Any
    """A tensor or an `Expectation`."""
    values: torch.Tensor | None
    """V(s_t), the source of V(s'_t) = values[t+1] where the episode goes on; None where no op reads it."""
    valid: torch.Tensor | None
    last_done: torch.Tensor | None
    """Given: `terminated[t]` says that row t starts an episode, so it ends row t-1; this ends the last row."""

    @property
    def start(self) -> bool:
        return self.last_done is not None


class Resets(NamedTuple):
    """Boundaries of a scan that runs forward in time."""

    last_values: None
    """Nothing lies beyond the edge but `initial`; the slot is where the kernel looks for a value."""
    done: torch.Tensor
    valid: torch.Tensor | None
    start: bool
    """`done[t]` says that row t starts an episode, not that it ends one."""


class Unbounded(NamedTuple):
    """No boundaries: the recurrence as it is written. (The slot is where the kernel looks for the edge's value.)"""

    last_values: None = None
    start: bool = False
    valid: None = None


# Kinds of what follows a row: the window's edge, a valid row, or a flag on a row that is no transition.
_EDGE = tl.constexpr(0) if tl is not None else 0
_VALID = tl.constexpr(1) if tl is not None else 1
_ENDED = tl.constexpr(2) if tl is not None else 2


@jit
def flagged_rows(
    boundary,
    sizes,
    rows,
    row_mask,
    t,
    T,
    START: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Whether row t carries a flag, and V(s'_t) if so: 0 where terminated, its bootstrap where truncated."""
    last_values, terminated, truncated, bootstrap_values, next_values, values, valid, last_done, _ = boundary
    if not START:
        ended = load_flag(terminated, sizes, rows, t, row_mask & (t < T), DIMS)
    else:
        started_after = load_flag(terminated, sizes, rows, t + 1, row_mask & (t + 1 < T), DIMS)
        ended = started_after | load_flag(last_done, sizes, rows, t, row_mask & (t + 1 == T), DIMS)
    if truncated is not None:
        cut_short = load_flag(truncated, sizes, rows, t, row_mask & (t < T), DIMS) & (ended == 0)
        if bootstrap_values is not None:
            value = load(bootstrap_values, sizes, rows, t, cut_short, DIMS, DTYPE)
        else:
            value = load(next_values, sizes, rows, t, cut_short, DIMS, DTYPE, NEXT_KIND)
        ended = ended | cut_short
    else:
        value = tl.where(ended, 0.0, 0.0).to(DTYPE)
    return ended, value


@jit
def _latest(kind_first, value_first, kind_then, value_then):
    """What follows a row, given what follows the next one: the nearest row that has something to say."""
    silent = kind_then == _EDGE
    return tl.where(silent, kind_first, kind_then), tl.where(silent, value_first, value_then)


@jit
def successors(
    boundary,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    t,
    mask,
    exit_column,
    T,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The boundary rules on one tile.

    Returns, as tiles: valid; cut; v_next, the value v' of the successor; v_follow, V of the next valid row (v_next at
    the edge); reset and reset_value, the invalid rows that carry a flag and what lies beyond them; and, one per row,
    the kind and value that the tile before will see.
    CLOSED: nothing is scanned in from beyond the edge, so the edge cuts.
    """
    last_values, terminated, truncated, bootstrap_values, next_values, values, valid_flags, last_done, _ = boundary
    flagged, flag_value = flagged_rows(boundary, sizes, rows, row_mask, t, T, START, NEXT_KIND, DIMS, DTYPE)
    inside = row_mask & (t + 1 < T)

    if valid_flags is None:
        valid = mask
        at_edge = t == T - 1
        v_follow = tl.where(at_edge & mask, value_beyond, 0.0)
        if values is not None:
            v_follow = tl.where(at_edge, value_beyond, load(values, sizes, rows, t + 1, inside, DIMS, DTYPE))
        cut = flagged
        reset = flagged & (t < 0)
    else:
        valid = load_flag(valid_flags, sizes, rows, t, mask, DIMS)
        valid_after = load_flag(valid_flags, sizes, rows, t + 1, inside, DIMS)
        flagged_after, value_after = flagged_rows(
            boundary, sizes, rows, row_mask, t + 1, T, START, NEXT_KIND, DIMS, DTYPE
        )
        kind = tl.where(valid_after, _VALID, tl.where(flagged_after, _ENDED, _EDGE))
        if values is not None:
            v_after = load(values, sizes, rows, t + 1, inside & valid_after, DIMS, DTYPE)
            value_after = tl.where(valid_after, v_after, value_after)
        kind, value = tl.associative_scan((kind, value_after), 1, _latest, reverse=True)
        value = tl.where(kind == _EDGE, value_beyond, value)
        kind = tl.where(kind == _EDGE, kind_beyond, kind)
        kind_beyond = pick(kind, exit_column)
        value_beyond = pick(value, exit_column)
        at_edge = kind == _EDGE
        v_follow = value
        cut = flagged | (kind == _ENDED)
        reset = flagged & mask & (valid == 0)

    v_open = v_follow
    if next_values is not None:
        v_open = tl.where(cut, v_open, load(next_values, sizes, rows, t, mask & (cut == 0), DIMS, DTYPE, NEXT_KIND))
        v_follow = tl.where(at_edge, v_open, v_follow)
    v_next = tl.where(flagged, flag_value, v_open)
    if CLOSED:
        cut = cut | at_edge
    return valid, cut, v_next, v_follow, reset, flag_value, kind_beyond, value_beyond


@jit
def resets(
    boundary,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    t,
    mask,
    exit_column,
    T,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The boundary rules of a scan that runs forward: a flag resets the state before the step after it ("end" flags)
    or before its own step ("start" flags), on rows that are no transition too."""
    last_values, done, valid_flags, start, _ = boundary
    if START:
        cut = load_flag(done, sizes, rows, t, mask, DIMS)
    else:
        cut = load_flag(done, sizes, rows, t - 1, mask & (t > 0), DIMS)
    if valid_flags is None:
        valid = mask
        reset = mask & (t < 0)
    else:
        valid = load_flag(valid_flags, sizes, rows, t, mask, DIMS)
        reset = cut & mask & (valid == 0)
    nothing = tl.where(mask, 0.0, 0.0).to(DTYPE)
    return valid, cut, nothing, nothing, reset, nothing, kind_beyond, value_beyond


@jit
def unbounded(
    boundary,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    t,
    mask,
    exit_column,
    T,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """No boundaries but the edge of the window, where a scan without an initial state begins."""
    nothing = tl.where(mask, 0.0, 0.0).to(DTYPE)
    never = mask & (t < 0)
    cut = never
    if CLOSED:
        if REVERSE:
            cut = mask & (t == T - 1)
        else:
            cut = mask & (t == 0)
    return mask, cut, nothing, nothing, never, nothing, kind_beyond, value_beyond


def starts(op: str, flags_at: Any) -> bool:
    """Whether flags mark the step that starts an episode, not the one that ends it."""
    if flags_at not in ("end", "start"):
        raise ValueError(f"{op}: flags_at must be 'end' or 'start', got {flags_at!r}")
    return flags_at == "start"


def check_successors(
    op: str,
    rewards: torch.Tensor,
    time_dim: int,
    terminated: Any,
    *,
    values: torch.Tensor | None,
    truncated: Any,
    bootstrap_values: Any,
    last_values: Any,
    next_values: Any,
    valid: Any,
    flags_at: Any,
    last_done: Any,
) -> Successors:
    """Validate the boundary arguments of a backward op. Raises ValueError or TypeError; reads no device data."""
    if starts(op, flags_at):
        if truncated is not None or bootstrap_values is not None:
            given = "truncated" if truncated is not None else "bootstrap_values"
            raise ValueError(
                f"{op}: {given} was given with flags_at='start', where one merged flag says that a row starts an "
                "episode. Pass end flags instead: done[t] = start[t+1], and last_done for the last step, split into "
                "terminated and truncated"
            )
        if last_done is None:
            raise ValueError(
                f"{op}: flags_at='start' needs last_done, one flag per row: whether the last step ended an episode. "
                "To use end flags, pass done[t] = start[t+1] with flags_at='end'"
            )
    elif last_done is not None:
        raise ValueError(
            f"{op}: last_done was given with flags_at='end', where terminated[t] already says whether step t ended an "
            "episode. Pass flags_at='start' if the flags say that a row starts one"
        )
    if bootstrap_values is not None and next_values is not None:
        raise ValueError(f"{op}: bootstrap_values and next_values exclude each other; next_values already holds both")
    if bootstrap_values is not None and truncated is None:
        raise ValueError(f"{op}: bootstrap_values needs truncated, the flags of the steps where it is read")
    if truncated is not None and bootstrap_values is None and next_values is None:
        raise ValueError(
            f"{op}: truncated was given without the value of the final observations; pass bootstrap_values (V(s'_t) "
            "where truncated) or next_values (V(s'_t) for every step)"
        )
    if last_values is _checks.REQUIRED:
        if next_values is None:
            raise ValueError(
                f"{op}: the window's edge needs a value: pass last_values (V of the observation after the last step, "
                "one per row) or next_values; last_values=None says that it is zero"
            )
        last_values = None

    def per_step(name: str, x: Any, check: Callable[[str, str, Any], torch.Tensor]) -> torch.Tensor | None:
        if x is not None:
            _checks.like(op, name, check(op, name, x), "rewards", rewards, time_dim)
        return x

    def per_row(name: str, x: Any, check: Callable[[str, str, Any], torch.Tensor]) -> torch.Tensor | None:
        if x is not None:
            _checks.per_row(op, name, check(op, name, x), "rewards", rewards, time_dim)
        return x

    _checks.like(op, "terminated", _checks.flags(op, "terminated", terminated), "rewards", rewards, time_dim)
    return Successors(
        last_values=per_row("last_values", last_values, _checks.real),
        terminated=terminated,
        truncated=per_step("truncated", truncated, _checks.flags),
        bootstrap_values=per_step("bootstrap_values", bootstrap_values, _checks.real),
        next_values=next_values
        if isinstance(next_values, Expectation)
        else per_step("next_values", next_values, _checks.real),
        values=values,
        valid=per_step("valid", valid, _checks.flags),
        last_done=per_row("last_done", last_done, _checks.flags),
    )
