"""The n-step window: each step looks n transitions ahead, or up to the end of its episode or of the window.

It is no recurrence over time, so it has kernels of its own beside the scan. The work is n operations a step.

`near_kernel` is for windows of a few steps: as in the scan a thread holds a chunk of consecutive steps, here with the n
steps behind it, and works out each of its results in registers, backward from the value that it ends on.
`window_kernel` is for longer ones, and for rows that are no transition, where nobody knows how far n transitions reach:
a tile of steps walks ahead together, one row at a time, and all reads but the first come from the cache.
"""

from __future__ import annotations

from rl_triton._scan import product
from rl_triton._tile import (
    address,
    float_factor,
    load,
    load_flag,
    load_row,
    scaled,
    steps_from,
    store_steps,
    unstacked,
    wide_steps,
    within,
)
from rl_triton._triton import jit, tl
from rl_triton.boundaries import flagged

NEAR = 16  # so many steps at most does `near_kernel` look ahead: each costs a thread about four registers


@jit
def _steps_ahead(
    operand, sizes, rows, row_mask, start, T, FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr, DIMS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`load_steps` of COUNT steps from the FIRST-th of a chunk on, which reach into the chunks after it."""
    steps = ()
    if AXIS == 1:
        WIDTH: tl.constexpr = STEPS if STEPS < 4 else 4
        BEFORE: tl.constexpr = FIRST // WIDTH
        for part in tl.static_range(BEFORE, (FIRST + COUNT + WIDTH - 1) // WIDTH):
            t = wide_steps(start + part * WIDTH, 0, CHUNKS, STEPS, WIDTH)
            mask = within(row_mask, t, T, WHOLE and part * WIDTH < STEPS)
            x = tl.load(address(operand, sizes, rows, t, DIMS), mask=mask, other=0)
            if x.dtype == tl.int1:
                x = x.to(tl.int8)
            steps = steps + unstacked(x, ROWS, CHUNKS, WIDTH)
        wanted = ()
        for s in tl.static_range(COUNT):
            wanted = wanted + (steps[FIRST - BEFORE * WIDTH + s],)
        steps = wanted
    else:
        t = steps_from(start, False, CHUNKS, STEPS, AXIS)
        pointers = address(operand, sizes, rows, t + FIRST, DIMS)
        for s in tl.static_range(FIRST, FIRST + COUNT):
            steps = steps + (tl.load(pointers, mask=within(row_mask, t + s, T, WHOLE and s < STEPS), other=0),)
            pointers += operand[1]
    return steps


@jit
def near_kernel(
    inputs,
    factors,
    boundary,
    outputs,
    sizes,
    n_rows,
    T,
    START: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    INDEX: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """G[t] of `window_kernel` for n = N where every row is a transition, by recursion over the horizon:

    G_0[t] = V(s[t]), and G_k[t] = r[t] + γ[t] (what lies beyond a cut or the edge, else G_{k-1}[t+1]).

    WHOLE: the window consists of whole tiles.
    """
    SPAN: tl.constexpr = CHUNKS * STEPS
    blocks = tl.cdiv(T, SPAN)
    program = tl.program_id(0).to(INDEX)
    rows = program // blocks * ROWS + tl.expand_dims(tl.arange(0, ROWS), AXIS)
    row_mask = rows == rows if WHOLE else rows < n_rows
    start = program % blocks * SPAN
    t = steps_from(start, False, CHUNKS, STEPS, AXIS)
    tile_mask = row_mask & (t >= 0)

    # The steps that a chunk's results are made of: its own, and those that the last of them looks ahead to.
    COUNT: tl.constexpr = STEPS + N - 1
    rewards = _steps_ahead(inputs[0], sizes, rows, row_mask, start, T, 0, COUNT, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)
    flags = _steps_ahead(
        boundary[1], sizes, rows, row_mask, start, T, 1 if START else 0, COUNT, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
    )  # fmt: skip
    cuts = flags
    if boundary[2] is not None:
        cuts = _steps_ahead(
            boundary[2], sizes, rows, row_mask, start, T, 0, COUNT, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    gammas = rewards
    if factors[0][0] is not None:
        gammas = _steps_ahead(
            factors[0][0], sizes, rows, row_mask, start, T, 0, COUNT, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    if boundary[4] is None:
        values = _steps_ahead(
            boundary[5], sizes, rows, row_mask, start, T, N, STEPS, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
        edge_value = load_row(boundary[0], sizes, rows, tile_mask, DIMS, DTYPE)
    else:
        values = _steps_ahead(
            boundary[4], sizes, rows, row_mask, start, T, N - 1, STEPS, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
        edge_value = load(boundary[4], sizes, rows, t * 0 + (T - 1), tile_mask, DIMS, DTYPE)
    if START:
        last_done = load_flag(boundary[6], sizes, rows, tl.where(tile_mask, 0, 0), tile_mask, DIMS)

    # Of each step: γ, the reward, whether the look ahead stops here, and the result if so. A γ of 0 stops it too.
    factor = ()
    reward = ()
    stops = ()
    stopped = ()
    for s in tl.static_range(COUNT):
        ended = flags[s] != 0
        # The edge of a window of whole tiles is a chunk's last step.
        at_edge = t != t if WHOLE and s % STEPS < STEPS - 1 else t + s == T - 1
        if START:
            ended = ended | (last_done & at_edge)
        cut_short = cuts[s] != 0
        v_next = _next_value(boundary, ended, cut_short, sizes, rows, t + s, DIMS, DTYPE)
        carries, beyond = flagged(boundary, ended, cut_short, v_next, sizes, rows, t + s, DIMS, DTYPE)
        if factors[0][0] is not None:
            gamma = gammas[s].to(DTYPE)
        else:
            gamma = float_factor(factors[0][1], DTYPE)
        factor = factor + (gamma,)
        reward = reward + (rewards[s].to(DTYPE),)
        stops = stops + (carries | at_edge | (gamma == 0.0),)
        stopped = stopped + (reward[s] + scaled(gamma, tl.where(carries, beyond, edge_value)),)

    results = ()
    for s in tl.static_range(STEPS):
        result = values[s].to(DTYPE)
        for k in tl.static_range(s + N - 1, s - 1, -1):
            result = tl.where(stops[k], stopped[k], tl.fma(factor[k], result, reward[k]))
        results = results + (result,)
    store_steps(outputs[0], results, sizes, rows, row_mask, start, T, False, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)


@jit
def _flagged_at(boundary, sizes, rows, row_mask, t, T, START: tl.constexpr, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """Whether row t carries a flag, and V(s'_t) if so."""
    if START:
        ended = load_flag(boundary[1], sizes, rows, t + 1, row_mask & (t + 1 < T), DIMS)
        ended = ended | load_flag(boundary[6], sizes, rows, t, row_mask & (t + 1 == T), DIMS)
    else:
        ended = load_flag(boundary[1], sizes, rows, t, row_mask & (t < T), DIMS)
    truncated = ended
    if boundary[2] is not None:
        truncated = load_flag(boundary[2], sizes, rows, t, row_mask & (t < T), DIMS)
    v_next = _next_value(boundary, ended, truncated, sizes, rows, t, DIMS, DTYPE)
    return flagged(boundary, ended, truncated, v_next, sizes, rows, t, DIMS, DTYPE)


@jit
def _next_value(boundary, ended, truncated, sizes, rows, t, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """V(s'_t) where `flagged` selects it, if it is given for each step."""
    if boundary[2] is not None and boundary[3] is None:
        value = load(boundary[4], sizes, rows, t, truncated & (ended == 0), DIMS, DTYPE)
    else:
        value = tl.where(ended, 0.0, 0.0).to(DTYPE)
    return value


@jit
def _stopped(
    active,
    total,
    discount,
    v_beyond,
    boundary,
    sizes,
    rows,
    row_mask,
    t,
    T,
    START: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Who goes on after row t; those whom a flag or the window's edge stops have added what lies beyond."""
    carries, value = _flagged_at(boundary, sizes, rows, row_mask, t, T, START, DIMS, DTYPE)
    if boundary[2] is not None:  # else 0 lies beyond
        total += tl.where(active & carries, scaled(discount, value), 0.0)
    active = active & (carries == 0)
    at_edge = active & (t == T - 1)
    total += tl.where(at_edge, scaled(discount, v_beyond), 0.0)
    return active & (at_edge == 0), total


@jit
def window_kernel(
    inputs,
    factors,
    boundary,
    valid_flags,
    outputs,
    sizes,
    n_rows,
    T,
    n,
    START: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    TIME: tl.constexpr,
):
    """G[t] = Σ_{k<m} γ^k r[t+k] + γ^m V(what m steps lead to), m = n or less where a cut or the edge comes first."""
    blocks = tl.cdiv(T, TIME)
    program = tl.program_id(0).to(INDEX)
    # Each look ahead is off by one more step and has a mask of its own, so a thread that held a run of neighbours would
    # read them one by one, far from its neighbour's. So each holds single elements, and a warp's lanes read neighbours:
    # that is what Triton makes of indices of which it does not know that runs are aligned.
    rows = tl.multiple_of((program // blocks * ROWS + tl.arange(0, ROWS))[:, None], [1, 1])
    t = tl.multiple_of((program % blocks * TIME + tl.arange(0, TIME))[None, :], [1, 1])
    row_mask = rows < n_rows
    edge_value = load_row(boundary[0], sizes, rows, row_mask, DIMS, DTYPE)

    mask = row_mask & (t < T)
    total = tl.where(mask, 0.0, 0.0).to(DTYPE)
    v_beyond = tl.where(mask, edge_value, 0.0)  # V of what the steps so far lead to, if nothing else is said
    distance = 0
    if valid_flags is None:
        # Whoever is still under way has taken as many steps as the tile: where γ is a number, so is its power.
        active = mask
        if factors[0][0] is None:
            gamma = float_factor(factors[0][1], DTYPE)
            discount = tl.full([1, 1], 1.0, DTYPE)
        else:
            discount = tl.where(mask, 1.0, 1.0).to(DTYPE)
        while (distance < n) & (tl.max(active.to(tl.int32)) > 0):
            ahead = t + distance
            reward = load(inputs[0], sizes, rows, ahead, active, DIMS, DTYPE)
            if factors[0][0] is not None:
                gamma = load(factors[0][0], sizes, rows, ahead, active, DIMS, DTYPE)
            total += tl.where(active, scaled(discount, reward), 0.0)
            discount = product(discount, gamma)
            if boundary[4] is not None:
                v_beyond = tl.where(active, load(boundary[4], sizes, rows, ahead, active, DIMS, DTYPE), v_beyond)
            active, total = _stopped(
                active, total, discount, v_beyond, boundary, sizes, rows, row_mask, ahead, T, START, DIMS, DTYPE
            )
            distance += 1
        if boundary[4] is None:
            v_beyond = load(boundary[5], sizes, rows, t + n, active, DIMS, DTYPE)
        total += tl.where(active, scaled(discount, v_beyond), 0.0)
    else:
        active = load_flag(valid_flags, sizes, rows, t, mask, DIMS)
        discount = tl.where(mask, 1.0, 1.0).to(DTYPE)
        count = tl.where(mask, 0, 0)
        while tl.max(active.to(tl.int32)) > 0:
            ahead = t + distance
            stepping = active & load_flag(valid_flags, sizes, rows, ahead, active, DIMS)
            arrived = stepping & (count == n)
            if boundary[4] is None:
                v = load(boundary[5], sizes, rows, ahead, arrived, DIMS, DTYPE)
            else:
                v = v_beyond
            total += tl.where(arrived, scaled(discount, v), 0.0)
            active = active & (arrived == 0)
            stepping = stepping & (arrived == 0)

            reward = load(inputs[0], sizes, rows, ahead, stepping, DIMS, DTYPE)
            if factors[0][0] is not None:
                gamma = load(factors[0][0], sizes, rows, ahead, stepping, DIMS, DTYPE)
            else:
                gamma = float_factor(factors[0][1], DTYPE)
            total += tl.where(stepping, scaled(discount, reward), 0.0)
            discount = tl.where(stepping, product(discount, gamma), discount)
            count += stepping.to(tl.int32)
            if boundary[4] is not None:
                v_beyond = tl.where(stepping, load(boundary[4], sizes, rows, ahead, stepping, DIMS, DTYPE), v_beyond)
            active, total = _stopped(
                active, total, discount, v_beyond, boundary, sizes, rows, row_mask, ahead, T, START, DIMS, DTYPE
            )
            distance += 1

    tl.store(address(outputs[0], sizes, rows, t, DIMS), total, mask=mask)
