"""Switches a stage's layers to draftline's CPU kernels, with a fallback if they are unavailable."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...kernels.cpu.build import BackgroundBuild, are_loaded, library_path, load_cpu_ops
from ..layers.model_slice import ModelSlice
from .options import StageOptions

if TYPE_CHECKING:
    from ..layers.own_layers import OwnLayers

logger = logging.getLogger(__name__)


class OperatorSwitch:
    """Prepares the CPU kernels, in the background if they must be built first.

    The switch may change the text at near-ties of two tokens, as may any change of the shapes of
    torch's products.
    """

    def __init__(self, folder: Path, build: BackgroundBuild | None) -> None:
        """`build` builds the library in `folder`; None: it exists."""
        self._folder, self._build = folder, build

    @property
    def is_ready(self) -> bool:
        """Whether `make` may be called without waiting for the compiler."""
        return self._build is None or self._build.is_done

    def make(self, part: ModelSlice) -> OwnLayers | None:
        """The slice's layers on the CPU kernels, which take over its weights; None if the build
        failed, which is logged.

        Takes as long as copying the weights.
        """
        from ..layers.own_layers import OwnLayers  # noqa: PLC0415

        begin = time.perf_counter()
        try:
            if self._build is not None:
                self._build.result()
            load_cpu_ops(self._folder)
        except (ConfigError, OSError) as error:
            logger.warning("event=own_operators_failed reason=%s; torch's own go on", error)
            return None
        layers = OwnLayers(part)
        logger.info("event=own_operators_used seconds=%.2f", time.perf_counter() - begin)
        return layers


def begin_switch(part: ModelSlice, options: StageOptions) -> OperatorSwitch | None:
    """The switch of the stage to the CPU kernels; None: it stays on torch.

    Raises `ConfigError` (`batch_invariant`) if that requires them and they are unavailable.
    """
    is_asked = options.batch_invariant == "on"
    if part.device.type != "cpu":
        return None
    if options.compile == "off" and not is_asked:
        return None
    try:
        return _switch(part, options, is_asked=is_asked)
    except ConfigError as error:
        if is_asked:
            reason = f"on needs draftline's own operators on a CPU: {error}"
            raise ConfigError("batch_invariant", reason) from error
        logger.warning("event=own_operators_not_used reason=%s", error)
        return None


def _switch(part: ModelSlice, options: StageOptions, *, is_asked: bool) -> OperatorSwitch | None:
    from ..layers.own_layers import own_obstacle  # noqa: PLC0415

    obstacle = own_obstacle(part)
    if options.attention != "auto":
        obstacle = f"attention is {options.attention}"
    if obstacle is not None:
        if is_asked:
            raise ConfigError("compile", obstacle)
        logger.info("event=own_operators_not_used reason=%s", obstacle)
        return None
    folder = Path(options.compile_cache).expanduser()
    if are_loaded() or library_path(folder).exists():
        return OperatorSwitch(folder, None)
    if is_asked:
        # Steps before the switch would have another order of additions.
        load_cpu_ops(folder)
        return OperatorSwitch(folder, None)
    logger.info("event=own_operators_build folder=%s", folder)
    return OperatorSwitch(folder, BackgroundBuild(folder))
