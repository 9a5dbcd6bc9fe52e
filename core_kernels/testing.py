"""Tools that tests, adapters' tests and benchmarks share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    max_error: float,
    rms_error: float | None = None,
    name: str = "result",
) -> None:
    """Compare on the largest and on the root-mean-square error, both relative to the RMS of the finite `expected`.

    NaN and infinities must stand in the same places. `rms_error` defaults to a quarter of `max_error`: the RMS hides
    one wrong boundary column, the maximum hides a small error everywhere.

    Raises AssertionError that lists the worst elements.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    got, want = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = torch.isfinite(want)
    same_kind = torch.where(finite, torch.isfinite(got), (got == want) | (got.isnan() & want.isnan()))
    if not same_kind.all():
        where = (~same_kind).nonzero()[:5].tolist()
        raise AssertionError(f"{name}: finite, NaN or inf where it should not be, first at {where}")
    if not finite.any():
        return
    error = torch.where(finite, (got - want).abs(), 0.0)
    scale = max(want[finite].square().mean().sqrt().item(), 1e-30)
    largest = error.max().item() / scale
    rms = error[finite].square().mean().sqrt().item() / scale
    rms_error = max_error / 4 if rms_error is None else rms_error
    if largest > max_error or rms > rms_error or math.isnan(largest):
        worst = error.flatten().argsort(descending=True)[:5]
        lines = [
            f"  {tuple(int(k) for k in torch.unravel_index(i, want.shape))}: got {got.flatten()[i]:.9g}, "
            f"expected {want.flatten()[i]:.9g}"
            for i in worst
        ]
        raise AssertionError(
            f"{name}: max error {largest:.3g} (allowed {max_error:.3g}), RMS error {rms:.3g} (allowed "
            f"{rms_error:.3g}), relative to RMS {scale:.3g}; worst:\n" + "\n".join(lines)
        )


def make_rollout(
    n_rows: int,
    n_steps: int,
    *,
    layout: str = "NT",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    flag_dtype: torch.dtype = torch.bool,
    terminated: float = 0.1,
    truncated: float | None = None,
    valid: float | None = None,
    values_at: float = 0.0,
    poison: bool = True,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Random arguments of a backward estimator: rewards, values, terminated and last_values; with `truncated` (a
    probability) truncated and bootstrap_values; with `valid` a validity mask.

    layout: "NT" or "TN". values_at: the mean of the values. poison: entries that must not be read hold NaN
    (bootstrap values where nothing was truncated, everything on an invalid row but the flags, the edge value of a row
    that ends on a cut).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(n_rows, n_steps, generator=generator) < p

    nan = float("nan")
    ends = chance(terminated)
    rollout = {"rewards": normal(n_rows, n_steps), "values": values_at + normal(n_rows, n_steps), "terminated": ends}
    last = values_at + normal(n_rows)
    cut = ends
    if truncated is not None:
        cuts = chance(truncated)
        boot = values_at + normal(n_rows, n_steps)
        if poison:
            boot = torch.where(cuts & ~ends, boot, nan)
        rollout |= {"truncated": cuts, "bootstrap_values": boot}
        cut = ends | cuts
    if valid is not None:
        rollout["valid"] = chance(valid)
        if poison:
            for key in ("rewards", "values"):
                rollout[key] = torch.where(rollout["valid"], rollout[key], nan)
    elif poison and n_steps:
        last = torch.where(cut[:, -1], nan, last)

    def placed(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device=device, dtype=flag_dtype if x.dtype == torch.bool else dtype)
        return x.t().contiguous() if layout == "TN" and x.dim() == 2 else x

    return {key: placed(x) for key, x in rollout.items()} | {"last_values": placed(last)}


@contextlib.contextmanager
def poisoned_allocation() -> Iterator[None]:
    """Inside the block `torch.empty` and `torch.empty_like` return NaN, so that an element that nobody writes shows."""
    real_empty, real_empty_like = torch.empty, torch.empty_like

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(real_empty(*args, **kwargs))

    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(real_empty_like(*args, **kwargs))

    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "empty_like", empty_like):
        yield
