"""Credit assignment for reinforcement learning as fused scans: Triton on a GPU, numba on a CPU."""

if __name__ != "rl_triton":
    raise ImportError("this folder is installed as rl_triton; run pip install -e . and import rl_triton")

from rl_triton import _versions  # noqa: F401 - looks at them, before what another version may not have

# isort: split
from rl_triton import _library
from rl_triton._backend import backend
from rl_triton.estimators.adjoint import adjoint as _adjoint
from rl_triton.estimators.affine import affine_scan
from rl_triton.estimators.discounted import discounted_returns
from rl_triton.estimators.gae import GAE, gae
from rl_triton.estimators.n_step import n_step_returns
from rl_triton.estimators.normalize import normalize_advantages
from rl_triton.estimators.retrace import Retrace, retrace
from rl_triton.estimators.td_lambda import td_lambda_returns
from rl_triton.estimators.traces import eligibility_traces, episodic_cumsum
from rl_triton.estimators.vtrace import VTrace, vtrace

__version__ = "0.1.0"

for _function, _results in (
    (_adjoint, tuple),
    (affine_scan, None),
    (discounted_returns, None),
    (eligibility_traces, None),
    (episodic_cumsum, None),
    (gae, GAE),
    (n_step_returns, None),
    (retrace, Retrace),
    (td_lambda_returns, None),
    (vtrace, VTrace),
):
    _library.register(_function, _results)
del _function, _results

__all__ = [
    "GAE",
    "Retrace",
    "VTrace",
    "__version__",
    "affine_scan",
    "backend",
    "discounted_returns",
    "eligibility_traces",
    "episodic_cumsum",
    "gae",
    "n_step_returns",
    "normalize_advantages",
    "retrace",
    "td_lambda_returns",
    "vtrace",
]
