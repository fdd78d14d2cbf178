"""What a stage or a drafter raised: an error of one step alone, or the end of its process."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from ...core.errors import DeviceLost, StageError

logger = logging.getLogger(__name__)

# cudaErrorMemoryAllocation (hipErrorOutOfMemory is the same): the one code that leaves a device
# well.
OUT_OF_MEMORY = 2
# Exit status of a process whose device is lost; nothing else ends one with it.
DEVICE_LOST_STATUS = 76


def stage_failure(index: int, step_id: int, error: Exception) -> StageError | DeviceLost:
    """The error of a step that stage `index` failed on.

    `DeviceLost` after an error that every later call of the device would meet again; memory that
    ran out is the step's own error.
    """
    reason = f"stage {index} failed on step {step_id}: {type(error).__name__}: {error}"
    if is_device_lost(error):
        return DeviceLost(f"{reason}; its device is of no use to this process any more")
    return StageError(reason)


def is_device_lost(error: BaseException) -> bool:
    """Whether this error says that only a new process can use the device again."""
    if "torch" not in sys.modules:
        # Whoever raised it has no device; importing it takes seconds.
        return False
    import torch  # noqa: PLC0415 - as above

    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    # Libraries report what a device met in errors of their own: the device itself is asked.
    return isinstance(error, RuntimeError) and _device_refuses()


def end_process() -> NoReturn:
    """End this process at once: clean-up would call the lost device and might never return."""
    logger.error("event=device_lost ending_process=%d", os.getpid())
    os._exit(DEVICE_LOST_STATUS)


def _device_refuses() -> bool:
    import torch  # noqa: PLC0415 - as above

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    return False
