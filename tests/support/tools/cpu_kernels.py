"""Draftline's CPU kernels for tests, from the folder that `conftest.py` has filled."""

from __future__ import annotations

from pathlib import Path

from draftline.kernels.cpu.build import load_cpu_ops
from draftline.models.stage.options import StageOptions

FOLDER = Path(StageOptions().compile_cache).expanduser()


def load_cpu_kernels() -> None:
    """Register the operators in this process."""
    load_cpu_ops(FOLDER)
