"""What is measured on the tensors of a case: ours, and the baselines beside it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import rl_triton as rlt
from benchmarks.cases import Arguments, Case, bytes_read, tensors
from benchmarks.timing import Call
from rl_triton import reference

Results = tuple[torch.Tensor, ...]
OURS = "rl_triton"


@dataclass(frozen=True)
class Prepared:
    """Calls ready to be timed, one for each set of tensors; what they need was made before."""

    calls: Sequence[Call]
    outputs: tuple[str, ...]
    bytes_moved: int
    """Each tensor that it has to read and to write, once."""
    out_calls: Sequence[Call] | None = None
    """The same into tensors that exist."""
    results: Callable[[Any], Results] = tensors
    """Of what a call returned, as ours are laid out."""
    expected: Callable[[torch.Tensor], Results] | None = None
    """Results of the chosen rows, where they are not those of the case."""
    wait: Callable[[Any], None] | None = None
    """Until a call's result is there; None: synchronise the device."""
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class Subject:
    """Ours or a baseline. `device_time`: "graph" (its calls can be captured), "events", or "" (no clock for it)."""

    name: str
    about: str
    serves: Callable[[Case, str], bool]
    prepare: Callable[[Case, Sequence[Arguments]], Prepared]
    unusable: Callable[[str], str | None] = lambda device: None
    device_time: str = "events"


def select(case: Case, arguments: Arguments, rows: torch.Tensor) -> Arguments:
    """The arguments of some rows, on the CPU."""

    def part(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dim = 1 if case.layout == "TN" and x.dim() > 1 else 0
        return x.index_select(dim, rows.to(x.device)).cpu()

    return {name: part(x) for name, x in arguments.items()}


def _size(case: Case) -> int:
    return case.shape.rows * case.shape.steps


def _written(case: Case, arguments: Arguments) -> int:
    first = next(iter(arguments.values()))
    return len(case.op.results) * _size(case) * first.element_size()


def our_bytes(case: Case, arguments: Arguments) -> int:
    return bytes_read(arguments) + _written(case, arguments)


def _ours(case: Case, sets: Sequence[Arguments]) -> Prepared:
    function = getattr(rlt, case.op.name)
    options = {} if case.op.name == "normalize_advantages" else {"time_dim": case.time_dim}

    def bound(arguments: Arguments, **more: Any) -> Call:
        given = arguments | options | more
        return lambda: function(**given)

    out_calls = None
    if case.op.has_out:
        outs = []
        for arguments in sets:
            like = next(iter(arguments.values()))
            made = tuple(torch.full_like(like, float("nan")) for _ in case.op.results)
            outs.append(made if len(made) > 1 else made[0])
        out_calls = [bound(arguments, out=out) for arguments, out in zip(sets, outs, strict=True)]
    calls = [bound(arguments) for arguments in sets]
    return Prepared(calls, case.op.results, our_bytes(case, sets[0]), out_calls)


def _compiled_scan(scan_name: str) -> Callable[[Case, Sequence[Arguments]], Prepared]:
    def prepare(case: Case, sets: Sequence[Arguments]) -> Prepared:
        from benchmarks.baselines import scans

        torch._dynamo.reset()  # or the shapes of earlier cases count against the limit of recompilations
        scan = getattr(scans, scan_name)
        function = scans.SCANS[case.op.name]
        constants = {k: x for k, x in sets[0].items() if not isinstance(x, torch.Tensor)}
        names = [k for k in sets[0] if k not in constants]

        def on_tensors(*given: torch.Tensor) -> Any:
            return function(**dict(zip(names, given, strict=True)), **constants, dim=case.time_dim, scan=scan)

        compiled = torch.compile(on_tensors, fullgraph=True, dynamic=False)
        given = [tuple(arguments[k] for k in names) for arguments in sets]
        calls = [lambda xs=xs: compiled(*xs) for xs in given]
        return Prepared(calls, case.op.results, our_bytes(case, sets[0]))

    return prepare


def _loop(compiled: bool) -> Callable[[Case, Sequence[Arguments]], Prepared]:
    def prepare(case: Case, sets: Sequence[Arguments]) -> Prepared:
        from benchmarks.baselines.loops import loop

        function = loop
        if compiled:
            torch._dynamo.reset()
            function = torch.compile(loop, fullgraph=True, dynamic=False)

        def bound(arguments: Arguments) -> Call:
            names = ("rewards", "values", "last_values", "gamma", "lambda_")
            given = {k: arguments[k] for k in names} | {"dones": arguments["terminated"].to(arguments["rewards"].dtype)}
            return lambda: function(**given, time_dim=case.time_dim)

        wider = (sets[0]["rewards"].element_size() - 1) * _size(case)  # its flags are floats
        calls = [bound(arguments) for arguments in sets]
        return Prepared(calls, case.op.results, our_bytes(case, sets[0]) + wider)

    return prepare


def _torchrl(name: str) -> Callable[[Case, Sequence[Arguments]], Prepared]:
    def prepare(case: Case, sets: Sequence[Arguments]) -> Prepared:
        from torchrl.objectives.value import functional

        function = getattr(functional, name)
        time_dim = -2 if case.layout == "NT" else -3

        def bound(arguments: Arguments) -> Call:
            values, dim = arguments["values"], case.time_dim
            edge = arguments["last_values"].unsqueeze(dim)
            following = torch.cat([values.narrow(dim, 1, case.shape.steps - 1), edge], dim)
            done = arguments["terminated"]
            if case.truncated:
                following = torch.where(arguments["truncated"], arguments["bootstrap_values"], following)
                done = done | arguments["truncated"]
            named = {
                "state_value": values,
                "next_state_value": following,
                "reward": arguments["rewards"],
                "done": done,
                "terminated": arguments["terminated"],
            }
            named = {k: x.unsqueeze(-1) for k, x in named.items()}
            return lambda: function(arguments["gamma"], arguments["lambda_"], **named, time_dim=time_dim)

        # It reads the next values and two flags, and no last values.
        first = sets[0]
        read = 3 * first["rewards"].nbytes + 2 * first["terminated"].nbytes
        return Prepared(
            [bound(arguments) for arguments in sets],
            case.op.results,
            read + _written(case, first),
            results=lambda result: tuple(x.squeeze(-1) for x in result),
        )

    return prepare


def _jax(name: str) -> Callable[[Case, Sequence[Arguments]], Prepared]:
    def prepare(case: Case, sets: Sequence[Arguments]) -> Prepared:
        from benchmarks.baselines import jax_scans

        first = sets[0]
        return Prepared(
            [jax_scans.bind(name, arguments, case.time_dim) for arguments in sets],
            case.op.results,
            our_bytes(case, first),
            results=lambda result: jax_scans.to_torch(result, first["rewards"]),
            wait=jax_scans.wait,
        )

    return prepare


def _jax_unusable(device: str) -> str | None:
    missing = _missing("jax")
    if missing:
        return missing
    from benchmarks.baselines import jax_scans

    return jax_scans.unusable(device)


def _pufferlib(case: Case, sets: Sequence[Arguments]) -> Prepared:
    from benchmarks.baselines import pufferlib

    first = sets[0]
    names = ("rewards", "values", "gamma", "lambda_")
    ones = torch.ones_like(first["rewards"])
    given = [
        {k: arguments[k] for k in names} | {"dones": arguments["terminated"].float(), "importance": ones.clone()}
        for arguments in sets
    ]
    outs = [torch.zeros_like(ones) for _ in sets]

    def expected(rows: torch.Tensor) -> Results:
        part = select(case, first, rows)
        shifted = {"rewards": part["rewards"][:, 1:], "terminated": part["terminated"][:, 1:]}
        values = {"values": part["values"][:, :-1], "last_values": part["values"][:, -1]}
        return (reference.gae(**shifted, **values, gamma=first["gamma"], lambda_=first["lambda_"])[0],)

    return Prepared(
        [lambda g=g: pufferlib.advantages(**g, out=torch.zeros_like(g["rewards"])) for g in given],
        ("advantages",),
        5 * first["rewards"].nbytes,
        out_calls=[lambda g=g, out=out: pufferlib.advantages(**g, out=out) for g, out in zip(given, outs, strict=True)],
        results=lambda result: (result[:, :-1],),
        expected=expected,
    )


def _pufferlib_unusable(device: str) -> str | None:
    from benchmarks.baselines import pufferlib

    return pufferlib.unusable(device)


def _sb3(patched: bool) -> Callable[[Case, Sequence[Arguments]], Prepared]:
    def prepare(case: Case, sets: Sequence[Arguments]) -> Prepared:
        import gymnasium
        import numpy as np
        from stable_baselines3.common.buffers import RolloutBuffer

        from rl_triton.adapters import sb3

        box = gymnasium.spaces.Box(-1, 1, (1,))
        n, t = case.shape.rows, case.shape.steps

        def bound(arguments: Arguments) -> Call:
            factors = {"gae_lambda": arguments["lambda_"], "gamma": arguments["gamma"]}
            buffer = RolloutBuffer(t, box, box, device="cpu", n_envs=n, **factors)
            ends = arguments["terminated"].numpy()
            buffer.rewards[...] = arguments["rewards"].numpy()
            buffer.values[...] = arguments["values"].numpy()
            buffer.episode_starts[1:] = ends[:-1]
            last, dones = arguments["last_values"], np.array(ends[-1])

            def call() -> Results:
                buffer.compute_returns_and_advantage(last, dones)
                return torch.from_numpy(buffer.advantages), torch.from_numpy(buffer.returns)

            return call

        wider = 3 * _size(case)
        calls = [bound(arguments) for arguments in sets]
        scope = sb3.patched if patched else contextlib.nullcontext
        return Prepared(calls, case.op.results, our_bytes(case, sets[0]) + wider, scope=scope)

    return prepare


def _missing(*modules: str) -> str | None:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)}: not installed" if absent else None


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _is_gae(case: Case, device: str) -> bool:
    return case.op.name == "gae"


def _untruncated_gae(case: Case, device: str) -> bool:
    return _is_gae(case, device) and not case.truncated


def _as_sb3_stores(case: Case, device: str) -> bool:
    plain = _untruncated_gae(case, device) and case.dtype == "float32"
    return plain and case.layout == "TN" and not _on_gpu(device)


def _as_pufferlib_stores(case: Case, device: str) -> bool:
    plain = _untruncated_gae(case, device) and case.dtype == "float32"
    return plain and case.layout == "NT" and _on_gpu(device)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(OURS, "this library", lambda case, device: True, _ours, device_time="graph"),
        Subject("eager_loop", "a Python loop over time, as CleanRL writes it", _untruncated_gae, _loop(False)),
        Subject(
            "compiled_loop",
            "that loop under torch.compile",
            lambda case, device: _untruncated_gae(case, device) and case.shape.steps <= 128 and case.layout == "TN",
            _loop(True),
            device_time="graph",
        ),
        Subject(
            "compiled_scan",
            "vectorised PyTorch (log-doubling; shifts for n steps; the plain formula for normalisation), compiled",
            lambda case, device: True,
            _compiled_scan("doubling"),
            device_time="graph",
        ),
        Subject(
            "compiled_associative_scan",
            "PyTorch's prototype associative_scan, compiled",
            lambda case, device: _is_gae(case, device) and _on_gpu(device),
            _compiled_scan("inductor_scan"),
            device_time="graph",
        ),
        Subject(
            "torchrl_loop",
            "TorchRL's default, generalized_advantage_estimate",
            _is_gae,
            _torchrl("generalized_advantage_estimate"),
            lambda device: _missing("torchrl"),
        ),
        Subject(
            "torchrl_vectorized",
            "TorchRL's vec_generalized_advantage_estimate",
            _is_gae,
            _torchrl("vec_generalized_advantage_estimate"),
            lambda device: _missing("torchrl"),
        ),
        Subject("jax_scan", "JAX, lax.scan", _is_gae, _jax("jax_scan"), _jax_unusable, ""),
        Subject(
            "jax_associative_scan",
            "JAX, lax.associative_scan",
            _is_gae,
            _jax("jax_associative_scan"),
            _jax_unusable,
            "",
        ),
        Subject(
            "pufferlib",
            "PufferLib 3.0's CUDA kernel: advantages alone",
            _as_pufferlib_stores,
            _pufferlib,
            _pufferlib_unusable,
        ),
        Subject(
            "sb3",
            "Stable-Baselines3's RolloutBuffer, NumPy",
            _as_sb3_stores,
            _sb3(False),
            lambda device: _missing("stable_baselines3"),
        ),
        Subject(
            "sb3_patched",
            "the same after rl_triton.adapters.sb3.patch()",
            _as_sb3_stores,
            _sb3(True),
            lambda device: _missing("stable_baselines3"),
        ),
    )
}
