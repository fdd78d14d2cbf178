"""draftline: lossless speculative decoding for large language models, served on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cluster.config import DrafterConfig, EngineConfig
    from .core.request.sampling_params import RequestOptions, SamplingParams
    from .deploy.engine.async_engine import AsyncEngine
    from .deploy.engine.engine import Engine
    from .models.load.bundled import demo_path

__all__ = [
    "AsyncEngine",
    "DrafterConfig",
    "Engine",
    "EngineConfig",
    "RequestOptions",
    "SamplingParams",
    "__version__",
    "demo_path",
]

_HOMES = {
    "AsyncEngine": ".deploy.engine.async_engine",
    "DrafterConfig": ".cluster.config",
    "Engine": ".deploy.engine.engine",
    "EngineConfig": ".cluster.config",
    "RequestOptions": ".core.request.sampling_params",
    "SamplingParams": ".core.request.sampling_params",
    "demo_path": ".models.load.bundled",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch and Ray take seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Local, so that `import draftline` costs nothing.
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name], __name__), name)
