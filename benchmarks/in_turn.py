"""Runs of one example, one after the other in one process, which imports and compiles once for all of them.

    python -m benchmarks.in_turn examples/ppo_gpu_envs.py credit rl_triton compiled_loop loop -- --num-envs 4096

Runs it with each of the values of an option in turn; what follows `--` goes to every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro


def load(path: Path) -> Any:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"program must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path, help="with Args, a dataclass, and main(Args)")
    parser.add_argument("option", help="without dashes")
    parser.add_argument("values", nargs="+")
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    args, common = parser.parse_args(argv[:end]), argv[end + 1 :]
    program = load(args.program)
    return max(program.main(tyro.cli(program.Args, args=[f"--{args.option}", x, *common])) for x in args.values)


if __name__ == "__main__":
    raise SystemExit(main())
