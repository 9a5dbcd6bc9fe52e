"""The n-step window: each step looks n transitions ahead, or up to the end of its episode or of the window.

It is no recurrence, so it has a kernel of its own beside the scan: a tile of steps walks ahead together, one row at a
time, by the boundary rules of boundaries.py. Its reads overlap, so all but the first come from the cache; the work is
n operations a step.
"""

from __future__ import annotations

from rl_triton._scan import product
from rl_triton._tile import PLAIN, address, float_factor, load, load_flag, load_row, scaled
from rl_triton._triton import jit, tl
from rl_triton.boundaries import flagged


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
    return flagged(boundary, ended, truncated, sizes, rows, t, PLAIN, DIMS, DTYPE)


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
