#!/usr/bin/env bash
# scripts/test.sh [pytest arguments]: lint, types, tests. Fails if any of them does, and runs the
# later ones all the same. pytest's summary is the last line.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PATH="$PWD/.venv/bin:$PATH"
status=0

# compile: the operators and loops that each of two workers would compile else.
compile() {
    PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" python -P -c \
        "from support.tools.cpu_kernels import load_cpu_kernels; load_cpu_kernels()
from draftline.core.speculation.policy import load_policy; load_policy()
from draftline.core.step.builder import load_kernels; load_kernels()"
    python examples/one_process.py
}

# Types take minutes of one core: beside them goes what else has but one to do.
mkdir -p build
basedpyright >build/types.log 2>&1 &
types=$!
scripts/lint.sh || status=1
# What fails here fails in tests, which say it better.
compile >build/compile.log 2>&1
wait "$types" || status=1
cat build/types.log
# Two workers; tests that start Ray share one of them (tests/conftest.py).
pytest -q -n "${TEST_WORKERS:-2}" --dist loadgroup "$@" || status=1
exit $status
