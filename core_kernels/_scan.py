"""The scan skeleton: one Triton kernel for every estimator.

A program takes ROWS rows and walks their time axis tile by tile, in the direction of the scan. Within a tile the
affine maps of the steps are composed by an associative scan; between tiles one state per row is carried. Every input
is read from device memory once and every output written once; what lies between stays in registers.

Shapes in comments: R = ROWS, K = TIME. A tile is [R, K]; `rows` is [R, 1], `t` is [1, K].

A tensor reaches the kernel as an operand (pointer, time stride, row strides...): row strides run over the DIMS batch
axes that are left after collapsing, innermost first, as `sizes` does. A tensor with an action axis has one more stride,
and behind it the tensor that it is read with: `TAKEN` (table, actions), `EXPECTATION` (values, probabilities, number of
actions). Strides and offsets are in elements and int64.
"""

from __future__ import annotations

from rl_triton._triton import jit, tl

# What an operand is: a tensor, one entry of its action axis, or a sum over it.
PLAIN = tl.constexpr(0) if tl is not None else 0
TAKEN = tl.constexpr(1) if tl is not None else 1
EXPECTATION = tl.constexpr(2) if tl is not None else 2


@jit
def product(b, c):
    """b c, and 0 where and only where a factor is: the other factor, NaN or inf, is then not read, and a product that
    underflows is held at the smallest normal number. So NaN and inf reach all of their own episode, as they do in a
    plain loop, however long it is, and nothing beyond."""
    p = b * c
    if p.dtype == tl.float64:
        tiny = tl.where((b < 0) == (c < 0), 2.3e-308, -2.3e-308)
    else:
        tiny = tl.where((b < 0) == (c < 0), 1.2e-38, -1.2e-38)
    return tl.where((b == 0) | (c == 0), 0.0, tl.where(p == 0, tiny, p))


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
    low = low + (a_low + (b * x_low + b_low * x))
    low = tl.where(high - high == 0, low, 0.0)  # NaN and inf have no low part
    return tl.where(b == 0, a, high), tl.where(b == 0, a_low, low)


@jit
def compose(a_first, a_first_low, b_first, b_first_low, a_then, a_then_low, b_then, b_then_low):
    """The map x -> a_first + b_first x, followed by x -> a_then + b_then x, each number with its low part.

    A zero factor selects: whatever lies beyond it, NaN and inf too, is not read.
    """
    a, a_low = apply(a_then, a_then_low, b_then, b_then_low, a_first, a_first_low)
    b = product(b_then, b_first)
    b_low = tl.fma(b_then, b_first, -b) + (b_then * b_first_low + b_then_low * b_first)
    b_low = tl.where((b == 0) | (b - b != 0), 0.0, b_low)
    return a, a_low, b, b_low


@jit
def scaled(factor, x):
    """factor * x, where a zero factor does not read x (0 * inf never appears)."""
    return tl.where(factor == 0.0, 0.0, factor * x)


@jit
def clipped(x, bar):
    """min(x, bar), but NaN stays visible."""
    return tl.where(x > bar, bar, x)


@jit
def address(operand, sizes, rows, t, DIMS: tl.constexpr, BASE: tl.constexpr = 0):
    """[R, K] pointers to the elements at (rows, t) of the tensor that begins at BASE in an operand."""
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
    """[R, K] booleans: nonzero, in whatever dtype the flags are stored."""
    return tl.load(address(operand, sizes, rows, t, DIMS), mask=mask, other=0) != 0


@jit
def load(operand, sizes, rows, t, mask, DIMS: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr = PLAIN):
    """[R, K] elements at (rows, t) in the arithmetic dtype; 0 where the mask is off.

    An expectation is reduced action by action: no tile has an action axis.
    """
    pointers = address(operand, sizes, rows, t, DIMS)
    if KIND == PLAIN:
        loaded = tl.load(pointers, mask=mask, other=0).to(DTYPE)
    elif KIND == TAKEN:
        actions = address(operand, sizes, rows, t, DIMS, 3 + DIMS)
        action = tl.load(actions, mask=mask, other=0).to(tl.int64)
        loaded = tl.load(pointers + action * operand[2 + DIMS], mask=mask, other=0).to(DTYPE)
    else:
        probs = address(operand, sizes, rows, t, DIMS, 3 + DIMS)
        loaded = tl.where(mask, 0.0, 0.0).to(DTYPE)
        for action in range(operand[6 + 2 * DIMS]):
            p = tl.load(probs + action * operand[5 + 2 * DIMS], mask=mask, other=0).to(DTYPE)
            q = tl.load(pointers + action * operand[2 + DIMS], mask=mask, other=0).to(DTYPE)
            loaded += scaled(p, q)
    return loaded


@jit
def load_row(operand, sizes, rows, row_mask, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """[R, 1] elements of a per-row operand; 0 where it is absent."""
    if operand is not None:
        value = tl.load(address(operand, sizes, rows, 0, DIMS), mask=row_mask, other=0).to(DTYPE)
    else:
        value = tl.where(row_mask, 0.0, 0.0).to(DTYPE)
    return value


@jit
def load_factors(factors, sizes, rows, t, mask, N: tl.constexpr, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """Each factor as a scalar or a tile: (None, parts) is a float, (operand, None) a tensor, (None, None) the product
    of the factors before it. Triton passes Python floats as float32, so a float64 comes in three parts."""
    loaded = ()
    product = tl.full([1, 1], 1.0, DTYPE)
    for i in tl.static_range(N):
        operand = factors[i][0]
        parts = factors[i][1]
        if operand is not None:
            factor = load(operand, sizes, rows, t, mask, DIMS, DTYPE)
        elif parts is not None:
            factor = tl.zeros([1, 1], DTYPE) + parts[0]
            if tl.float64 == DTYPE:
                factor = factor + parts[1] + parts[2]
        else:
            factor = product
        product = product * factor
        loaded = loaded + (factor,)
    return loaded


@jit
def pick(tile, chosen):
    """[R, 1]: the element of each row that `chosen` marks, by selection, so that other elements may be NaN."""
    return tl.sum(tl.where(chosen, tile, 0), axis=1, keep_dims=True)


@jit
def following(tile, beyond, column, TIME: tl.constexpr):
    """[R, K]: each column's neighbour one step later; `beyond` for the last."""
    last = column == TIME - 1
    neighbour = tl.broadcast_to(tl.where(last, column, column + 1), tile.shape)
    return tl.where(last, beyond, tl.gather(tile, neighbour, 1))


@jit
def _later(known_first, x_first, known_then, x_then):
    """A row that has no x of its own passes on that of the row after it."""
    return known_first | known_then, tl.where(known_then != 0, x_then, x_first)


@jit
def scan_kernel(
    inputs,
    factors,
    boundary,
    initial,
    outputs,
    final,
    sizes,
    n_rows,
    T,
    COEFFICIENTS: tl.constexpr,
    TARGET: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BEYOND: tl.constexpr,
    BOUNDARY: tl.constexpr,
    VARIANT: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    START: tl.constexpr,
    INPUT_KINDS: tl.constexpr,
    NEXT_KIND: tl.constexpr,
    N_INPUTS: tl.constexpr,
    N_FACTORS: tl.constexpr,
    N_OUTPUTS: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TIME: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = rows < n_rows
    column = tl.arange(0, TIME)[None, :]
    exit_column = column == (0 if REVERSE else TIME - 1)

    # What a step sees beyond the window: the state, and (for `BOUNDARY`) the value and kind of the edge.
    edge_value = load_row(boundary[0], sizes, rows, row_mask, DIMS, DTYPE)
    CLOSED: tl.constexpr = initial[0] is None
    if CLOSED:
        state_beyond = BEYOND(edge_value)
    else:
        state_beyond = load_row(initial[0], sizes, rows, row_mask, DIMS, DTYPE)
    target_beyond = load_row(initial[1], sizes, rows, row_mask, DIMS, DTYPE)
    low_beyond = tl.zeros_like(state_beyond)
    kind_beyond = tl.where(row_mask, 0, 0)
    value_beyond = edge_value

    n_tiles = tl.cdiv(T, TIME)
    for k in range(n_tiles):
        if REVERSE:
            tile = n_tiles - 1 - k
        else:
            tile = k
        t = column + tile.to(tl.int64) * TIME
        mask = row_mask & (t < T)

        valid, cut, v_next, v_follow, reset, reset_value, kind_beyond, value_beyond = BOUNDARY(
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
            CLOSED,
            REVERSE,
            START,
            NEXT_KIND,
            DIMS,
            DTYPE,
        )
        step_mask = mask & valid
        x = ()
        for i in tl.static_range(N_INPUTS):
            x = x + (load(inputs[i], sizes, rows, t, step_mask, DIMS, DTYPE, INPUT_KINDS[i]),)
        f = load_factors(factors, sizes, rows, t, step_mask, N_FACTORS, DIMS, DTYPE)

        a, b = COEFFICIENTS(x, v_next, cut, f, VARIANT)
        b = tl.where(cut, 0.0, b)
        # A row that is no transition passes the state on; one that carries a flag replaces it.
        a = tl.where(step_mask, a, tl.where(reset, BEYOND(reset_value), 0.0))
        b = tl.where(step_mask, b, tl.where(reset, 0.0, 1.0))
        exact = tl.zeros_like(a)
        a, a_low, b, b_low = tl.associative_scan((a, exact, b, exact), 1, compose, reverse=REVERSE)
        high, low = apply(a, a_low, b, b_low, state_beyond, low_beyond)
        state = high + low

        state_next = state
        target_next = state
        if LOOKAHEAD >= 1:
            state_next = following(state, state_beyond + low_beyond, column, TIME)
        if LOOKAHEAD >= 2:
            target = TARGET(x, v_next, cut, state_next, f, VARIANT)
            if HAS_GAPS:
                known = (step_mask | reset).to(tl.int32)
                target = tl.where(step_mask, target, reset_value)
                known, target = tl.associative_scan((known, target), 1, _later, reverse=True)
                target = tl.where(known != 0, target, target_beyond)
            else:
                target = tl.where(step_mask, target, target_beyond)
            target_next = following(target, target_beyond, column, TIME)
            target_beyond = pick(target, exit_column)
        state_beyond = pick(high, exit_column)
        low_beyond = pick(low, exit_column)

        y = OUTPUTS(x, state, (v_next, v_follow, cut, state_next, target_next), f, VARIANT)
        for i in tl.static_range(N_OUTPUTS):
            tl.store(address(outputs[i], sizes, rows, t, DIMS), tl.where(valid, y[i], 0.0), mask=mask)

    if final[0] is not None:
        tl.store(address(final[0], sizes, rows, 0, DIMS), state_beyond + low_beyond, mask=row_mask)
    if final[1] is not None:
        tl.store(address(final[1], sizes, rows, 0, DIMS), target_beyond, mask=row_mask)
