"""The Triton kernels lower to machine code of a GPU, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "attend_tiles", "multiply_quantized", "widen_quantized", "multiply_rows", "multiply_few_rows",
    "multiply_normed_rows", "store_rows", "copy_rows", "take_log_softmax", "solve_requests",
}  # fmt: skip
TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "tools" / "compile_kernels.py"


@pytest.mark.parametrize(
    "which",
    ["few", pytest.param("all", marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_every_kernel_compiles(which: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    environment["PYTHONPATH"] = os.pathsep.join((str(TESTS), environment.get("PYTHONPATH", "")))
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(PROGRAM), which], capture_output=True, check=False, text=True,
        env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = {line.split()[0] for line in result.stdout.splitlines()}
    assert compiled == KERNELS
