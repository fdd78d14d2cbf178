"""The GPUs of the Ray cluster that this process belongs to."""

from __future__ import annotations

import ray


def cluster_has_gpus() -> bool | None:
    """Whether Ray has a GPU to give; None where Ray does not run yet."""
    return ray.cluster_resources().get("GPU", 0) > 0 if ray.is_initialized() else None
