"""The n-step window: each step looks n transitions ahead, or up to the end of its episode or of the window.

It is no recurrence, so it has a kernel of its own beside the scan: a tile of steps walks ahead together, one row at a
time, by the boundary rules of boundaries.py. Its reads overlap, so all but the first come from the cache; the work is
n operations a step.
"""

from __future__ import annotations

from rl_triton._scan import PLAIN, address, load, load_factors, load_flag, load_row, product, scaled
from rl_triton._triton import jit, tl
from rl_triton.boundaries import flagged_rows


@jit
def window_kernel(
    inputs,
    factors,
    boundary,
    outputs,
    sizes,
    n_rows,
    T,
    n,
    START: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TIME: tl.constexpr,
):
    """G[t] = Σ_{k<m} γ^k r[t+k] + γ^m V(what m steps lead to), m = n or less where a cut or the edge comes first."""
    last_values, terminated, truncated, bootstrap_values, next_values, values, valid_flags, last_done, _ = boundary
    blocks = tl.cdiv(T, TIME)
    program = tl.program_id(0).to(tl.int64)
    rows = (program // blocks * ROWS + tl.arange(0, ROWS))[:, None]
    t = (program % blocks * TIME + tl.arange(0, TIME))[None, :]
    row_mask = rows < n_rows
    edge_value = load_row(last_values, sizes, rows, row_mask, DIMS, DTYPE)

    mask = row_mask & (t < T)
    active = mask
    if valid_flags is not None:
        active = load_flag(valid_flags, sizes, rows, t, mask, DIMS)
    total = tl.where(mask, 0.0, 0.0).to(DTYPE)
    discount = tl.where(mask, 1.0, 1.0).to(DTYPE)
    v_beyond = tl.where(mask, edge_value, 0.0)  # V of what the steps so far lead to, if nothing else is said
    count = tl.where(mask, 0, 0)
    ahead = t
    while tl.max(tl.max(active.to(tl.int32), axis=1), axis=0) > 0:
        stepping = active
        if valid_flags is not None:
            stepping = active & load_flag(valid_flags, sizes, rows, ahead, active, DIMS)
        arrived = stepping & (count == n)
        if next_values is None:
            v = load(values, sizes, rows, ahead, arrived, DIMS, DTYPE)
        else:
            v = v_beyond
        total += tl.where(arrived, scaled(discount, v), 0.0)
        active = active & (arrived == 0)
        stepping = stepping & (arrived == 0)

        reward = load(inputs[0], sizes, rows, ahead, stepping, DIMS, DTYPE)
        gamma = load_factors(factors, sizes, rows, ahead, stepping, 1, DIMS, DTYPE)[0]
        total += tl.where(stepping, scaled(discount, reward), 0.0)
        discount = tl.where(stepping, product(discount, gamma), discount)
        count += stepping.to(tl.int32)
        if next_values is not None:
            v_beyond = tl.where(stepping, load(next_values, sizes, rows, ahead, stepping, DIMS, DTYPE), v_beyond)

        flagged, value = flagged_rows(boundary, sizes, rows, row_mask, ahead, T, START, PLAIN, DIMS, DTYPE)
        total += tl.where(active & flagged, scaled(discount, value), 0.0)
        active = active & (flagged == 0)
        at_edge = active & (ahead == T - 1)
        total += tl.where(at_edge, scaled(discount, v_beyond), 0.0)
        active = active & (at_edge == 0)
        ahead += 1

    tl.store(address(outputs[0], sizes, rows, t, DIMS), total, mask=mask)
