"""Tiles: how rows and steps of strided tensors come into registers and go back.

A program holds a tile of R rows by C chunks of S consecutive steps. It is kept as S tiles [R, C], one per step of
a chunk, so a thread owns its chunks and walks them like a loop. AXIS is the axis of the chunks: where it is 0 the tiles
are [C, R]. `rows` is [R, 1] and t, the first step of each chunk, [1, C], or their transposes.

AXIS 1 is for rows whose steps are neighbours in memory: a tensor is read as [R, C S] in one wide load and split into
steps. AXIS 0 is for steps whose rows are neighbours: each step is a load of its own.

A tensor reaches the kernel as an operand (pointer, time stride, row strides...): row strides run over the DIMS batch
axes that are left after collapsing, innermost first, as `sizes` does. A tensor with an action axis has one more stride,
and behind it the tensor that it is read with: the actions that are taken, or the probabilities of an expectation.
Strides and offsets are in elements and int64.
"""

from __future__ import annotations

from rl_triton._triton import constant, interpreted, jit, libdevice, tl

# What an input is: a tensor, or one entry of its action axis.
PLAIN, TAKEN = map(constant, range(2))
KINDS = constant(2)


@jit
def _nothing():
    pass


_INTERPRETED = constant(interpreted(_nothing))  # there libdevice is not to be had


@jit
def scaled(factor, x):
    """factor * x, where a zero factor does not read x (0 * inf never appears)."""
    return tl.where(factor == 0.0, 0.0, factor * x)


@jit
def clipped(x, bar):
    """min(x, bar), but NaN stays visible."""
    return tl.where(x > bar, bar, x)


@jit
def exponential(x):
    """exp(x), as exactly as a plain loop has it. (`tl.exp` of a float32 is an approximation.)"""
    if _INTERPRETED or x.dtype == tl.float64:
        y = tl.exp(x)
    else:
        # Subnormal results are flushed to zero, which would select: they are held at the smallest normal number.
        y = libdevice.exp(x)
        y = tl.where((y == 0) & (x > -103.0), 1.1754943508222875e-38, y)
    return y


@jit
def address(operand, sizes, rows, t, DIMS: tl.constexpr, BASE: tl.constexpr = 0):
    """Pointers to the elements at (rows, t) of the tensor that begins at BASE in an operand."""
    offset = t * operand[BASE + 1]
    rest = rows
    for d in tl.static_range(DIMS):
        if d == DIMS - 1:
            offset += rest * operand[BASE + 2 + d]
        else:
            offset += (rest % sizes[d]) * operand[BASE + 2 + d]
            rest = rest // sizes[d]
    return operand[BASE] + offset


@jit
def load_flag(operand, sizes, rows, t, mask, DIMS: tl.constexpr):
    """Booleans: nonzero, in whatever dtype the flags are stored."""
    return tl.load(address(operand, sizes, rows, t, DIMS), mask=mask, other=0) != 0


@jit
def load(operand, sizes, rows, t, mask, DIMS: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr = PLAIN):
    """Elements at (rows, t) in the arithmetic dtype; 0 where the mask is off."""
    pointers = address(operand, sizes, rows, t, DIMS)
    if KIND == TAKEN:
        actions = address(operand, sizes, rows, t, DIMS, 3 + DIMS)
        action = tl.load(actions, mask=mask, other=0).to(tl.int64)
        pointers += action * operand[2 + DIMS]
    return tl.load(pointers, mask=mask, other=0).to(DTYPE)


@jit
def load_row(operand, sizes, rows, mask, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """A row's element of a tensor without a time axis, all over the row of the mask's tile; 0 where it is absent."""
    if operand is not None:
        pointers = address(operand, sizes, rows, tl.where(mask, 0, 0), DIMS)
        value = tl.load(pointers, mask=mask, other=0).to(DTYPE)
    else:
        value = tl.where(mask, 0.0, 0.0).to(DTYPE)
    return value


@jit
def unstacked(x, ROWS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """[R, C WIDTH] as WIDTH tiles [R, C]. No data moves between threads where each holds whole chunks."""
    if WIDTH == 1:
        steps = (x,)
    elif WIDTH == 2:
        first, second = tl.split(tl.reshape(x, [ROWS, CHUNKS, 2]))
        steps = (first, second)
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, CHUNKS, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        steps = (first, second, third, fourth)
    return steps


@jit
def stacked(steps, first: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `unstacked`, of WIDTH of the steps from `first` on."""
    if WIDTH == 1:
        x = steps[first]
    elif WIDTH == 2:
        x = tl.reshape(tl.join(steps[first], steps[first + 1]), [ROWS, CHUNKS * 2])
    else:
        even = tl.join(steps[first], steps[first + 2])
        odd = tl.join(steps[first + 1], steps[first + 3])
        x = tl.reshape(tl.join(even, odd), [ROWS, CHUNKS * 4])
    return x


@jit
def within(row_mask, t, T, WHOLE: tl.constexpr):
    """Which steps are in the window; all are where it consists of whole tiles (the comparison then folds away)."""
    return row_mask & (t == t if WHOLE else t < T)


@jit
def steps_from(start, REVERSE: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """The first step of each chunk of the tile that begins at `start`. Along axis 0 chunks lie in the order of the
    scan, along axis 1 in that of time, since a tensor is read there in wide loads."""
    chunk = tl.expand_dims(tl.arange(0, CHUNKS), 1 - AXIS)
    if REVERSE and AXIS == 0:
        chunk = CHUNKS - 1 - chunk
    return start + chunk * STEPS


@jit
def scan_order(CHUNKS: tl.constexpr, REVERSE: tl.constexpr, AXIS: tl.constexpr):
    """The place of each chunk in the order of the scan."""
    place = tl.expand_dims(tl.arange(0, CHUNKS), 1 - AXIS)
    if REVERSE and AXIS == 1:
        place = CHUNKS - 1 - place
    return place


@jit
def wide_steps(start, part: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr):
    """[1, C WIDTH]: the WIDTH steps of each chunk that one load takes, the `part`-th of its STEPS."""
    place = tl.arange(0, CHUNKS * WIDTH)[None, :]
    if STEPS > WIDTH:
        place = place // WIDTH * STEPS + part * WIDTH + place % WIDTH
    return start + place


@jit
def load_steps(
    operand,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """S tiles of a plain operand as it is stored; 0 beyond the window."""
    steps = ()
    if AXIS == 1:
        WIDTH: tl.constexpr = STEPS if STEPS < 4 else 4
        for part in tl.static_range(STEPS // WIDTH):
            t = wide_steps(start, part, CHUNKS, STEPS, WIDTH)
            x = tl.load(address(operand, sizes, rows, t, DIMS), mask=within(row_mask, t, T, WHOLE), other=0)
            if x.dtype == tl.int1:
                x = x.to(tl.int8)
            steps = steps + unstacked(x, ROWS, CHUNKS, WIDTH)
    else:
        t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
        pointers = address(operand, sizes, rows, t, DIMS)
        for s in tl.static_range(STEPS):
            steps = steps + (tl.load(pointers, mask=within(row_mask, t + s, T, WHOLE), other=0),)
            pointers += operand[1]
    return steps


@jit
def expected(
    operand,
    sizes,
    rows,
    t,
    mask,
    ACTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Σ_a probs[a] values[a] at (rows, t), BLOCK actions at a time; 0 where the mask is off.

    Where actions are neighbours in memory a block has an axis of its own, so that lanes read neighbours, GROUP actions
    each. The other axes are swapped then: of those Triton gives lanes to the first one first, but in a tile to the last
    one, and moves data between threads where the two differ.
    """
    values = address(operand, sizes, rows, t, DIMS)
    probs = address(operand, sizes, rows, t, DIMS, 3 + DIMS)
    if BLOCK > 1:
        values, probs = tl.expand_dims(tl.trans(values), 2), tl.expand_dims(tl.trans(probs), 2)
        mask = tl.expand_dims(tl.trans(mask), 2)
    total = _expected_block(values, probs, 0, mask, ACTIONS, BLOCK, GROUP, DTYPE)
    for first in range(BLOCK, ACTIONS, BLOCK):
        # Turn by turn: a number of actions times their stride may be more than 32 bits hold.
        values += BLOCK if BLOCK > 1 else operand[2 + DIMS]
        probs += BLOCK if BLOCK > 1 else operand[5 + 2 * DIMS]
        total += _expected_block(values, probs, first, mask, ACTIONS, BLOCK, GROUP, DTYPE)
    if BLOCK > 1:
        total = tl.trans(tl.sum(total, axis=2))
    return total


@jit
def _expected_block(
    values,
    probs,
    first,
    mask,
    ACTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The terms of the BLOCK actions that the pointers begin at, the `first` and so on, before they are added up."""
    if BLOCK > 1:
        place = tl.arange(0, BLOCK)[None, None, :]
        # In bytes. Constants come first, since Triton 3.3 knows no `int * constexpr`. (A hint is for the sum before it,
        # so it cannot be given in a function that is handed the sum.)
        values, probs = values + place, probs + place
        values = tl.multiple_of(values, [1, 1, GROUP * ((7 + values.dtype.element_ty.primitive_bitwidth) // 8)])
        probs = tl.multiple_of(probs, [1, 1, GROUP * ((7 + probs.dtype.element_ty.primitive_bitwidth) // 8)])
        values, probs = tl.max_contiguous(values, [1, 1, BLOCK]), tl.max_contiguous(probs, [1, 1, BLOCK])
        if ACTIONS % BLOCK != 0:
            mask = tl.max_constancy(mask & (first + place < ACTIONS), [1, 1, GROUP])
    return scaled(tl.load(probs, mask=mask, other=0).to(DTYPE), tl.load(values, mask=mask, other=0).to(DTYPE))


@jit
def load_expected(
    operand,
    sizes,
    rows,
    row_mask,
    start,
    T,
    ACTIONS: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """S tiles of expectations over so few actions that one load takes them all; 0 beyond the window."""
    steps = ()
    if AXIS == 1:
        WIDTH: tl.constexpr = STEPS if STEPS < 4 else 4
        for part in tl.static_range(STEPS // WIDTH):
            t = wide_steps(start, part, CHUNKS, STEPS, WIDTH)
            mask = within(row_mask, t, T, WHOLE)
            x = expected(operand, sizes, rows, t, mask, ACTIONS, ACTIONS, ACTIONS, DIMS, DTYPE)
            steps = steps + unstacked(x, ROWS, CHUNKS, WIDTH)
    else:
        t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
        for s in tl.static_range(STEPS):
            mask = within(row_mask, t + s, T, WHOLE)
            steps = steps + (expected(operand, sizes, rows, t + s, mask, ACTIONS, ACTIONS, ACTIONS, DIMS, DTYPE),)
    return steps


@jit
def load_flags(
    operand,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """S tiles of booleans: nonzero, in whatever dtype the flags are stored; false beyond the window."""
    stored = load_steps(operand, sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE)
    flags = ()
    for s in tl.static_range(STEPS):
        flags = flags + (stored[s] != 0,)
    return flags


@jit
def store_steps(
    operand,
    steps,
    sizes,
    rows,
    row_mask,
    start,
    T,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The inverse of `load_steps`."""
    if AXIS == 1:
        WIDTH: tl.constexpr = STEPS if STEPS < 4 else 4
        for part in tl.static_range(STEPS // WIDTH):
            t = wide_steps(start, part, CHUNKS, STEPS, WIDTH)
            x = stacked(steps, part * WIDTH, ROWS, CHUNKS, WIDTH)
            tl.store(address(operand, sizes, rows, t, DIMS), x, mask=within(row_mask, t, T, WHOLE))
    else:
        t = steps_from(start, REVERSE, CHUNKS, STEPS, AXIS)
        pointers = address(operand, sizes, rows, t, DIMS)
        for s in tl.static_range(STEPS):
            tl.store(pointers, steps[s], mask=within(row_mask, t + s, T, WHOLE))
            pointers += operand[1]


@jit
def float_factor(parts, DTYPE: tl.constexpr):
    """[1, 1]: a Python float. Triton passes those as float32, so a float64 comes in three parts."""
    factor = tl.zeros([1, 1], DTYPE) + parts[0]
    if tl.float64 == DTYPE:
        factor = factor + parts[1] + parts[2]
    return factor


@jit
def load_factors(
    factors,
    sizes,
    rows,
    row_mask,
    start,
    T,
    N: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    AXIS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The S tiles of each factor, one behind the other: (operand, None) is a tensor, (None, parts) a float, and
    (None, None) the product of the factors before it."""
    tiles = ()
    product = ()
    for _ in tl.static_range(STEPS):
        product = product + (tl.full([1, 1], 1.0, DTYPE),)
    for i in tl.static_range(N):
        column = product
        if factors[i][0] is not None:
            stored = load_steps(
                factors[i][0], sizes, rows, row_mask, start, T, REVERSE, ROWS, CHUNKS, STEPS, AXIS, DIMS, WHOLE
            )
            column = ()
            for s in tl.static_range(STEPS):
                column = column + (stored[s].to(DTYPE),)
        elif factors[i][1] is not None:
            column = ()
            for _ in tl.static_range(STEPS):
                column = column + (float_factor(factors[i][1], DTYPE),)
        tiles = tiles + column
        so_far = product
        product = ()
        for s in tl.static_range(STEPS):
            product = product + (so_far[s] * column[s],)
    return tiles


@jit
def at_step(tiles, s: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr):
    """What N columns of S tiles, one behind the other, hold for the s-th step."""
    row = ()
    for i in tl.static_range(N):
        row = row + (tiles[i * STEPS + s],)
    return row


@jit
def picked(tile, source, AXIS: tl.constexpr):
    """A tile whose chunks have the elements of the chunks `source`."""
    return tl.gather(tile, tl.broadcast_to(source, tile.shape), AXIS)


@jit
def only(tile, chosen, AXIS: tl.constexpr):
    """One element per row: that which `chosen` marks, by selection, so that the others may be NaN."""
    return tl.sum(tl.where(chosen, tile, 0), axis=AXIS, keep_dims=True)


@jit
def in_order(tile, place, REVERSE: tl.constexpr, AXIS: tl.constexpr):
    """The chunks in the order of the scan. (A reversed `associative_scan` mirrors a warp at 10 shuffles a value.)"""
    if REVERSE and AXIS == 1:
        tile = picked(tile, place, AXIS)
    return tile


# Along axis 0 the chunks of a row are in several warps, so what they say to each other goes through shared memory. A
# scan and a reduction do that in two visits; a gather would first move its tile to a layout whose chunks share a warp,
# and back. Along axis 1 chunks are lanes of a warp, and a gather is one shuffle.


@jit
def _beside(before_first, x_first, several_first, before_then, x_then, several_then):
    """Of neighbouring runs of chunks: what the last chunk but one left, what the last one left, and whether there are
    two."""
    return tl.where(several_then != 0, before_then, x_first), x_then, several_first * 0 + 1


@jit
def left_before(tile, beyond, place, AXIS: tl.constexpr):
    """For each chunk, of a tile in the order of the scan, what the chunk before it left; `beyond` for the first."""
    first = place == 0
    if AXIS == 0:
        before, _, _ = tl.associative_scan((tile, tile, tl.zeros(tile.shape, tl.int32)), AXIS, _beside)
    else:
        before = picked(tile, tl.where(first, place, place - 1), AXIS)
    return tl.where(first, beyond, before)


@jit
def _either(x_first, y_first, x_then, y_then):
    return x_first + x_then, y_first + y_then


@jit
def left_last(tile, low, place, CHUNKS: tl.constexpr, AXIS: tl.constexpr):
    """What the last chunk left, of tiles in the order of the scan, in every chunk."""
    if AXIS == 0:
        last = place == CHUNKS - 1
        x, x_low = tl.reduce((tl.where(last, tile, 0), tl.where(last, low, 0)), AXIS, _either, keep_dims=True)
        x, x_low = tl.broadcast_to(x, tile.shape), tl.broadcast_to(x_low, tile.shape)
    else:
        source = place * 0 + (CHUNKS - 1)
        x, x_low = picked(tile, source, AXIS), picked(low, source, AXIS)
    return x, x_low


@jit
def _nearer(known_first, x_first, known_then, x_then):
    """A chunk that has no x of its own passes on that of the chunk before it in the scan."""
    return known_first | known_then, tl.where(known_then != 0, x_then, x_first)


@jit
def upcoming(known, x, beyond, place, CHUNKS: tl.constexpr, STEPS: tl.constexpr, AXIS: tl.constexpr):
    """For each step the nearest known x after it, backward in time, and that which the tile before will see; `beyond`
    where there is none."""
    chunk_known = known[STEPS - 1].to(tl.int32)
    chunk_x = x[STEPS - 1]
    for s in tl.static_range(STEPS - 2, -1, -1):
        chunk_known, chunk_x = _nearer(chunk_known, chunk_x, known[s].to(tl.int32), x[s])
    following = beyond
    if CHUNKS > 1:
        chunk_known, chunk_x = in_order(chunk_known, place, True, AXIS), in_order(chunk_x, place, True, AXIS)
        chunk_known, chunk_x = tl.associative_scan((chunk_known, chunk_x), AXIS, _nearer)
        chunk_x = tl.where(chunk_known != 0, chunk_x, beyond)
        following = left_before(chunk_x, beyond, place, AXIS)
        beyond, _ = left_last(chunk_x, chunk_x, place, CHUNKS, AXIS)
    else:
        beyond = tl.where(chunk_known != 0, chunk_x, beyond)
    after = ()
    for s in tl.static_range(STEPS - 1, -1, -1):
        after = (following,) + after
        following = tl.where(known[s], x[s], following)
    return after, beyond
