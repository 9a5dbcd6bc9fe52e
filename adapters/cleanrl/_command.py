"""python -m rl_triton.adapters.cleanrl FILE.py [--diff | --write]"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """0: rewritten. 1: refused, with the reason on stderr; nothing was written. 2: wrong usage, or no such file."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_triton.adapters.cleanrl",
        description="Replace the GAE or Q(lambda) loop of a CleanRL script by a call of rl_triton. Prints the new "
        "script; all of it but the loop and one import is kept as it is.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.py")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", action="store_true", help="print the change as a unified diff")
    what.add_argument("--write", action="store_true", help="change the file")
    options = parser.parse_args(arguments)
    try:
        source = options.file.read_bytes()
    except OSError as error:
        parser.error(str(error))

    from rl_triton.adapters.cleanrl._rewrite import Refused, rewrite

    try:
        result = rewrite(source)
    except Refused as refusal:
        print(f"{options.file}: refused: {refusal}", file=sys.stderr)
        return 1
    for note in result.notes:
        print(f"{options.file}: {note}", file=sys.stderr)
    if options.write:
        options.file.write_bytes(result.source)
    elif options.diff:
        before, after = (text.decode(result.encoding).splitlines(keepends=True) for text in (source, result.source))
        sys.stdout.writelines(difflib.unified_diff(before, after, str(options.file), str(options.file)))
    else:
        sys.stdout.buffer.write(result.source)
    return 0
