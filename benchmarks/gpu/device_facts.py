"""What a figure was measured on, beside what `measure/records/record.py` says."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory and versions of a device."""
    if device.type != "cuda":
        return {"name": platform.machine(), "kind": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "kind": device.type,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "flash_attn": _version("flash-attn"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
