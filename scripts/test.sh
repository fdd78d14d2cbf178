#!/usr/bin/env bash
# scripts/test.sh [pytest arguments]: lint, types, tests. Fails if any of them does, and runs the
# later ones all the same. pytest's summary is the last line.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PATH="$PWD/.venv/bin:$PATH"
status=0

# Types take minutes of one core: beside them goes what else has but one to do.
mkdir -p build
basedpyright >build/types.log 2>&1 &
types=$!
scripts/lint.sh || status=1
# What is compiled once is there before two workers would both compile it.
python examples/one_process.py >build/example.log 2>&1 || { cat build/example.log; status=1; }
wait "$types" || status=1
cat build/types.log
# Two workers; tests that start Ray share one of them (tests/conftest.py).
pytest -q -n "${TEST_WORKERS:-2}" --dist loadgroup "$@" || status=1
exit $status
