"""Normalisation of advantages."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton import _backend, _checks, _library
from rl_triton._plan import planned


@planned
def normalize_advantages(
    advantages: torch.Tensor,
    *,
    valid: torch.Tensor | None = None,
    dims: int | tuple[int, ...] | None = None,
    unbiased: bool = True,
    eps: float = 1e-8,
    process_group: Any = None,
) -> torch.Tensor:
    """Zero mean and unit spread, over valid steps only.

        y = (x - mean) / (std + eps)

    Statistics are sums in float64 over deviations from a first mean, so that neither many elements nor a mean far from
    zero costs accuracy (Chan, Golub & LeVeque 1983, eq. 1.7). On a GPU two kernels do it, where all axes share one mean
    and the elements fill their memory; tensor operations do it elsewhere, and where a compiler or a transform looks on,
    which then fuses or batches them. A group of one element, or one without
    spread, gives 0, never NaN. Nothing is read on the host.

    Args:
        advantages: x, any shape; float16, bfloat16, float32 or float64.
        valid: nonzero where the element counts; the others, whatever they hold, give 0. Shape of `advantages`.
        dims: the axes that share one mean and spread; None: all.
        unbiased: divide by n - 1, not n.
        eps: added to the standard deviation; a finite number, at least 0.
        process_group: a torch.distributed group, whose members pool their statistics: every one of them must call.

    Returns:
        y, the shape and dtype of `advantages`, without an autograd graph.

    Raises:
        ValueError: a shape, device, axis or `eps` that does not fit.
        TypeError: an argument of the wrong type or dtype.
    """
    op = "normalize_advantages"
    _checks.tensor(op, "advantages", advantages, _checks.FLOATS, "a float dtype")
    if valid is not None:
        _checks.like(op, "valid", _checks.flags(op, "valid", valid), "advantages", advantages, -1)
    _checks.same_device(op, (("advantages", advantages), ("valid", valid)))
    axes = _axes(op, advantages, dims)
    eps = _checks.nonnegative(op, "eps", eps)
    if advantages.numel() == 0 and process_group is None:
        return torch.empty_like(advantages)

    everything = len(axes) == advantages.dim() and process_group is None and not _library.traced(advantages)
    if everything and _backend.runs_kernels(op, advantages.device) and _one_order(advantages, valid):
        from rl_triton import _moments

        return _moments.normalize(advantages.detach(), valid, unbiased, eps)
    with torch.no_grad():
        x = advantages.detach()
        keep = None if valid is None else valid != 0
        kept = x if keep is None else torch.where(keep, x, 0)
        shape = [1 if d in axes else size for d, size in enumerate(x.shape)]

        def total(y: torch.Tensor) -> torch.Tensor:
            y = y.sum(dim=axes, keepdim=True, dtype=torch.float64) if axes else y.double()
            return _reduced(y, process_group, "SUM")

        def extreme(name: str) -> torch.Tensor:
            fill = float("inf") if name == "MIN" else float("-inf")
            y = x if keep is None else torch.where(keep, x, fill)
            if y.numel() == 0:
                y = torch.full(shape, fill, dtype=x.dtype, device=x.device)
            elif axes:
                y = y.amin(dim=axes, keepdim=True) if name == "MIN" else y.amax(dim=axes, keepdim=True)
            return _reduced(y, process_group, name)

        ones = torch.ones((), dtype=torch.float64, device=x.device).expand(x.shape)
        count = total(ones if keep is None else keep)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        shift = (total(kept) / count).to(wide)  # any value near the mean will do
        deviation = kept.to(wide) - shift
        if keep is not None:
            deviation = torch.where(keep, deviation, 0)
        moved = total(deviation)
        squares = total(deviation.double().square()) - moved * moved / count
        std = (squares.clamp(min=0) / (count - 1 if unbiased else count)).sqrt()
        correction = (moved / count).to(wide)
        normalized = (deviation - correction) / (std + eps).to(wide)
        nothing = extreme("MIN") >= extreme("MAX")  # no spread: one element, equal ones, or none
        if keep is not None:
            nothing = nothing | ~keep
        return torch.where(nothing, 0, normalized).to(x.dtype)


def _axes(op: str, x: torch.Tensor, dims: Any) -> tuple[int, ...]:
    if dims is None:
        return tuple(range(x.dim()))
    given = (dims,) if type(dims) is int else dims
    if not isinstance(given, tuple) or not all(type(d) is int for d in given):
        raise TypeError(f"{op}: dims must be an int or a tuple of ints, got {dims!r}")
    if not all(-x.dim() <= d < x.dim() for d in given):
        raise ValueError(f"{op}: dims={dims!r} is out of range for advantages of shape {list(x.shape)}")
    axes = tuple(d % x.dim() for d in given)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: dims={dims!r} names an axis twice")
    return axes


def _one_order(x: torch.Tensor, valid: torch.Tensor | None) -> bool:
    """Whether the elements of both fill their memory in the same order."""
    axes = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in axes:
        if stride != expected:
            return False
        expected *= size
    return valid is None or valid.stride() == x.stride()


def _reduced(x: torch.Tensor, process_group: Any, operation: str) -> torch.Tensor:
    if process_group is None:
        return x
    import torch.distributed as dist

    x = x.contiguous()
    dist.all_reduce(x, op=getattr(dist.ReduceOp, operation), group=process_group)
    return x
