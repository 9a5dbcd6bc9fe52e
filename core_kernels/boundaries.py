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
from rl_triton._tile import address, load, load_expected, load_flag, load_steps, steps_from, upcoming, within
from rl_triton._triton import constant, jit, tl


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


class Predecessors(NamedTuple):
    """The flags of `Successors`, met in the other direction: by the transpose of a scan, which runs forward.

    The state goes from step t-1 to step t unless t-1 is cut. What follows a step decides where its gradient goes, so
    the rules say what that is, `EDGE` to `TRUNCATED`, in place of a value.
    """

    last_values: None
    """Nothing lies beyond the edge; the slot is where the kernel looks for a value."""
    terminated: torch.Tensor
    truncated: torch.Tensor | None
    last_done: torch.Tensor | None
    """Given: `terminated` are start flags."""
    valid: None = None

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


# Kinds of what follows a row: the window's edge, a valid row, or a flag on a row that is no transition. For
# `Predecessors` the flag is that of the row itself, and tells two kinds apart.
EDGE, VALID, ENDED, TRUNCATED = map(constant, range(4))


@jit
def flagged(boundary, ended, truncated, next_value, sizes, rows, t, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """Whether row t carries a flag, and V(s'_t) if so: 0 where it ended, its bootstrap where it was only truncated."""
    if boundary[2] is not None:
        cut_short = truncated & (ended == 0)
        if boundary[3] is not None:
            value = load(boundary[3], sizes, rows, t, cut_short, DIMS, DTYPE)
        else:
            value = tl.where(cut_short, next_value, 0.0)
        carries = ended | cut_short
    else:
        value = tl.where(ended, 0.0, 0.0).to(DTYPE)
        carries = ended
    return carries, value


@jit
def _latest(kind_first, value_first, kind_then, value_then):
    """What follows a row, given what follows the next one: the nearest row that has something to say."""
    silent = kind_then == EDGE
    return tl.where(silent, kind_first, kind_then), tl.where(silent, value_first, value_then)


@jit
def fetch_successors(
    boundary,
    inputs,
    x,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ACTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The flags; V(s_t), which as a rule is an input; V and the start flag of the step after each chunk; and last the
    values of all successors, where they are given. (Read on every row, and selected later: where they count is known
    from the flags, and who waits for those waits for memory twice.)"""
    t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
    past = row_mask & (t + STEPS < T)
    tiles = load_steps(boundary[1], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)
    if START:
        tiles = tiles + (tl.load(address(boundary[1], sizes, rows, t + STEPS, DIMS), mask=past, other=0),)
    if boundary[2] is not None:
        tiles = tiles + load_steps(
            boundary[2], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    if VALUES >= 0:
        tiles = tiles + (tl.load(address(inputs[VALUES], sizes, rows, t + STEPS, DIMS), mask=past, other=0),)
    elif boundary[5] is not None:
        tiles = tiles + (tl.load(address(boundary[5], sizes, rows, t + STEPS, DIMS), mask=past, other=0),)
        tiles = tiles + load_steps(
            boundary[5], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    if boundary[4] is not None and ACTIONS == 0:
        tiles = tiles + load_steps(
            boundary[4], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    elif boundary[4] is not None:
        tiles = tiles + load_expected(
            boundary[4], sizes, rows, row_mask, start, T, ACTIONS, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE,
            WHOLE,
        )  # fmt: skip
    return tiles


@jit
def successors(
    boundary,
    fetched,
    numbers,
    valid,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    start,
    place,
    T,
    HAS_GAPS: tl.constexpr,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The boundary rules on one tile.

    Returns, as a tile for each step of a chunk: cut; v_next, the value v' of the successor; v_follow, V of the next
    valid row (v_next at the edge); reset and reset_value, the invalid rows that carry a flag and what lies beyond them;
    and, one per row, the kind and value that the tile before will see.
    CLOSED: nothing is scanned in from beyond the edge, so the edge cuts.
    """
    TRUNCATED: tl.constexpr = STEPS + 1 if START else STEPS
    AFTER: tl.constexpr = TRUNCATED + STEPS if boundary[2] is not None else TRUNCATED
    HAS_VALUES: tl.constexpr = VALUES >= 0 or boundary[5] is not None
    NEXT: tl.constexpr = (AFTER + 1 + (0 if VALUES >= 0 else STEPS)) if HAS_VALUES else AFTER
    t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
    ended = ()
    if START:  # the flag of the next row, or that of the window's edge, ends a row
        last = load_flag(boundary[6], sizes, rows, tl.where(row_mask, 0, 0), row_mask, DIMS)
        for s in tl.static_range(STEPS):
            ended = ended + ((fetched[s + 1] != 0) | (last & (t + s == T - 1)),)
    else:
        for s in tl.static_range(STEPS):
            ended = ended + (fetched[s] != 0,)
    truncated = ended
    if boundary[2] is not None:
        truncated = ()
        for s in tl.static_range(STEPS):
            truncated = truncated + (fetched[TRUNCATED + s] != 0,)
    next_value = ()
    for s in tl.static_range(STEPS):
        next_value = next_value + (tl.zeros_like(numbers[s]) if boundary[4] is None else fetched[NEXT + s].to(DTYPE),)
    carries = ()
    flag_value = ()
    for s in tl.static_range(STEPS):
        carries_s, value_s = flagged(boundary, ended[s], truncated[s], next_value[s], sizes, rows, t + s, DIMS, DTYPE)
        carries = carries + (carries_s,)
        flag_value = flag_value + (value_s,)

    # V(s_t), and behind the last that of the step after the chunk.
    own = ()
    for s in tl.static_range(STEPS):
        if VALUES >= 0:
            own = own + (numbers[VALUES * STEPS + s],)
        elif boundary[5] is not None:
            own = own + (fetched[AFTER + 1 + s].to(DTYPE),)
        else:
            own = own + (flag_value[s],)  # nobody reads it
    if HAS_VALUES:
        own = own + (fetched[AFTER].to(DTYPE),)
    else:
        own = own + (flag_value[0],)

    at_edge = ()
    v_follow = ()
    ended_after = carries
    if HAS_GAPS:
        said_kind = ()
        said_value = ()
        known = ()
        for s in tl.static_range(STEPS):
            said_kind = said_kind + (tl.where(valid[s], VALID, ENDED),)
            said_value = said_value + (tl.where(valid[s], own[s], flag_value[s]),)
            known = known + (valid[s] | carries[s],)
        kinds, kind_beyond = upcoming(known, said_kind, kind_beyond, place, CHUNKS, STEPS, AXIS)
        v_follow, value_beyond = upcoming(known, said_value, value_beyond, place, CHUNKS, STEPS, AXIS)
        for s in tl.static_range(STEPS):
            at_edge = at_edge + (kinds[s] == EDGE,)
        ended_after = ()
        for s in tl.static_range(STEPS):
            ended_after = ended_after + (kinds[s] == ENDED,)
    else:
        for s in tl.static_range(STEPS):
            # The edge of a window of whole tiles is a chunk's last step.
            at_edge_s = t != t if WHOLE and s < STEPS - 1 else t + s == T - 1
            at_edge = at_edge + (at_edge_s,)
            v_follow = v_follow + (tl.where(at_edge_s, value_beyond, own[s + 1]),)

    cut = ()
    v_next = ()
    follow = ()
    reset = ()
    for s in tl.static_range(STEPS):
        cut_s = carries[s]
        if HAS_GAPS:
            cut_s = cut_s | ended_after[s]
        v_open = v_follow[s]
        v_follow_s = v_open
        if boundary[4] is not None:
            v_open = tl.where(cut_s, v_open, next_value[s])
            v_follow_s = tl.where(at_edge[s], v_open, v_follow_s)
        follow = follow + (v_follow_s,)
        v_next = v_next + (tl.where(carries[s], flag_value[s], v_open),)
        reset = reset + (carries[s] & (valid[s] == 0),)
        if CLOSED:
            cut_s = cut_s | at_edge[s]
        cut = cut + (cut_s,)
    return cut, v_next, follow, reset, flag_value, kind_beyond, value_beyond


@jit
def fetch_resets(
    boundary,
    inputs,
    x,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ACTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The flags, and with end flags that of the step before each chunk."""
    tiles = load_steps(boundary[1], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)
    if not START:
        before = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS) - 1
        mask = row_mask & (before >= 0) & (before < T)
        tiles = tiles + (tl.load(address(boundary[1], sizes, rows, before, DIMS), mask=mask, other=0),)
    return tiles


@jit
def resets(
    boundary,
    fetched,
    numbers,
    valid,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    start,
    place,
    T,
    HAS_GAPS: tl.constexpr,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The boundary rules of a scan that runs forward: a flag resets the state before the step after it ("end" flags)
    or before its own step ("start" flags), on rows that are no transition too."""
    cut = ()
    for s in tl.static_range(STEPS):
        if START or s > 0:
            cut = cut + (fetched[s if START else s - 1] != 0,)
        else:
            cut = cut + (fetched[STEPS] != 0,)
    reset = ()
    nothing = ()
    for s in tl.static_range(STEPS):
        reset = reset + (cut[s] & (valid[s] == 0),)
        nothing = nothing + (tl.zeros_like(numbers[s]),)
    return cut, nothing, nothing, reset, nothing, kind_beyond, value_beyond


@jit
def fetch_predecessors(
    boundary,
    inputs,
    x,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ACTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The flags, and those of the step before each chunk, or after it where they are start flags."""
    beside = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS) + (STEPS if START else -1)
    mask = row_mask & (beside < T) if START else within(row_mask & (beside >= 0), beside, T, WHOLE)
    tiles = load_steps(boundary[1], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)
    tiles = tiles + (tl.load(address(boundary[1], sizes, rows, beside, DIMS), mask=mask, other=0),)
    if boundary[2] is not None:
        tiles = tiles + load_steps(
            boundary[2], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
        tiles = tiles + (tl.load(address(boundary[2], sizes, rows, beside, DIMS), mask=mask, other=0),)
    return tiles


@jit
def predecessors(
    boundary,
    fetched,
    numbers,
    valid,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    start,
    place,
    T,
    HAS_GAPS: tl.constexpr,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rules of `successors`, for a scan that runs forward: whether the step before is cut, and in place of v_next
    the kind of what follows the step."""
    t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
    if START:
        last = load_flag(boundary[3], sizes, rows, tl.where(row_mask, 0, 0), row_mask, DIMS)
    cut = ()
    kind = ()
    never = ()
    nothing = ()
    for s in tl.static_range(STEPS):
        # The edge of a window of whole tiles is a chunk's last step.
        at_edge = t != t if WHOLE and s < STEPS - 1 else t + s == T - 1
        if START:
            ended = (fetched[s + 1] != 0) | (last & at_edge)
            cut_s = fetched[s] != 0
        else:
            ended = fetched[s] != 0
            cut_s = fetched[s - 1 if s > 0 else STEPS] != 0
        kind_s = tl.where(at_edge, EDGE, VALID)
        if boundary[2] is not None:
            cut_s = cut_s | (fetched[STEPS + 1 + (s - 1 if s > 0 else STEPS)] != 0)
            kind_s = tl.where(fetched[STEPS + 1 + s] != 0, TRUNCATED, kind_s)
        cut = cut + (cut_s,)
        kind = kind + (tl.where(ended, ENDED, kind_s),)
        never = never + (valid[s] & (t + s < 0),)
        nothing = nothing + (tl.zeros_like(numbers[s]),)
    return cut, kind, nothing, never, nothing, kind_beyond, value_beyond


@jit
def fetch_nothing(
    boundary,
    inputs,
    x,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ACTIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """No boundary, no flags. (A tuple of no tiles is more than some versions of Triton can carry in a loop.)"""
    return (x[0],)


@jit
def unbounded(
    boundary,
    fetched,
    numbers,
    valid,
    kind_beyond,
    value_beyond,
    sizes,
    rows,
    row_mask,
    start,
    place,
    T,
    HAS_GAPS: tl.constexpr,
    CLOSED: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """No boundaries but the edge of the window, where a scan without an initial state begins."""
    t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
    cut = ()
    never = ()
    nothing = ()
    for s in tl.static_range(STEPS):
        cut_s = row_mask & (t + s < 0)
        never = never + (cut_s,)
        if CLOSED:
            cut_s = row_mask & (t + s == (T - 1 if REVERSE else 0))
        cut = cut + (cut_s,)
        nothing = nothing + (tl.zeros_like(numbers[s]),)
    return cut, nothing, nothing, never, nothing, kind_beyond, value_beyond


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


def check_data(op: str, b: Successors, dim: int) -> None:
    """What only the data can tell: NaN in what follows a step, where it is read. Waits for the device."""

    def no_nan(name: str, x: torch.Tensor | None, read: torch.Tensor, where: str) -> None:
        if isinstance(x, torch.Tensor):
            _checks.none_is(op, (x != x) & read, f"{name} holds NaN {where}")

    ended = b.terminated != 0
    if b.last_done is not None:  # each step's own flag
        ended = torch.cat([ended.narrow(dim, 1, ended.shape[dim] - 1), (b.last_done != 0).unsqueeze(dim)], dim)
    cut_short = torch.zeros_like(ended) if b.truncated is None else (b.truncated != 0) & ~ended
    valid = torch.ones_like(ended) if b.valid is None else b.valid != 0
    no_nan("values", b.values, valid, "in steps that count")
    no_nan("bootstrap_values", b.bootstrap_values, cut_short, "at truncated steps")
    no_nan("next_values", b.next_values, ~ended & (valid | cut_short), "in steps that read it")
    if b.next_values is None:
        # The edge is read where neither the last step that counts nor a row behind it is cut.
        later = valid.flip(dim).cumsum(dim).flip(dim) - valid.long()
        closed = ((ended | cut_short) & (later == 0)).any(dim)
        no_nan("last_values", b.last_values, valid.any(dim) & ~closed, "in rows that go on beyond the window")
