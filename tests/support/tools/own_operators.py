"""Draftline's own CPU operators for tests, from the folder that `conftest.py` has filled."""

from __future__ import annotations

from pathlib import Path

from draftline.cluster.config import EngineConfig
from draftline.kernels.cpu.build import load_cpu_ops

FOLDER = Path(EngineConfig().compile_cache).expanduser()


def load_own_operators() -> None:
    """Register the operators in this process."""
    load_cpu_ops(FOLDER)
