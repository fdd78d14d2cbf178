#!/bin/sh
# Runs a command with this copy of the sources as the package `draftline`, without an install:
#     scripts/from_source.sh python -m draftline.benchmarks.gpu
#     scripts/from_source.sh python -m pytest -m gpu tests
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
ln -s "$root" "$folder/draftline"
PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
