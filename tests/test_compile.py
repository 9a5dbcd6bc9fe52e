"""Every kernel compiles for a GPU, on a machine that has none: the interpreter accepts what the compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

# Runs without the interpreter. A driver that only names its target makes `warmup` compile and not launch.
COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    is_active = staticmethod(lambda: True)

triton.runtime.driver.set_active(Driver())

import rl_triton as rlt
from rl_triton import _expected, _launch, _moments, _scan, _window
from rl_triton.estimators.adjoint import adjoint, transposed_scan

compiled = []

class Compiling:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **kwargs: compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

_scan.scan_kernel = Compiling(_scan.scan_kernel)
_expected.expected_kernel = Compiling(_expected.expected_kernel)
_window.near_kernel = Compiling(_window.near_kernel)
_window.window_kernel = Compiling(_window.window_kernel)
_moments.moments_kernel = Compiling(_moments.moments_kernel)
_moments.normalize_kernel = Compiling(_moments.normalize_kernel)
_launch.interpreting = lambda: True

def calls(shape, time_dim, dtype, features):
    x = torch.ones(shape, dtype=dtype)
    flags, rows = torch.ones(shape, dtype=torch.bool), x.select(time_dim, 0)
    q, actions = torch.ones(*shape, 3, dtype=dtype), torch.ones(shape, dtype=torch.int64)
    options = {"time_dim": time_dim} | {k: v for k, v in {
        "valid": x if "valid" in features else None,
        "truncated": flags if "truncated" in features else None,
        "flags_at": "start" if "start" in features else None,
        "last_done": rows if "start" in features else None,
    }.items() if v is not None}
    boot = {"bootstrap_values": x} if "truncated" in features else {}
    scanned = {"carry": rows, "return_carry": True} if "carry" in features else {}
    edge = {"last_values": rows}
    factor = {"gamma": x} if "tensors" in features else {}
    rlt.gae(x, x, flags, **edge, **boot, **scanned, **factor, **options)
    rlt.gae(x, x, flags, next_values=x, **scanned, **factor, **options)
    rlt.td_lambda_returns(x, x, flags, **edge, **boot, **scanned, **options, lambda_=x if factor else 0.9)
    rlt.discounted_returns(x, flags, **edge, **boot, **scanned, **factor, **options)
    rlt.n_step_returns(x, flags, n=2, values=x, **edge, **boot, **factor, **options)
    rlt.vtrace(x, x, flags, log_rhos=x, **edge, **boot, **scanned, **factor, **options)
    scanned = {"carry": (rows, rows), "return_carry": True} if "carry" in features else {}
    rlt.retrace(x, x, flags, expected_next_q=x, log_rhos=x, **scanned, **factor, **options)
    rlt.retrace(
        x, x, flags, next_q_values=q, next_policy_probs=q, policy_probs=q, behavior_probs=x, actions=actions,
        trace="tree_backup", **scanned, **factor, **options,
    )
    if not scanned:  # so few actions that the scan reads them itself
        q = torch.ones(*shape, 16 // x.element_size(), dtype=dtype)
        rlt.retrace(x, x, flags, next_q_values=q, next_policy_probs=q, **options)
    options = {k: v for k, v in options.items() if k in ("time_dim", "valid", "flags_at")}
    rlt.eligibility_traces(x, flags, kind="replacing", return_final=True, **options, **factor)
    rlt.episodic_cumsum(q, flags, **options)
    rlt.affine_scan(x, x, time_dim=time_dim, reverse=False)
    transposed(flags, time_dim, dtype, features)

def transposed(flags, time_dim, dtype, features):
    x = torch.ones(flags.shape, dtype=dtype)
    given = {"time_dim": time_dim, "gamma": 0.99, "lambda_": 0.9}
    if "start" in features:
        given["last_done"] = flags.select(time_dim, 0)
    if "truncated" in features:
        given["truncated"] = flags
    adjoint(flags, x, x, op="gae", has_next_values=False, successors="truncated" in features, **given)
    adjoint(flags, None, x, op="td_lambda_returns", has_next_values=True, last_values=False, **given)
    for reverse, of_beta in ((False, x), (True, None)):
        transposed_scan(
            x, x, x, initial=x.select(time_dim, 0), reverse=reverse, time_dim=time_dim, out=(x, of_beta)
        )

with rlt.backend("triton"):
    # Shapes with a stride of 1 in every place, since Triton makes those constants.
    calls((4, 300), 1, torch.float32, ())
    calls((300, 4), 0, torch.float32, ("truncated", "carry"))
    calls((2, 3, 40, 5), 2, torch.float64, ("valid", "start", "tensors"))
    calls((3, 1), 1, torch.float32, ("valid", "truncated", "carry", "tensors"))
    # Few rows and many steps: the time axis is split, and each call starts two kernels.
    for shape, time_dim in (((2, 6000), 1), ((6000, 2), 0)):
        x = torch.ones(shape)
        rlt.gae(x, x, x > 0, last_values=x.select(time_dim, 0), time_dim=time_dim)
        adjoint(x > 0, x, x, op="gae", gamma=0.99, lambda_=0.9, has_next_values=False, time_dim=time_dim)
    # Windows of whole tiles.
    for shape, time_dim in (((4, 512), 1), ((256, 16), 0)):
        x = torch.ones(shape)
        rlt.vtrace(x, x, x > 0, log_rhos=x, last_values=x.select(time_dim, 0), time_dim=time_dim)
        q = torch.ones(*shape, 4)
        rlt.retrace(x, x, x > 0, next_q_values=q, next_policy_probs=q, time_dim=time_dim)
        adjoint(x > 0, x, x, op="gae", gamma=0.99, lambda_=0.9, has_next_values=False, time_dim=time_dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rlt.normalize_advantages(x.to(dtype))
        rlt.normalize_advantages(x.to(dtype), valid=x > 0, unbiased=False)
print(len(compiled), "kernels")
"""


@pytest.mark.cpu_only
def test_kernels_compile_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # a kernel found in a cache would be launched, not compiled
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert result.stdout == "92 kernels\n", result.stderr[-4000:]
