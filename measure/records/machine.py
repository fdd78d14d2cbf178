"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor and the versions that matter."""

    processor: str
    cores: int
    python: str
    torch: str
    transformers: str

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.processor}, {self.cores} cores; Python {self.python}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )

    def fields(self) -> dict[str, object]:
        """The facts by name, for JSON."""
        return asdict(self)


def machine() -> Machine:
    """This machine."""
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
