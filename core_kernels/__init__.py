"""Credit assignment for reinforcement learning as fused scans: Triton on a GPU, numba on a CPU."""

if __name__ != "rl_triton":
    raise ImportError("this folder is installed as rl_triton; run pip install -e . and import rl_triton")

from rl_triton._backend import backend
from rl_triton.estimators.affine import affine_scan
from rl_triton.estimators.gae import GAE, gae

__version__ = "0.1.0"

__all__ = ["GAE", "__version__", "affine_scan", "backend", "gae"]
