"""The command that puts the calls into a script: see `rl_triton.adapters.cleanrl._rewrite`."""

import sys

from rl_triton.adapters.cleanrl._command import main

if __name__ == "__main__":
    sys.exit(main())
