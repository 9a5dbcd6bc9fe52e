"""Windows for the tests: hypothesis strategies for arguments of the backward estimators, and how to compare."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from rl_triton._config import LaunchConfig
from rl_triton.testing import assert_close

# Several tiles in time and rows, cheap in the interpreter: chunks along either axis of a tile.
SMALL = LaunchConfig(rows=8, chunks=4, steps=2, num_warps=1)
SMALL_TIME_MAJOR = LaunchConfig(rows=16, chunks=2, steps=2, axis=0, num_warps=1, prefetch=True, parts=2)
SMALL_SPLIT = LaunchConfig(rows=8, chunks=4, steps=1, num_warps=1, parts=3)
SMALL_CONFIGS = (SMALL, SMALL_TIME_MAJOR, SMALL_SPLIT)

EPS = {torch.float64: 2**-53, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def examples(n: int) -> int:
    """Of a property: n on a machine with a GPU, a third of them where the kernels run in Triton's interpreter."""
    return n if torch.cuda.is_available() else n // 3


def assert_result(actual, expected, dtype, name="result"):
    """Within a few roundings of the float64 oracle, relative to the size of the results; 16-bit results are rounded
    once more when stored."""
    assert actual.dtype == dtype, (name, actual.dtype)
    bound = 128 * EPS[dtype]
    assert_close(actual, expected, max_error=bound, rms_error=bound, name=name)


def restride(x: torch.Tensor, order: list[int], step: int) -> torch.Tensor:
    """The same tensor with its axes in memory in another order, every `step`-th element of a larger block."""
    inverse = [order.index(d) for d in range(x.dim())]
    block = torch.full(
        (*(x.shape[d] for d in order), step), float("nan") if x.is_floating_point() else 1, dtype=x.dtype
    )
    view = block[..., 0].permute(inverse)
    view.copy_(x)
    return view.to(x.device) if x.device.type == "cpu" else _on_device(view, x.device)


def _on_device(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    base = view.as_strided((extent,), (1,)).to(device)
    return base.as_strided(view.shape, view.stride())


@st.composite
def windows(draw, *, device="cpu", max_steps=40, max_rows=6, with_values=True):
    """(tensors, options) of one call: any batch shape, layout, strides, flag dtype and boundary arguments. Entries that
    must not be read hold NaN where they can be told."""
    n_axes = draw(st.integers(1, 4))
    time_dim = draw(st.integers(0, n_axes - 1))
    shape = [draw(st.integers(1, 3 if n_axes > 2 else max_rows)) for _ in range(n_axes)]
    shape[time_dim] = draw(st.integers(1, max_steps))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    flag_dtype = draw(st.sampled_from([torch.bool, torch.bool, torch.float32, torch.int64]))
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 0.8]))
    rows = shape[:time_dim] + shape[time_dim + 1 :]

    order = draw(st.permutations(range(n_axes)))
    step = draw(st.sampled_from([1, 1, 2]))

    def place(x):
        x = x.to(device)
        return restride(x, list(order), step) if x.dim() == n_axes else x

    def normal(size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    def flag(size, p=density):
        on = torch.rand(size, generator=generator) < p
        return on.to(flag_dtype)

    tensors = {"rewards": normal(shape), "terminated": flag(shape)}
    if with_values:
        tensors["values"] = normal(shape)
    options = {"time_dim": draw(st.sampled_from([time_dim, time_dim - n_axes]))}
    start = draw(st.booleans())
    if start:
        options |= {"flags_at": "start", "last_done": flag(rows)}
    source = draw(st.sampled_from(["last", "last", "none", "next"]))
    if source == "next":
        tensors["next_values"] = normal(shape)
    else:
        options["last_values"] = normal(rows) if source == "last" else None
    if not start and draw(st.booleans()):
        tensors["truncated"] = flag(shape)
        if source != "next":
            unread = (tensors["truncated"] == 0) | (tensors["terminated"] != 0)
            tensors["bootstrap_values"] = normal(shape).masked_fill(unread, float("nan"))
    if draw(st.booleans()):
        tensors["valid"] = flag(shape, draw(st.sampled_from([0.0, 0.5, 0.9])))
        for name in ("rewards", "values"):
            if name in tensors:
                tensors[name] = tensors[name].masked_fill(tensors["valid"] == 0, float("nan"))
    if draw(st.booleans()):
        options["carry"] = normal(rows)
    for name in ("gamma", "lambda_"):
        kind = draw(st.sampled_from(["float", "float", "0-d", "per step"]))
        x = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
        if kind == "float":
            options[name] = x
        elif kind == "0-d":
            options[name] = torch.tensor(x, dtype=dtype, device=device)
        else:
            some = [size if draw(st.booleans()) else 1 for size in shape]
            options[name] = torch.rand(some, generator=generator).to(dtype).to(device)
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return {name: place(x) for name, x in tensors.items()}, options, dtype
