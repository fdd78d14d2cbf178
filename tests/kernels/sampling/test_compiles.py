"""Kernels of sampling and of what lies between products lower to machine code of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "support" / "tools" / "compile_sampling_kernels.py"
KERNELS = {
    "find_bests", "find_winners", "token_noise", "pick_tokens", "add_up", "find_doubt", "gather",
    "find_thresholds", "copy_allowed", "change_tokens", "normalise", "turn_heads",
    "turn_and_store", "gate",
}  # fmt: skip


def test_every_kernel_compiles_without_spilling_or_contracting(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    environment["PYTHONPATH"] = os.pathsep.join((str(TESTS), environment.get("PYTHONPATH", "")))
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, check=False, text=True,
        env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert {line.split()[0] for line in result.stdout.splitlines()} == KERNELS
