"""The CPU kernels, compiled before Ray starts: stages would each do so, and show nothing of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...cluster.config import EngineConfig
from ...core.errors import ConfigError
from ..engine.placement import stages_have_gpu
from .progress import progress


def compile_cpu_kernels(config: EngineConfig) -> None:
    """Compile the kernels that stages on this machine will load, unless they are there.

    Where that fails, the stages say why, and run torch's kernels.
    """
    if config.compile == "off" or config.dtype not in ("auto", "float32"):
        return
    # torch takes a second to import, which a port in use is to be reported before.
    from ...kernels.cpu.build import ensure_built  # noqa: PLC0415
    from ...models.device import choose_device  # noqa: PLC0415
    from ...models.stage.options import StageOptions  # noqa: PLC0415

    if choose_device(config.device, has_gpu=stages_have_gpu(config)) != "cpu":
        return
    with suppress(ConfigError):
        ensure_built(Path(StageOptions().compile_cache).expanduser(), progress)
