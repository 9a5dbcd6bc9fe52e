"""Starting a compiled Triton kernel through the CUDA driver, past Triton's own launcher.

Triton looks at each argument of each launch anew, tuples entry by entry; here only addresses change from call to call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from rl_triton._plan import Code, NoPlanError, Places

_PACKERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver API."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> Any:
    """cuLaunchKernelEx of the CUDA driver that PyTorch uses. The call is short, so the interpreter lock stays held."""
    try:
        launch = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise NoPlanError("the driver has another name here, or is older than 11.8") from error
    launch.restype = ctypes.c_int
    return launch


def _leaves(types: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """(type, value) of each parameter that reaches the kernel: constants do not, tuples come apart."""
    if isinstance(types, tuple):
        for entry, x in zip(types, value, strict=True):
            yield from _leaves(entry, x)
    elif types != "constexpr":
        yield types, value


class DirectKernel:
    """A compiled kernel with all its arguments but the addresses in place."""

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], blocks: int, device: torch.device, places: Places
    ) -> None:
        """kernel: what Triton returned from a launch. arguments: what it was launched with, by name."""
        try:
            signature, metadata, self.function = kernel.src.signature, kernel.metadata, kernel.function
        except AttributeError as error:
            raise NoPlanError("kernels of this Triton version do not tell what they were compiled for") from error
        if any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
            raise NoPlanError("the kernel wants scratch memory")
        if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
            raise NoPlanError("the kernel is launched in clusters")
        constants: list[int] = []
        self.read: list[tuple[int, int]] = []
        """(slot among the kernel's parameters, position among the call's tensors)"""
        self.written: list[tuple[int, int]] = []
        """(slot, number of the tensor that the call made)"""
        for kind, value in (leaf for name, types in signature.items() for leaf in _leaves(types, arguments[name])):
            if kind.startswith("*"):
                made, number = places.find(value.data_ptr())
                (self.written if made else self.read).append((len(constants), number))
                constants.append(0)
            elif kind in _PACKERS:
                constants.append(int.from_bytes(bytes(_PACKERS[kind](value)), "little"))
            else:
                raise NoPlanError(f"a parameter of type {kind}")
        self.constants = (*constants, 0, 0)  # behind the parameters, the scratch pointers of newer versions: null here
        self.kernel = kernel  # its module stays loaded as long as the plan lives
        self.config = ((blocks, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        self.device = device.index
        self.launch = _driver()
        self.local = threading.local()

    def write(self, code: Code, addresses: list[str], made: list[str]) -> None:
        local, prepare = code.name(self.local), code.name(self._prepare)
        code.add(
            f"if {code.name(torch._C._cuda_getDevice)}() != {self.device}: return None",
            f"try: parameters, config, call = {local}.prepared",
            f"except AttributeError: parameters, config, call = {prepare}()",
            *(f"parameters[{slot}] = {addresses[i]}" for slot, i in self.read),
            *(f"parameters[{slot}] = {made[i]}.data_ptr()" for slot, i in self.written),
            f"config.stream = {code.name(torch._C._cuda_getCurrentRawStream)}({self.device})",
            # What fails here, as in a thread without a context, the ordinary path mends, or tells what is wrong.
            f"if {code.name(self.launch)}(*call): return None",
        )

    def _prepare(self) -> tuple[Any, Any, Any]:
        """This thread's parameters and configuration, and the arguments of the driver's function, which point there."""
        block = (ctypes.c_uint64 * len(self.constants))(*self.constants)
        start = ctypes.addressof(block)
        entries = (ctypes.c_void_p * len(block))(*(start + 8 * i for i in range(len(block))))
        config = _LaunchConfig(*self.config)
        # As ctypes passes them on: given numbers and arrays, it would convert them in each call.
        call = ctypes.byref(config), ctypes.c_void_p.from_param(self.function), ctypes.byref(entries), None
        self.local.prepared = memoryview(block).cast("B").cast("Q"), config, call
        return self.local.prepared
