"""The versions of PyTorch and Triton that this package is written for, looked at when it is imported."""

from __future__ import annotations

import re
import warnings

import torch

# (name, first version, first version no more). The ends that are tested are in docs/torch.md.
SUPPORTED = (("torch", (2, 7), (3, 0)), ("triton", (3, 3), (4, 0)))


def _parsed(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check() -> None:
    """One warning that names every version outside the window. Without Triton only PyTorch is looked at."""
    versions = {"torch": str(torch.__version__)}
    try:
        import triton
    except ImportError:
        pass
    else:
        versions["triton"] = triton.__version__
    outside = [
        f"{name} {versions[name]} (supported: >={first[0]}.{first[1]}, <{end[0]})"
        for name, first, end in SUPPORTED
        if name in versions and not first <= _parsed(versions[name]) < end
    ]
    if outside:
        warnings.warn(
            f"rl_triton is not made for {' and '.join(outside)}: it may fail, or its results may be wrong; install a "
            "supported version",
            RuntimeWarning,
            stacklevel=2,
        )


check()
