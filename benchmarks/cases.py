"""What is measured: ops with their arguments, shapes, and the tiers that combine them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

LAYOUTS = ("NT", "TN")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
N_STEP = 5
CHANCE_OF_END = 0.01

Window = dict[str, torch.Tensor]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    rows: int
    steps: int
    actions: int = 4
    """Of Retrace; the other ops have no such axis."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.steps}"


@dataclass(frozen=True)
class Op:
    """A public function, and the keyword arguments that it is measured with."""

    name: str
    arguments: Callable[[Window], Arguments]
    results: tuple[str, ...]
    truncates: bool = True
    has_out: bool = True
    scans_forward: bool = False


@dataclass(frozen=True)
class Case:
    """One comparison: ours and the baselines on the same tensors."""

    op: Op
    layout: str
    shape: Shape
    dtype: str = "float32"
    truncated: bool = False

    @property
    def time_dim(self) -> int:
        """Of per-step tensors, which may have an action axis behind."""
        return 1 if self.layout == "NT" else 0

    @property
    def actions(self) -> int:
        return self.shape.actions if self.op.name == "retrace" else 0

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the comparison in a stored row."""
        return {
            "op": self.op.name,
            "layout": self.layout,
            "N": self.shape.rows,
            "T": self.shape.steps,
            "A": self.actions,
            "dtype": self.dtype,
            "truncated": self.truncated,
        }

    def __str__(self) -> str:
        extra = f" A={self.actions}" * bool(self.actions) + " truncated" * self.truncated
        return f"{self.op.name} {self.layout} {self.shape} {self.dtype}{extra}"


def _pick(window: Window, *names: str) -> Arguments:
    """Those of the names that the window has: truncations are there or not."""
    return {name: window[name] for name in names if name in window}


_DISCOUNT = {"gamma": 0.99}
_TRACE = {"gamma": 0.99, "lambda_": 0.95}
_ENDS = ("rewards", "terminated", "truncated")
_BOUNDARY = (*_ENDS, "bootstrap_values", "last_values")


def _estimator(*names: str, **options: Any) -> Callable[[Window], Arguments]:
    return lambda window: _pick(window, *_BOUNDARY, *names) | options


def _retrace(window: Window) -> Arguments:
    names = (*_ENDS, "log_rhos", "next_q_values", "next_policy_probs")
    return _pick(window, *names) | {"q_values": window["values"]} | _TRACE


def _x(window: Window, **options: Any) -> Arguments:
    return {"x": window["rewards"], "done": window["terminated"]} | options


OPS = {
    op.name: op
    for op in (
        Op("gae", _estimator("values", **_TRACE), ("advantages", "returns")),
        Op("td_lambda_returns", _estimator("values", **_TRACE), ("returns",)),
        Op("discounted_returns", _estimator(**_DISCOUNT), ("returns",)),
        Op("n_step_returns", _estimator("values", n=N_STEP, **_DISCOUNT), ("returns",)),
        Op("vtrace", _estimator("values", "log_rhos", **_TRACE), ("targets", "advantages")),
        Op("retrace", _retrace, ("targets", "advantages")),
        Op("eligibility_traces", lambda w: _x(w, **_TRACE), ("traces",), truncates=False, scans_forward=True),
        Op("episodic_cumsum", lambda w: _x(w), ("sums",), truncates=False, scans_forward=True),
        Op("affine_scan", lambda w: {"alpha": w["rewards"], "beta": w["beta"]}, ("y",), truncates=False),
        Op("normalize_advantages", lambda w: {"advantages": w["rewards"]}, ("normalized",), False, has_out=False),
    )
}


def make_window(case: Case, device: str, seed: int = 0) -> Window:
    """Random tensors for one call of any op, in the case's layout and dtype, generated on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    n, t, a = case.shape.rows, case.shape.steps, case.actions
    size = (n, t) if case.layout == "NT" else (t, n)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device) < p

    window = {"rewards": normal(*size), "values": normal(*size), "last_values": normal(n)}
    if case.op.name in ("vtrace", "retrace"):
        window["log_rhos"] = 0.3 * normal(*size)
    if case.op.name == "affine_scan":
        window["beta"] = torch.rand(*size, generator=generator, device=device)
    if a:
        window["next_q_values"] = normal(*size, a)
        window["next_policy_probs"] = torch.softmax(normal(*size, a), dim=-1)
    if case.truncated:
        window["bootstrap_values"] = normal(*size)
    window = {name: x.to(dtype) for name, x in window.items()}
    window["terminated"] = chance(CHANCE_OF_END)
    if case.truncated:
        window["truncated"] = chance(CHANCE_OF_END)
    return window


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def bytes_read(arguments: Arguments) -> int:
    """Each input once. Of the bootstrap values, which are read only where an episode was cut, the 32-byte sectors with
    such a step."""
    total = 0
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            continue
        if name == "bootstrap_values":
            read = (arguments["truncated"] & ~arguments["terminated"]).flatten()
            lanes = 32 // x.element_size()
            whole = read[: read.numel() // lanes * lanes].reshape(-1, lanes)
            total += 32 * int(whole.any(dim=1).sum()) + x.element_size() * int(read[whole.numel() :].sum())
        else:
            total += x.nbytes
    return total


def _product(rows: Iterable[int], steps: Iterable[int]) -> tuple[Shape, ...]:
    return tuple(Shape(n, t) for t, n in itertools.product(steps, rows))


def _shapes(*texts: str) -> tuple[Shape, ...]:
    return tuple(map(parse_shape, texts))


def parse_shape(text: str) -> Shape:
    """Of "4096x128" (rows x steps), or with actions "4096x128x18"."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", text)
    if not match:
        raise ValueError(f"a shape is ROWSxSTEPS or ROWSxSTEPSxACTIONS, got {text!r}")
    return Shape(*(int(size) for size in match.groups() if size is not None))


HEADLINE_SHAPES = _shapes("4096x128", "16384x512", "4096x2048", "65536x512")
# Where each op's ratio to the compiled scan is a target.
RATIO_SHAPES = _shapes("4096x128", "16384x512")
LONG_SHAPES = _shapes("1x1048576", "8x131072", "64x16384", "64x131072", "256x65536")
FULL_SHAPES = (
    *HEADLINE_SHAPES,
    *_shapes("64x512", "128x1024", "256x1024", "512x128", "512x512", "512x2048", "512x4096", "4096x512", "16384x128"),
    *_shapes("16384x2048", "8192x8192"),
    *_product((4096, 8192, 16384, 32768, 38400), (24, 80, 128)),
    *LONG_SHAPES,
)
SHORT_SHAPES = _product((4096, 8192, 16384, 32768), (8, 16, 24, 32))
PUFFERLIB_SHAPES = (
    *_product((4096, 8192, 16384, 32768), (8, 16, 32, 64, 128)),
    *_product((128, 512, 2048, 8192), (128, 512, 1024, 2048, 4096)),
)
# Steps so many that the traffic is 0.4 to 1.1 GB, more than any cache holds.
RETRACE_SHAPES = tuple(
    Shape(steps // t, t, a)
    for a, steps in ((4, 1 << 23), (18, 1 << 22), (64, 1 << 21))
    for t in (128, 1024, 4096, 8192)
)
# Stable-Baselines3 writes them the other way round, (n_steps, n_envs).
CPU_SHAPES = _shapes("16x5", "8x128", "1x2048", "8x2048", "64x2048", "1024x128", "4096x16", "16384x512")


@dataclass(frozen=True)
class Tier:
    """A named set of cases, and the baselines that are measured beside ours."""

    shapes: tuple[Shape, ...]
    ops: tuple[str, ...]
    baselines: tuple[str, ...]
    layouts: tuple[str, ...] = LAYOUTS
    dtypes: tuple[str, ...] = ("float32",)
    truncations: tuple[bool, ...] = (False,)

    def cases(self) -> Iterator[Case]:
        """Shape by shape, so that a run that is cut short has whole shapes; the plain cases of all shapes first."""
        for dtype, truncated, shape in itertools.product(self.dtypes, self.truncations, self.shapes):
            for name, layout in itertools.product(self.ops, self.layouts):
                op = OPS[name]
                if truncated and not op.truncates:
                    continue
                yield Case(op, layout, shape, dtype, truncated)


_ALL = tuple(OPS)
_PEERS = (
    "eager_loop",
    "compiled_loop",
    "compiled_scan",
    "compiled_associative_scan",
    "torchrl_loop",
    "torchrl_vectorized",
    "jax_scan",
    "jax_associative_scan",
    "pufferlib",
)
TIERS = {
    "headline": Tier(HEADLINE_SHAPES, _ALL, _PEERS),
    "full": Tier(
        FULL_SHAPES,
        _ALL,
        ("compiled_scan", "compiled_associative_scan", "jax_associative_scan"),
        dtypes=("float32", "bfloat16"),
        truncations=(False, True),
    ),
    "short": Tier(SHORT_SHAPES, ("gae", "td_lambda_returns", "discounted_returns", "vtrace"), ()),
    "long": Tier(LONG_SHAPES, _ALL, ()),
    "retrace": Tier(RETRACE_SHAPES, ("retrace",), ()),
    "pufferlib": Tier(PUFFERLIB_SHAPES, ("gae",), ("pufferlib",), layouts=("NT",)),
    "cpu": Tier(CPU_SHAPES, ("gae",), ("sb3", "sb3_patched"), layouts=("TN",)),
}
