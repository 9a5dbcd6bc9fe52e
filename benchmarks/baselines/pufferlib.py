"""PufferLib 3.0's CUDA kernel, built from two source files of its sdist (MIT), which are given by path.

`pufferlib/extensions/pufferlib.cpp` declares the op, `pufferlib/extensions/cuda/pufferlib.cu` holds the kernel. Both
include headers of PyTorch, so the first build takes minutes; it is kept in build/compiled.

Its convention: all tensors are contiguous float32 [N, T]; the reward and the flag of a transition are stored one step
later, with the observation that they arrived with. So T entries hold T - 1 transitions; the last advantage is not
written, and returns are not computed. Importance ratios are always read; here they are 1.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.provenance import COMPILED

_sources: tuple[Path, Path] | None = None
_built = False


def use(cpp: Path, cuda: Path) -> None:
    """Build from these files when the kernel is first wanted."""
    global _sources
    for path in (cpp, cuda):
        if not path.is_file():
            raise FileNotFoundError(f"PufferLib's source {path} is not there")
    _sources = (cpp.resolve(), cuda.resolve())


def unusable(device: str) -> str | None:
    """Why the kernel cannot be measured; builds it otherwise."""
    if _sources is None:
        return "its source files were not given (--pufferlib-cpp, --pufferlib-cuda)"
    if torch.device(device).type != "cuda":
        return "it needs a CUDA device"
    try:
        _build(device)
    except Exception as error:  # whatever a compiler can fail with
        return f"the build failed: {error}"
    return None


def _build(device: str) -> None:
    global _built
    if _built or _sources is None:
        return
    from torch.utils import cpp_extension

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability(device)))
    folder = COMPILED / "pufferlib"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(path) for path in _sources]
    # The name is that of the module whose PyInit the first file defines.
    cpp_extension.load("_C", sources, build_directory=str(folder), is_python_module=False, verbose=False)
    _built = True


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    importance: torch.Tensor,
    gamma: float,
    lambda_: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """[N, T]; the last column stays as it was."""
    torch.ops.pufferlib.compute_puff_advantage(values, rewards, dones, importance, out, gamma, lambda_, 1.0, 1.0)
    return out
