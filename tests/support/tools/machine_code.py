"""What a compiled Triton kernel takes, read from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

# What touches memory that other kernels and programs see.
ACCESS = re.compile(r"\b(?:ld\.global|st\.global|cp\.async\.c|atom\.global|red\.global)")
WAIT = "griddepcontrol.wait"
# All threads have stored, one counts for them, and all know what it found.
PUBLISHED = re.compile(
    r"bar\.sync\s+0;(?:(?!bar\.sync|st\.global).)*atom\.global\.gpu\.acq_rel\.add\.u32"
    r"(?:(?!ld\.global|st\.global).)*bar\.sync\s+0;",
    re.DOTALL,
)
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


def waits_first(ptx: str) -> bool:
    """Whether a kernel that is launched ahead touches no memory before it has waited."""
    access = ACCESS.search(ptx)
    return WAIT in ptx and (access is None or ptx.index(WAIT) < access.start())


def publishes(ptx: str) -> bool:
    """Whether its one atomic addition says, on the whole device, that all threads have stored, and
    none of them reads on before it knows the count."""
    return len(re.findall(r"\batom\.", ptx)) == 1 and PUBLISHED.search(ptx) is not None
