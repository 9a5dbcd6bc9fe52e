"""`import rl_triton` costs torch and nothing else; adapters say what to install."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("stable_baselines3", "torchrl", "tensordict", "gymnasium", "numba")


def loaded_by(code):
    script = f"import sys; {code}; print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_import_loads_no_framework():
    assert loaded_by("import rl_triton, rl_triton.adapters, rl_triton.adapters.sb3") == "[]"


def test_this_test_can_fail():
    assert loaded_by("import rl_triton, gymnasium") == "['gymnasium']"


def test_adapter_without_its_framework():
    code = "import sys; sys.modules['stable_baselines3'] = None\nfrom rl_triton.adapters import sb3\nsb3.patch()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: rl_triton.adapters.sb3 needs Stable-Baselines3: pip install 'rl-triton[sb3]'" in result.stderr


@pytest.mark.parametrize("folder", ["core_kernels", "adapters"])
def test_folders_are_not_imported_by_their_own_name(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parents[1]))
    with pytest.raises(ImportError, match="this folder is installed as rl_triton"):
        __import__(folder)


def test_all_is_importable():
    import rl_triton

    assert all(hasattr(rl_triton, name) for name in rl_triton.__all__)
