"""Clocks. All times are microseconds a call; nothing is subtracted.

single: each call alone, synchronised before and after, so it holds the launch, the kernel and the wait.
amortised: calls back to back, one wait at the end, wall time over their number.
device: what the device spends, by one of three methods that the row names:
  "graph": N calls captured in one CUDA graph, events around a replay, so the gaps between kernels count;
  "events": events around single launches;
both queued behind a sleeping kernel, so that the host is ahead of the device; and
  "events, host included": the same where a call takes the host longer than the device sleeps, or waits for it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

PAGE = 4096
LARGEST_COPY = 3 << 28  # bytes read and written; at 4.24 TB/s on an H200, where smaller ones are slower

_SLEEP_CYCLES = 4_000_000  # 2 ms at 2 GHz
_SLEEP_US = 1500.0  # what of it is counted on
_BURST_US = 5000.0  # of calls back to back
_REPLAY_SLEEP_CYCLES = 200_000  # 0.1 ms: a replay takes the host less
_GRAPH_US = 500.0  # of a replay: short enough to repeat, long enough for the events' resolution


@dataclass(frozen=True)
class Times:
    """Median and the 20 % and 80 % quantiles of repeated measurements."""

    median: float
    low: float
    high: float
    samples: int

    def columns(self, name: str) -> dict[str, float | int]:
        """Columns of a stored row."""
        return {
            f"{name}_us": round(self.median, 3),
            f"{name}_us_q20": round(self.low, 3),
            f"{name}_us_q80": round(self.high, 3),
            f"{name}_samples": self.samples,
        }


def summary(samples: Sequence[float]) -> Times:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Times(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


def repeat(measure: Callable[[], float], seconds: float, at_least: int = 3, at_most: int = 1000) -> Times:
    """Measure until the time is used up."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < at_least or (time.perf_counter() < end and len(samples) < at_most):
        samples.append(measure())
    return summary(samples)


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.disable()  # without a collection first: with compilers loaded one takes longer than the measurement
    try:
        yield
    finally:
        gc.enable()


class Rotation:
    """Calls on different tensors in turn, so that none finds its inputs in the cache."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._next = 0

    def __call__(self) -> Any:
        self._next = (self._next + 1) % len(self.calls)
        return self.calls[self._next]()


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _wall_us(run: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    start = time.perf_counter()
    wait(run())
    return 1e6 * (time.perf_counter() - start)


def single(calls: Sequence[Call], wait: Callable[[Any], None], seconds: float) -> Times:
    """Each call alone. `wait(result)` returns when the work is done."""
    rotation = Rotation(calls)
    wait(rotation())
    with _no_collector():
        return repeat(lambda: _wall_us(rotation, wait), seconds)


def amortised(calls: Sequence[Call], wait: Callable[[Any], None], seconds: float) -> Times:
    """Back to back."""
    rotation = Rotation(calls)
    wait(rotation())
    with _no_collector():
        n = max(1, min(1000, int(_BURST_US / max(_wall_us(rotation, wait), 1e-3))))

        def burst() -> Any:
            for _ in range(n - 1):
                rotation()
            return rotation()

        burst_us = _wall_us(burst, wait)
        n = max(1, min(2000, int(n * _BURST_US / burst_us)))  # single calls cost more: too few of them at first
        return repeat(lambda: _wall_us(burst, wait) / n, seconds)


def device_time(calls: Sequence[Call], seconds: float, *, capture: bool) -> tuple[Times, str]:
    """Time on the device and the method; falls back from a graph to events where capture fails."""
    if capture:
        try:
            return _by_graph(calls, seconds), "graph"
        except RuntimeError:  # something in the call cannot be captured
            torch.cuda.synchronize()
    return _by_events(calls, seconds)


def _elapsed_us(run: Callable[[], Any], sleep_cycles: int = 0) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _by_graph(calls: Sequence[Call], seconds: float) -> Times:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    rotation = Rotation(calls)
    one = min(_elapsed_us(rotation) for _ in range(3))
    n = max(len(calls), min(int(_GRAPH_US / max(one, 1.0)) + 1, 200))  # every set of tensors takes part
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other libraries' threads may do what they like
        for _ in range(n):
            rotation()
    graph.replay()
    torch.cuda.synchronize()
    with _no_collector():
        return repeat(lambda: _elapsed_us(graph.replay, _REPLAY_SLEEP_CYCLES) / n, seconds)


def _by_events(calls: Sequence[Call], seconds: float) -> tuple[Times, str]:
    rotation = Rotation(calls)
    rotation()
    torch.cuda.synchronize()
    start = time.perf_counter()
    rotation()
    host = 1e6 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    n = max(1, min(100, int(_SLEEP_US / max(host, 1.0))))
    ahead = host < _SLEEP_US

    def launches() -> None:
        for _ in range(n):
            rotation()

    with _no_collector():
        times = repeat(lambda: _elapsed_us(launches, _SLEEP_CYCLES) / n, seconds)
    return times, "events" if ahead else "events, host included"


class Machine:
    """The two floors of this run, of each size: a call, and a kernel that only moves bytes."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.cuda = torch.device(device).type == "cuda"
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 1 << 25
        self._copies: dict[int, float] = {}
        self._floors: dict[tuple, dict[str, float]] = {}

    def wait(self, _result: Any = None) -> None:
        synchronize(self.device)

    def sets(self, bytes_a_call: int) -> int:
        """So many sets of tensors that all together are three times the cache, one where one is that large."""
        return max(1, min(256 if self.cuda else 8, -(-3 * self.cache_bytes // max(bytes_a_call, 1))))

    def copy_us(self, n_bytes: int) -> float:
        """A copy that moves as many bytes: half of them read, half written. On the CPU by the wall clock.

        Of whole pages, rounded up, and of no more than LARGEST_COPY, from there on in proportion: PyTorch's copy of
        other sizes takes half as long again, which would flatter what is held against it.
        """
        half = min(-(-n_bytes // 2 // PAGE) * PAGE, LARGEST_COPY // 2) or PAGE
        if half not in self._copies:
            size = half // torch.float32.itemsize
            pairs = [torch.empty(2, size, device=self.device).normal_() for _ in range(self.sets(2 * half))]
            calls = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]
            if self.cuda:
                self._copies[half] = device_time(calls, self.seconds / 4, capture=True)[0].median
            else:
                self._copies[half] = amortised(calls, self.wait, self.seconds / 4).median
        return self._copies[half] * max(1.0, n_bytes / LARGEST_COPY)

    def floor(self, shape: tuple[int, int], dtype: torch.dtype, anew: bool) -> dict[str, float]:
        """torch.add of two tensors of the shape: what any call of PyTorch costs. anew: now, not when it was last asked
        for, since a shared host is twice as fast at one moment as at another."""
        key = (*shape, dtype)
        if anew or key not in self._floors:
            size = 3 * shape[0] * shape[1] * dtype.itemsize
            pairs = [torch.empty(2, *shape, device=self.device, dtype=dtype).normal_() for _ in range(self.sets(size))]
            calls = [lambda pair=pair: torch.add(pair[0], pair[1]) for pair in pairs]
            part = self.seconds / 3
            columns = {
                "floor_single_us": round(single(calls, self.wait, part).median, 3),
                "floor_amortised_us": round(amortised(calls, self.wait, part).median, 3),
            }
            if self.cuda:
                columns["floor_device_us"] = round(device_time(calls, part, capture=True)[0].median, 3)
            self._floors[key] = columns
        return self._floors[key]
