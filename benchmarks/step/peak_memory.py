"""How much memory a part of a program takes at most, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def restart_peak() -> int:
    """Forget the process' highest use of memory so far; what is in use, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _bytes_of("VmRSS")


def peak_bytes() -> int:
    """The highest use of memory since `restart_peak`, in bytes."""
    return _bytes_of("VmHWM")


def _bytes_of(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
