"""sdist -> wheel -> an import from another folder: the only test that what we ship is what we wrote."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="needs the package `build`")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


@pytest.mark.cpu_only
def test_wheel_holds_every_module(wheel):
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    wanted = {"rl_triton/py.typed"}
    for folder, package in (("core_kernels", "rl_triton"), ("adapters", "rl_triton/adapters")):
        for path in (ROOT / folder).rglob("*.py"):
            wanted.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    assert shipped == wanted


@pytest.mark.cpu_only
def test_wheel_imports_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import torch, rl_triton, rl_triton.adapters.sb3 as sb3\n"
        f"assert rl_triton.__file__.startswith({str(site)!r}), rl_triton.__file__\n"
        "x = torch.ones(1, 2)\n"
        "sb3.patch(); print(sb3.is_patched(), rl_triton.gae(x, x, x, last_values=None).advantages.tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout == "True [[0.0, 0.0]]\n", result.stderr
    metadata = next(p for p in site.glob("*.dist-info"))
    assert metadata.name == "rl_triton-0.1.0.dist-info"
    assert "License-Expression: MIT" in (metadata / "METADATA").read_text()
