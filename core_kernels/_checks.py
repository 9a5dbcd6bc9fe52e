"""Argument checks: the only place where the wording of errors lives.

Each names the argument, what came, what was wanted and what to pass instead. Nothing here reads device data, so no
check waits for a device, and all of them run before any kernel does.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rl_triton._algorithm import Taken

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
     torch.uint16, torch.uint32, torch.uint64}
)  # fmt: skip
# What stands for a tensor while a call is traced: it has a shape, a dtype and a device, but no memory.
STAND_INS = (FakeTensor, FunctionalTensor)
_PLAIN = (torch.Tensor, torch.nn.Parameter, *STAND_INS)


# With RL_TRITON_CHECK=1, read at import, calls also look at their data, and wait for the device to do it.
READS_DATA = os.environ.get("RL_TRITON_CHECK") == "1"


class Required:
    """The default of an argument that has no silent default: None is a value with a meaning of its own."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED = Required()


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _type_error(op: str, message: str) -> NoReturn:
    raise TypeError(f"{op}: {message}")


def _value_error(op: str, message: str) -> NoReturn:
    raise ValueError(f"{op}: {message}")


def tensor(op: str, name: str, x: Any, dtypes: frozenset[torch.dtype], kind: str) -> torch.Tensor:
    """A plain strided tensor on a CPU or CUDA device with one of `dtypes`."""
    if type(x) not in _PLAIN:
        if isinstance(x, np.ndarray):
            _type_error(op, f"{name} is a numpy.ndarray; pass torch.from_numpy({name}), which shares its memory")
        if isinstance(x, torch.Tensor):
            _type_error(
                op,
                f"{name} is a {type(x).__name__}; tensor subclasses are not supported: pass the plain tensor, for "
                f"example {name}.as_subclass(torch.Tensor)",
            )
        _type_error(op, f"{name} must be a torch.Tensor, got {type(x).__name__}")
    _in_plain_memory(op, name, x)
    if x.device.type not in ("cuda", "cpu"):
        _value_error(op, f"{name} is on device '{x.device}'; supported are 'cuda' and 'cpu': pass {name}.to('cpu')")
    if x.dtype not in dtypes:
        _type_error(op, f"{name} has dtype {x.dtype}, but {kind} is needed: pass {name}.to(torch.float32)")
    return x


def _in_plain_memory(op: str, name: str, x: torch.Tensor) -> None:
    """The elements of x lie in memory as they are, at its strides."""
    if x.layout is not torch.strided:
        _type_error(op, f"{name} must be a strided tensor, got layout {x.layout}; pass {name}.to_dense()")
    if not torch.compiler.is_compiling() and x.is_neg():  # a compiler writes such views out
        _value_error(op, f"{name} is a negated view (as of z.conj().imag), not memory: pass {name}.resolve_neg()")


def real(op: str, name: str, x: Any) -> torch.Tensor:
    """Numbers: float16, bfloat16, float32, float64, or integers, which count as the default float dtype."""
    return tensor(op, name, x, FLOATS | INTEGERS, "a float or integer dtype")


def flags(op: str, name: str, x: Any) -> torch.Tensor:
    """Flags of any dtype; nonzero is true."""
    return tensor(op, name, x, FLOATS | INTEGERS, "a bool, integer or float dtype")


def integers(op: str, name: str, x: Any) -> torch.Tensor:
    """Indices of any integer dtype."""
    return tensor(op, name, x, INTEGERS - {torch.bool}, "an integer dtype")


def time_axis(op: str, rewards_name: str, rewards: torch.Tensor, time_dim: Any) -> int:
    """The position of the time axis, counted from the front."""
    if type(time_dim) is not int:
        _type_error(op, f"time_dim must be an int, got {type(time_dim).__name__}")
    n_axes = rewards.dim()
    if n_axes == 0:
        _value_error(op, f"{rewards_name} is a single number; it needs a time axis: pass shape [T], [N, T] or [T, N]")
    if not -n_axes <= time_dim < n_axes:
        _value_error(op, f"time_dim={time_dim} is out of range for {rewards_name} of shape {_shape(rewards.shape)}")
    return time_dim % n_axes


def _subscript(time_dim: int, n_axes: int, index: str) -> str:
    if time_dim == n_axes - 1 and n_axes > 1:
        return f"[..., {index}]"
    return "[" + ":, " * time_dim + index + "]"


def like(op: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor, time_dim: int) -> None:
    """x has the shape of `other`, exactly."""
    shape, wanted = x.shape, other.shape
    if shape == wanted:
        return
    message = f"{name} has shape {_shape(shape)}, but {other_name} has shape {_shape(wanted)}; they must be equal"
    longer = (*wanted[:time_dim], wanted[time_dim] + 1, *wanted[time_dim + 1 :])
    if tuple(shape) == longer and name == "values":
        steps = _subscript(time_dim, len(wanted), ":-1")
        last = _subscript(time_dim, len(wanted), "-1")
        message += f". It is one step longer along time: pass values{steps} and last_values=values{last}"
    elif tuple(shape) == (*wanted, 1):
        message += f". It has a trailing unit axis: pass {name}.squeeze(-1)"
    elif (*shape, 1) == tuple(wanted):
        message += f". {other_name} has a trailing unit axis: pass {name}.unsqueeze(-1)"
    elif len(shape) == 2 and tuple(shape) == tuple(reversed(wanted)):
        message += f". It looks transposed: pass {name}.t(), and time_dim=0 if all are [T, N]"
    _value_error(op, message)


def with_actions(op: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """x has the shape of `other` with one axis appended."""
    if x.dim() != other.dim() + 1 or x.shape[:-1] != other.shape or x.shape[-1] == 0:
        _value_error(
            op,
            f"{name} has shape {_shape(x.shape)}, but needs that of {other_name}, {_shape(other.shape)}, with an axis "
            "of at least one action appended",
        )


def with_features(op: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """x has the shape of `other`, or that with a feature axis appended; it has one axis more."""
    if x.shape[:-1] != other.shape:
        _value_error(
            op,
            f"{name} has shape {_shape(x.shape)}, but needs that of {other_name}, {_shape(other.shape)}, with or "
            "without a feature axis appended",
        )


def per_row(op: str, name: str, x: torch.Tensor, other_name: str, other: torch.Tensor, time_dim: int) -> None:
    """x has the shape of `other` without its time axis, exactly."""
    wanted = (*other.shape[:time_dim], *other.shape[time_dim + 1 :])
    if tuple(x.shape) == wanted:
        return
    message = (
        f"{name} has shape {_shape(x.shape)}, but needs one entry per row, shape {_shape(wanted)}: that of "
        f"{other_name}, {_shape(other.shape)}, without its time axis (time_dim={time_dim})"
    )
    if tuple(x.shape) == (*wanted, 1):
        message += f". Pass {name}.squeeze(-1)"
    elif (*x.shape, 1) == wanted:
        message += f". Pass {name}.unsqueeze(-1)"
    elif tuple(x.shape) == (1, *wanted):
        message += f". Pass {name}.squeeze(0)"
    elif x.dim() == other.dim() and tuple(x.shape) == tuple(other.shape):
        message += f". Pass its last step, {name}{_subscript(time_dim, other.dim(), '-1')}"
    _value_error(op, message)


def factor(op: str, name: str, x: Any, other_name: str, other: torch.Tensor) -> float | torch.Tensor:
    """A float, or a tensor (0-d or per step) as a view of `other`'s shape. A tensor is never read on the host."""
    if type(x) is float:
        return x
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        return float(x)
    if not isinstance(x, torch.Tensor) and not isinstance(x, np.ndarray):
        _type_error(op, f"{name} must be a float or a tensor, got {type(x).__name__}")
    x = tensor(op, name, x, FLOATS, "a float dtype")
    if x.dim() not in (0, other.dim()) or any(
        size not in (1, wanted) for size, wanted in zip(x.shape, other.shape if x.dim() else (), strict=True)
    ):
        _value_error(
            op,
            f"{name} has shape {_shape(x.shape)}; a tensor {name} is 0-d, or has as many axes as {other_name}, "
            f"{_shape(other.shape)}, each of size 1 or equal",
        )
    return x if x.shape == other.shape else x.expand(other.shape)


def nonnegative(op: str, name: str, x: Any) -> float:
    """A finite number that is not negative, known on the host."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        _type_error(op, f"{name} must be a float, got {type(x).__name__}")
    x = float(x)
    if not 0 <= x < float("inf"):
        _value_error(op, f"{name} must be finite and at least 0, got {x}")
    return x


def same_device(op: str, named: Iterable[tuple[str, Any]]) -> torch.device:
    """All tensors among `named` are on one device."""
    first_name, device = None, None
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            continue
        if device is None:
            first_name, device = name, x.device
        elif x.device != device:
            _value_error(
                op,
                f"{name} is on {x.device}, but {first_name} is on {device}; all tensors must be on one device: "
                f"pass {name}.to('{device}')",
            )
    if device is None:
        _type_error(op, "no tensor was given")
    return device


def result_dtype(tensors: Iterable[torch.Tensor | None]) -> torch.dtype:
    """Promotion over the tensors; integers count as the default float dtype."""
    promoted = None
    for x in tensors:
        if x is None:
            continue
        dtype = x.dtype if x.dtype in FLOATS else torch.get_default_dtype()
        if promoted is None:
            promoted = dtype
        elif dtype is not promoted:
            promoted = torch.promote_types(promoted, dtype)
    return torch.get_default_dtype() if promoted is None else promoted


class _Extent:
    """A tensor's memory, as numpy's overlap solver wants it: addresses and strides, never read."""

    def __init__(self, x: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "strides": tuple(stride * x.element_size() for stride in x.stride()),
            "typestr": f"|V{x.element_size()}",
        }


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    if isinstance(x, STAND_INS) or isinstance(y, STAND_INS):
        return False  # looked at when the call is made with memory
    if x.device != y.device or not x.numel() or not y.numel():
        return False
    # By address: tensors on one numpy array have storages of their own.
    try:
        return np.shares_memory(np.asarray(_Extent(x)), np.asarray(_Extent(y)), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _may_overlap_itself(x: torch.Tensor) -> bool:
    """Whether two elements of x may share memory: an axis steps less far than the axes within it reach."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def outputs(
    op: str,
    out: Any,
    names: Sequence[str],
    like: torch.Tensor,
    dtype: torch.dtype,
    inputs: Iterable[tuple[str, Any]],
) -> tuple[torch.Tensor, ...]:
    """The tensors that the results go to: new ones, or those of `out` if they fit and share no memory with an input."""
    if out is None:
        return tuple(torch.empty(like.shape, dtype=dtype, device=like.device) for _ in names)
    given = out if len(names) > 1 else (out,)
    if len(names) > 1 and (not isinstance(out, tuple) or len(out) != len(names)):
        got = f"{len(out)} entries" if isinstance(out, tuple) else type(out).__name__
        _type_error(op, f"out must be a tuple of {len(names)} tensors ({', '.join(names)}), got {got}")
    labels = [f"out[{i}] ({name})" for i, name in enumerate(names)] if len(names) > 1 else ["out"]
    inputs = [(name, x) for name, x in inputs if isinstance(x, torch.Tensor)]
    for label, x in zip(labels, given, strict=True):
        if type(x) not in _PLAIN:
            _type_error(op, f"{label} must be a torch.Tensor, got {type(x).__name__}")
        _in_plain_memory(op, label, x)
        if x.shape != like.shape:
            _value_error(op, f"{label} has shape {_shape(x.shape)}, but the result has shape {_shape(like.shape)}")
        if x.dtype != dtype:
            _type_error(op, f"{label} has dtype {x.dtype}, but the result has dtype {dtype}")
        if x.device != like.device:
            _value_error(op, f"{label} is on {x.device}, but the inputs are on {like.device}")
        if x.requires_grad:
            _value_error(op, f"{label} requires grad, and results carry no graph: pass {label.split()[0]}.detach()")
        if _may_overlap_itself(x):
            _value_error(
                op,
                f"{label} has shape {_shape(x.shape)} and strides {_shape(x.stride())}, a view in which several "
                "elements may be one (as an expanded tensor's are): pass a tensor of its own",
            )
        for name, y in inputs:
            if _share_memory(x, y):
                _value_error(op, f"{label} shares memory with {name}; results cannot overwrite an input: pass another")
    for i, x in enumerate(given):
        for j in range(i):
            if _share_memory(x, given[j]):
                _value_error(op, f"{labels[i]} shares memory with {labels[j]}")
    for x in given:
        torch.autograd.graph.increment_version(x)
    return tuple(given)


def no_out(op: str, out: Any) -> None:
    """Results that carry a graph are not written into a tensor of the caller's."""
    if out is not None:
        _value_error(
            op,
            "out was given with differentiable=True, but results that carry a graph are new tensors; pass out=None, or "
            "differentiable=False for results without a graph",
        )


def data(op: str, inputs: Mapping[str, Any], factors: Mapping[str, Any], boundary: Any) -> None:
    """What only the data can tell: flags that are not 0 or 1, NaN in a step that counts, an action that is not there,
    a behavior probability of 0. Waits for the device."""
    for name in ("terminated", "truncated", "valid", "last_done", "done"):
        x = getattr(boundary, name, None)
        if x is not None:
            none_is(op, (x != 0) & (x != 1), f"{name} holds numbers other than 0 and 1 (nonzero counts as 1)")
    valid = getattr(boundary, "valid", None)

    def counts(bad: torch.Tensor) -> torch.Tensor:
        return bad if valid is None else bad & (valid != 0)

    for name, x in inputs.items():
        if isinstance(x, Taken):
            n_actions = x.table.shape[-1]
            bad = counts((x.actions < 0) | (x.actions >= n_actions))
            none_is(op, bad, f"actions holds indices outside 0..{n_actions - 1}")
            x = x.table.gather(-1, x.actions.long().clamp(0, n_actions - 1).unsqueeze(-1)).squeeze(-1)
        none_is(op, counts(x != x), f"{name} holds NaN in steps that count")
        if name == "behavior_probs":
            none_is(op, counts(x == 0), "behavior_probs holds 0 for taken actions, which makes the ratio infinite")
    for name, x in factors.items():
        if x is not None and name not in inputs:
            x = torch.as_tensor(x)
            none_is(op, counts(x != x) if x.dim() else x != x, f"{name} is NaN in steps that count")


def none_is(op: str, bad: torch.Tensor, problem: str) -> None:
    """Raise where any is bad. Waits for the device."""
    if bad.any():
        where = bad.nonzero()
        _value_error(op, f"{problem}: {len(where)} of {bad.numel()}, the first at {tuple(where[0].tolist())}")
