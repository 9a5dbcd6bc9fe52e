"""Drop-in patches and helpers, one module a framework. Importing this package imports no framework."""

if __name__ != "rl_triton.adapters":
    raise ImportError("this folder is installed as rl_triton.adapters; run pip install -e . and import rl_triton.adapters")
