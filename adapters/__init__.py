"""Drop-in patches and helpers, one module a framework. Importing this package imports no framework."""

if __name__ != "rl_triton.adapters":
    raise ImportError("this folder is installed as rl_triton.adapters; run pip install -e . and import it from there")

from rl_triton.adapters._patching import status

__all__ = ["status"]
