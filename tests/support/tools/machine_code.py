"""What a compiled Triton kernel takes, read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Resources:
    """Of one block; `stack` bytes a thread, which is where registers spill to.

    waits  of each wait for copies to shared memory: how many may still be under way
    """

    registers: int
    stack: int
    shared: int
    waits: tuple[int, ...]

    def __str__(self) -> str:
        waits = ",".join(map(str, self.waits)) or "-"
        return f"reg={self.registers} stack={self.stack} shared={self.shared} waits={waits}"


def resources(binary: Any) -> Resources:
    """Those of what `triton.compile` gave."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    waits = re.findall(r"async_wait .*?num = (\d+)", binary.asm["ttgir"])
    shared = binary.metadata.shared
    return Resources(int(found[1]), int(found[2]), shared, tuple(map(int, waits)))
