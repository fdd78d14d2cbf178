"""The device of an engine's stages, wherever they will run."""

from __future__ import annotations

from ..models.device_choice import choose_device
from .config import EngineConfig


def stage_device(config: EngineConfig) -> str:
    """cpu or cuda.

    Stages of Ray may run on other machines than this one, so Ray is asked for GPUs where it runs;
    cuda is taken at its word there, because a cluster may still grow. Raises `ConfigError`.
    """
    if config.backend == "local" or config.device == "cpu":
        return choose_device(config.device)
    if config.device == "cuda":
        return "cuda"
    # Ray takes seconds to import, which engines without it need not wait for.
    import ray  # noqa: PLC0415

    return choose_device(
        config.device, has_gpu=cluster_has_gpus() if ray.is_initialized() else None
    )


def cluster_has_gpus() -> bool:
    """Whether Ray, where it is initialised, has a GPU to give."""
    import ray  # noqa: PLC0415

    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
