"""The scan skeleton: one Triton kernel for every estimator.

A program takes R rows and walks their time axis tile by tile, in the direction of the scan. In a tile each thread
composes the affine maps of its chunk of steps; the maps of the chunks are composed by an associative scan; that gives
the state on entering each chunk, from where a thread walks its chunk as a plain loop would. Between tiles one state per
row is carried. Every input is read from device memory once and every output written once; what lies between stays in
registers. (Where few long rows are split over programs, inputs are read twice; expectations over many actions come
through memory, from `_expected.py`.) With one chunk a tile there is nothing to compose, and the kernel is a plain loop
a thread.
"""

from __future__ import annotations

from rl_triton._tile import (
    KINDS,
    PLAIN,
    address,
    at_step,
    in_order,
    left_before,
    left_last,
    load,
    load_factors,
    load_flags,
    load_row,
    load_steps,
    only,
    scan_order,
    steps_from,
    store_steps,
    upcoming,
    within,
)
from rl_triton._triton import jit, tl


@jit
def held(p):
    """A product that underflowed, held at the smallest normal number: so NaN and inf reach all of their own episode, as
    they do in a plain loop, however long it is."""
    # What is left is a signed zero; its bits and those of the smallest normal number are that number, signed.
    if p.dtype == tl.float64:
        tiny = (p.to(tl.int64, bitcast=True) | 0x0010000000000000).to(tl.float64, bitcast=True)
    else:
        tiny = (p.to(tl.int32, bitcast=True) | 0x00800000).to(tl.float32, bitcast=True)
    return tl.where(p == 0, tiny, p)


@jit
def product(b, c):
    """b c, and 0 where and only where a factor is: the other factor, NaN or inf, is then not read."""
    return tl.where((b == 0) | (c == 0), 0.0, held(b * c))


@jit
def step(a, b, x):
    """a + b x as a plain loop rounds it; a zero b does not read x."""
    return tl.where(b == 0, a, a + b * x)


@jit
def apply(a, a_low, b, b_low, x, x_low):
    """(a + a_low) + (b + b_low) (x + x_low), as a sum of the same form; a zero b does not read x.

    The low parts hold what rounding took from the high ones: Knuth's TwoSum, and the product's error by a fused
    multiply-add. A scan rounds each result a few times more than a loop does, once a level of its tree, and rounds the
    powers of a constant factor in the same direction in every tile; with the low parts it does neither.
    """
    p = b * x
    high = a + p
    moved = high - a
    low = ((a - (high - moved)) + (p - moved)) + tl.fma(b, x, -p)
    low = low + tl.fma(b, x_low, tl.fma(b_low, x, a_low))
    low = tl.where(high - high == 0, low, 0.0)  # NaN and inf have no low part
    return tl.where(b == 0, a, high), tl.where(b == 0, a_low, low)


@jit
def compose(a_first, a_first_low, b_first, b_first_low, a_then, a_then_low, b_then, b_then_low):
    """The map x -> a_first + b_first x, followed by x -> a_then + b_then x, each number with its low part.

    A zero factor selects: whatever lies beyond it, NaN and inf too, is not read.
    """
    a, a_low = apply(a_then, a_then_low, b_then, b_then_low, a_first, a_first_low)
    b = product(b_then, b_first)
    b_low = tl.fma(b_then, b_first_low, tl.fma(b_then_low, b_first, tl.fma(b_then, b_first, -b)))
    return a, a_low, b, tl.where((b == 0) | (b - b != 0), 0.0, b_low)


@jit
def chunk_map(a, b, REVERSE: tl.constexpr, STEPS: tl.constexpr):
    """The map of a chunk of steps, its factor with a low part: `compose`, step by step, but for what a chunk is too
    short to need."""
    FIRST: tl.constexpr = STEPS - 1 if REVERSE else 0
    BEHIND: tl.constexpr = -1 if REVERSE else STEPS
    FORWARD: tl.constexpr = -1 if REVERSE else 1
    a_all, b_all = a[FIRST], b[FIRST]
    low = tl.zeros_like(b_all)
    stopped = b_all == 0
    for s in tl.static_range(FIRST + FORWARD, BEHIND, FORWARD):
        a_all = step(a[s], b[s], a_all)
        p = b[s] * b_all
        low = tl.fma(b[s], low, tl.fma(b[s], b_all, -p))
        b_all = p
        stopped = stopped | (b[s] == 0)
    b_all = tl.where(stopped, 0.0, held(b_all))
    return a_all, b_all, tl.where(stopped | (low - low != 0), 0.0, low)


@jit
def scanned(a, b, place, REVERSE: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """The maps from the edge of the tile to the far end of each chunk, in the order of the scan."""
    chunk_a, chunk_b, b_low = chunk_map(a, b, REVERSE, STEPS)
    a_low = tl.zeros_like(chunk_a)
    if CHUNKS > 1:
        chunk_a, chunk_b = in_order(chunk_a, place, REVERSE, AXIS), in_order(chunk_b, place, REVERSE, AXIS)
        b_low = in_order(b_low, place, REVERSE, AXIS)
        chunk_a, a_low, chunk_b, b_low = tl.associative_scan((chunk_a, a_low, chunk_b, b_low), AXIS, compose)
    return chunk_a, a_low, chunk_b, b_low


@jit
def entering(
    a,
    b,
    state_beyond,
    low_beyond,
    place,
    REVERSE: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
):
    """The state on entering each chunk, and the state (with its low part) that the next tile will see. `place` is that
    of a chunk in the order of the scan."""
    a_all, a_low, b_all, b_low = scanned(a, b, place, REVERSE, CHUNKS, STEPS, AXIS)
    high, low = apply(a_all, a_low, b_all, b_low, state_beyond, low_beyond)
    entry = left_before(high + low, state_beyond + low_beyond, place, AXIS)
    high, low = left_last(high, low, place, CHUNKS, AXIS)
    return entry, high, low


@jit
def map_at(slot, rows, n_rows, PARTS: tl.constexpr, AXIS: tl.constexpr):
    """Where the first number of a part's map lies. Slots are in the order in which `past_parts` reads: those that lanes
    read at once are neighbours."""
    return rows * PARTS + slot if AXIS == 1 else slot * n_rows + rows


@jit
def past_parts(maps, state, low, part, rows, row_mask, n_rows, PARTS: tl.constexpr, AXIS: tl.constexpr):
    """The state beyond a part of the time axis, given that beyond the first part and the maps of the parts before."""
    # A lane composes its share of neighbours one by one, then the lanes together: a scan of all would do so twice.
    EACH: tl.constexpr = PARTS // 32 if PARTS > 32 else 1
    LANES: tl.constexpr = PARTS // EACH
    lane = tl.expand_dims(tl.arange(0, LANES), 1 - AXIS)
    span = n_rows * PARTS
    for i in tl.static_range(EACH):
        mask = row_mask & (lane * EACH + i < part)
        pointers = maps + map_at(i * LANES + lane, rows, n_rows, PARTS, AXIS)
        then_a, then_a_low = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + span, mask=mask, other=0.0)
        then_b = tl.load(pointers + 2 * span, mask=mask, other=1.0)
        then_b_low = tl.load(pointers + 3 * span, mask=mask, other=0.0)
        if i == 0:
            a, a_low, b, b_low = then_a, then_a_low, then_b, then_b_low
        else:
            a, a_low, b, b_low = compose(a, a_low, b, b_low, then_a, then_a_low, then_b, then_b_low)
    a, a_low, b, b_low = tl.associative_scan((a, a_low, b, b_low), AXIS, compose)
    last = lane == LANES - 1
    a, a_low = only(a, last, AXIS), only(a_low, last, AXIS)
    return apply(a, a_low, only(b, last, AXIS), only(b_low, last, AXIS), state, low)


@jit
def fetch(
    inputs,
    factors,
    boundary,
    valid_flags,
    sizes,
    rows,
    row_mask,
    start,
    T,
    FETCH_BOUNDARY: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    INPUT_KINDS: tl.constexpr,
    ACTIONS: tl.constexpr,
    VALUES: tl.constexpr,
    N_INPUTS: tl.constexpr,
    N_FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """What the tile at `start` needs from memory: the tiles of the inputs, of the factors, of `valid`, and whatever the
    boundary rules read without a condition."""
    t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
    valid = ()
    if valid_flags is not None:
        valid = load_flags(
            valid_flags, sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
        )
    else:
        for s in tl.static_range(STEPS):
            valid = valid + (within(row_mask, t + s, T, WHOLE),)
    x = ()
    for i in tl.static_range(N_INPUTS):
        if inputs[i] is None:
            for s in tl.static_range(STEPS):
                x = x + (tl.where(valid[s], 0.0, 0.0).to(DTYPE),)
        elif (INPUT_KINDS // KINDS**i) % KINDS == PLAIN:
            x = x + load_steps(
                inputs[i], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
            )
        else:
            for s in tl.static_range(STEPS):
                x = x + (load(inputs[i], sizes, rows, t + s, valid[s], DIMS, DTYPE, (INPUT_KINDS // KINDS**i) % KINDS),)
    f = load_factors(
        factors, sizes, rows, row_mask, start, T, N_FACTORS, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE,
        WHOLE,
    )  # fmt: skip
    bounds = FETCH_BOUNDARY(
        boundary, inputs, x, sizes, rows, row_mask, start, T, REVERSE, START, VALUES, ACTIONS, ROWS, CHUNKS, STEPS,
        AXIS, DIMS, DTYPE, WHOLE,
    )  # fmt: skip
    return valid, x, f, bounds


@jit
def scan_kernel(
    inputs,
    factors,
    boundary,
    valid_flags,
    initial,
    outputs,
    final,
    maps,
    sizes,
    n_rows,
    T,
    n_parts,
    tiles_a_part,
    COEFFICIENTS: tl.constexpr,
    TARGET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BEYOND: tl.constexpr,
    BOUNDARY: tl.constexpr,
    FETCH_BOUNDARY: tl.constexpr,
    VARIANT: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    REVERSE: tl.constexpr,
    START: tl.constexpr,
    INPUT_KINDS: tl.constexpr,
    ACTIONS: tl.constexpr,
    VALUES: tl.constexpr,
    N_INPUTS: tl.constexpr,
    N_FACTORS: tl.constexpr,
    N_OUTPUTS: tl.constexpr,
    N_STEPWISE: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    PREFETCH: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    COMPOSING: tl.constexpr,
):
    """WHOLE: the window consists of whole tiles, so nothing hangs over.

    PARTS > 1: the time axis is split over programs. They are started twice: COMPOSING, each leaves the map of its part
    in `maps`; then each begins with the state that the maps before it lead to.
    """
    program = tl.program_id(0).to(INDEX)
    part = program % n_parts
    rows = program // n_parts * ROWS + tl.expand_dims(tl.arange(0, ROWS), AXIS)
    row_mask = rows == rows if WHOLE else rows < n_rows
    place = scan_order(CHUNKS, REVERSE, AXIS)
    tile_mask = row_mask & (place >= 0)
    FIRST: tl.constexpr = STEPS - 1 if REVERSE else 0
    BEHIND: tl.constexpr = -1 if REVERSE else STEPS
    FORWARD: tl.constexpr = -1 if REVERSE else 1
    EARLY: tl.constexpr = AXIS == 0 or PARTS > 1

    # What a step sees beyond the window: the state, and (for `BOUNDARY`) the value and kind of the edge. As tiles, the
    # same in every chunk.
    edge_value = load_row(boundary[0], sizes, rows, tile_mask, DIMS, DTYPE)
    CLOSED: tl.constexpr = initial[0] is None
    if CLOSED:
        state_beyond = BEYOND(edge_value)
    else:
        state_beyond = load_row(initial[0], sizes, rows, tile_mask, DIMS, DTYPE)
    target_beyond = load_row(initial[1], sizes, rows, tile_mask, DIMS, DTYPE)
    low_beyond = tl.zeros_like(state_beyond)
    kind_beyond = tl.where(tile_mask, 0, 0)
    value_beyond = edge_value

    n_tiles = tl.cdiv(T, CHUNKS * STEPS)
    SPAN: tl.constexpr = CHUNKS * STEPS
    begin = part * tiles_a_part
    end = tl.minimum(begin + tiles_a_part, n_tiles)
    if REVERSE:
        start = (n_tiles - 1 - begin).to(INDEX) * SPAN
    else:
        start = begin.to(INDEX) * SPAN

    # The map of the part so far, where that is what is wanted.
    map_a = tl.zeros_like(state_beyond)
    map_a_low = tl.zeros_like(state_beyond)
    map_b = tl.zeros_like(state_beyond) + 1.0
    map_b_low = tl.zeros_like(state_beyond)
    if PARTS > 1 and not COMPOSING:
        state_beyond, low_beyond = past_parts(maps, state_beyond, low_beyond, part, rows, row_mask, n_rows, PARTS, AXIS)
    if PREFETCH:
        valid, x, f, bounds = fetch(
            inputs, factors, boundary, valid_flags, sizes, rows, row_mask, start, T, FETCH_BOUNDARY, REVERSE, START,
            INPUT_KINDS, ACTIONS, VALUES, N_INPUTS, N_FACTORS, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE, WHOLE,
        )  # fmt: skip
    for k in range(begin, end):
        if not PREFETCH:
            valid, x, f, bounds = fetch(
                inputs, factors, boundary, valid_flags, sizes, rows, row_mask, start, T, FETCH_BOUNDARY, REVERSE, START,
                INPUT_KINDS, ACTIONS, VALUES, N_INPUTS, N_FACTORS, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE, WHOLE,
            )  # fmt: skip
        if PREFETCH and EARLY:
            # The next tile is asked for before this one is worked on: there are few warps to wait with.
            ahead_start = start - SPAN if REVERSE else start + SPAN
            more = row_mask & (rows * 0 + k + 1 < end)
            valid_ahead, x_ahead, f_ahead, bounds_ahead = fetch(
                inputs, factors, boundary, valid_flags, sizes, rows, more, ahead_start, T, FETCH_BOUNDARY, REVERSE,
                START, INPUT_KINDS, ACTIONS, VALUES, N_INPUTS, N_FACTORS, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE, WHOLE,
            )  # fmt: skip
        t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
        numbers = ()
        for i in tl.static_range(N_INPUTS * STEPS):
            numbers = numbers + (x[i].to(DTYPE),)

        cut, v_next, v_follow, reset, reset_value, kind_beyond, value_beyond = BOUNDARY(
            boundary,
            bounds,
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
            valid_flags is not None,
            CLOSED,
            REVERSE,
            START,
            VALUES,
            ROWS,
            CHUNKS,
            STEPS,
            AXIS,
            DIMS,
            DTYPE,
            WHOLE,
        )

        a = ()
        b = ()
        for s in tl.static_range(STEPS):
            mask = within(row_mask, t + s, T, WHOLE)
            x_s, f_s = at_step(numbers, s, N_INPUTS, STEPS), at_step(f, s, N_FACTORS, STEPS)
            a_s, b_s = COEFFICIENTS(x_s, v_next[s], cut[s], f_s, VARIANT)
            b_s = tl.where(cut[s], 0.0, b_s)
            # A row that is no transition passes the state on; one that carries a flag replaces it.
            if valid_flags is not None:
                a_s = tl.where(valid[s], a_s, tl.where(reset[s], BEYOND(reset_value[s]), 0.0))
                b_s = tl.where(valid[s], b_s, tl.where(reset[s], 0.0, 1.0))
            else:
                a_s = tl.where(mask, a_s, 0.0)
                b_s = tl.where(mask, b_s, 1.0)
            a = a + (a_s,)
            b = b + (b_s,)

        if COMPOSING:
            a_all, a_low, b_all, b_low = scanned(a, b, place, REVERSE, CHUNKS, STEPS, AXIS)
            if CHUNKS > 1:
                a_all, a_low = left_last(a_all, a_low, place, CHUNKS, AXIS)
                b_all, b_low = left_last(b_all, b_low, place, CHUNKS, AXIS)
            map_a, map_a_low, map_b, map_b_low = compose(map_a, map_a_low, map_b, map_b_low, a_all, a_low, b_all, b_low)
        else:
            entry = state_beyond
            if CHUNKS > 1:
                entry, state_beyond, low_beyond = entering(
                    a, b, state_beyond, low_beyond, place, REVERSE, CHUNKS, STEPS, AXIS
                )
            state = ()
            state_next = ()
            for s in tl.static_range(FIRST, BEHIND, FORWARD):
                left = step(a[s], b[s], entry)
                if REVERSE:
                    state = (left,) + state
                    state_next = (entry,) + state_next
                else:
                    state = state + (left,)
                    state_next = state_next + (entry,)
                entry = left
            if CHUNKS == 1:
                state_beyond = entry

            target_next = state
            if LOOKAHEAD >= 2:
                known = ()
                target = ()
                for s in tl.static_range(STEPS):
                    x_s, f_s = at_step(numbers, s, N_INPUTS, STEPS), at_step(f, s, N_FACTORS, STEPS)
                    target_s = TARGET(x_s, v_next[s], cut[s], state_next[s], f_s, VARIANT)
                    known_s = valid[s]
                    if valid_flags is not None:
                        target_s = tl.where(known_s, target_s, reset_value[s])
                        known_s = known_s | reset[s]
                    known = known + (known_s,)
                    target = target + (target_s,)
                target_next, target_beyond = upcoming(known, target, target_beyond, place, CHUNKS, STEPS, AXIS)

            results = ()
            for s in tl.static_range(STEPS):
                x_s, f_s = at_step(numbers, s, N_INPUTS, STEPS), at_step(f, s, N_FACTORS, STEPS)
                ahead = (v_next[s], v_follow[s], cut[s], state_next[s], target_next[s])
                results = results + (OUTPUTS(x_s, state[s], ahead, f_s, VARIANT),)
            for i in tl.static_range(N_OUTPUTS):
                if outputs[i] is not None:
                    y = ()
                    for s in tl.static_range(STEPS):
                        y_s = results[s][i]
                        if valid_flags is not None:
                            y_s = tl.where(valid[s], y_s, 0.0)
                        y = y + (y_s,)
                    if i < N_STEPWISE:
                        store_steps(
                            outputs[i], y, sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS,
                            WHOLE,
                        )  # fmt: skip
                    elif k == n_tiles - 1:
                        pointers = address(outputs[i], sizes, rows, t * 0, DIMS)
                        for s in tl.static_range(STEPS):
                            tl.store(pointers, y[s], mask=row_mask & (t + s == (0 if REVERSE else T - 1)))

        if REVERSE:
            start -= SPAN
        else:
            start += SPAN
        if PREFETCH and EARLY:
            valid, x, f, bounds = valid_ahead, x_ahead, f_ahead, bounds_ahead
        if PREFETCH and not EARLY:
            # At the end, where fewer registers are in use, so that more programs share a multiprocessor. (Not where it
            # is needed: the compiler would move each load down to its use, and a thread wait at every step.)
            more = row_mask & (rows * 0 + k + 1 < end)
            valid, x, f, bounds = fetch(
                inputs, factors, boundary, valid_flags, sizes, rows, more, start, T, FETCH_BOUNDARY, REVERSE, START,
                INPUT_KINDS, ACTIONS, VALUES, N_INPUTS, N_FACTORS, ROWS, CHUNKS, STEPS, AXIS, DIMS, DTYPE, WHOLE,
            )  # fmt: skip

    once = tile_mask & (place == 0)
    if COMPOSING:
        EACH: tl.constexpr = PARTS // 32 if PARTS > 32 else 1
        pointers = maps + map_at(part % EACH * (PARTS // EACH) + part // EACH, rows, n_rows, PARTS, AXIS) + place * 0
        span = n_rows * PARTS
        tl.store(pointers, map_a, mask=once)
        tl.store(pointers + span, map_a_low, mask=once)
        tl.store(pointers + 2 * span, map_b, mask=once)
        tl.store(pointers + 3 * span, map_b_low, mask=once)
    else:
        once = once & (place * 0 + part == n_parts - 1)
        if final[0] is not None:
            pointers = address(final[0], sizes, rows, place * 0, DIMS)
            tl.store(pointers, state_beyond + low_beyond, mask=once)
        if final[1] is not None:
            pointers = address(final[1], sizes, rows, place * 0, DIMS)
            tl.store(pointers, target_beyond, mask=once)
