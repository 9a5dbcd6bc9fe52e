"""Backends under test. Without a GPU the kernels run in Triton's interpreter, chosen before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis
import pytest

import rl_triton as rlt
from rl_triton.testing import poisoned_allocation

hypothesis.settings.register_profile(
    "rl_triton", deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("rl_triton")
torch.set_num_threads(1)

INTERPRETED = not torch.cuda.is_available()


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    @property
    def slow(self) -> bool:
        """The interpreter takes a tenth of a second for a tile: tests give it small shapes."""
        return self.name == "triton" and INTERPRETED


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, forced, with NaN in whatever it allocates and does not write."""
    device = "cuda" if request.param == "triton" and not INTERPRETED else "cpu"
    with rlt.backend(request.param), poisoned_allocation():
        yield Backend(request.param, device)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu_only") and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("cpu_only") and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="cpu_only: runs where there is no GPU"))
