#!/usr/bin/env bash
# Runs every check of the sources' form, also after one has failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PATH="$PWD/.venv/bin:$PATH"
status=0

# check COMMAND...: one line if it passes, its whole output if it fails.
check() {
    local output
    if output=$("$@" 2>&1); then
        printf 'ok      %s\n' "$*"
    else
        printf '%s\nFAILED  %s\n' "$output" "$*"
        status=1
    fi
}

check ruff check
check ruff format --check
check codespell
check lint-imports
exit $status
