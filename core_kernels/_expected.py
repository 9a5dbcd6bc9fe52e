"""Expectations over actions, as a tensor: for the scan, where a thread cannot read all actions of a step in one load.

Done within the scan, whose tiles give a thread a chunk of steps, what is read of each step would have to move between
threads eight times a chunk, and all of it would be in registers at once. Here a thread has nothing else to hold, and
lanes lie along actions and steps as the memory does. The scan reads one number a step more.
"""

from __future__ import annotations

from rl_triton._tile import address, expected
from rl_triton._triton import jit, tl


@jit
def expected_kernel(
    operand,
    result,
    sizes,
    n_rows,
    T,
    ACTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    DTYPE: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    TIME: tl.constexpr,
):
    """One tile of ROWS rows and TIME steps a program."""
    program = tl.program_id(0).to(INDEX)
    blocks = tl.cdiv(T, TIME)
    rows = program // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    t = program % blocks * TIME + tl.arange(0, TIME)[None, :]
    mask = (rows < n_rows) & (t < T)
    x = expected(operand, sizes, rows, t, mask, ACTIONS, BLOCK, GROUP, DIMS, DTYPE)
    tl.store(address(result, sizes, rows, t, DIMS), x, mask=mask)
