#!/usr/bin/env bash
# Runs the whole test suite natively on this machine's GPU and writes tests/gpu/last_run.json, the record to commit.
# Needs python3 with torch, triton, numba, pytest and hypothesis; with pytest-xdist it runs on several processes.
set -euo pipefail
cd "$(dirname "$0")/../.."
make --silent links
export PYTHONPATH="$PWD/build/links:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET RL_TRITON_BACKEND RL_TRITON_CHECK
python3 -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "tests/gpu/run.sh: no CUDA device")'
parallel=()
if python3 -c 'import xdist' 2>/dev/null; then parallel=(-n "${RL_TRITON_TEST_PROCESSES:-8}" --dist worksteal); fi
python3 -m pytest -q -p record -p no:cacheprovider --durations=10 "${parallel[@]}" tests
# The performance-regression test: on a GPU whose speed is on record, at least 0.9 of it.
if [ -s benchmarks/results/check.jsonl ]; then python3 -m benchmarks.check; fi
