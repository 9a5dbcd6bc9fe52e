"""Code in the documentation runs as it stands, in order, in one namespace a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks(page):
    for word, package in (("sb3", "stable_baselines3"), ("torchrl", "torchrl"), ("gymnasium", "gymnasium")):
        if word in page.read_text():
            pytest.importorskip(package, reason=f"{package} is not installed")
    namespace = {}
    try:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), namespace)
    finally:
        if "sb3" in namespace:
            namespace["sb3"].unpatch()


def test_there_is_code_to_run():
    assert len(blocks(ROOT / "README.md")) >= 3
