#!/usr/bin/env bash
# scripts/test.sh [pytest arguments]: lint, types, tests. Fails if any of them does, and runs the
# later ones all the same. pytest's summary is the last line.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PATH="$PWD/.venv/bin:$PATH"
status=0

scripts/lint.sh || status=1
basedpyright || status=1
# Two workers; tests that start Ray share one of them (tests/conftest.py).
pytest -q -n "${TEST_WORKERS:-2}" --dist loadgroup "$@" || status=1
exit $status
