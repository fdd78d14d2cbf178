"""The time by which an engine lives: the machine's own, or a simulation's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..transport.stage_spec import wall_clock


@dataclass(frozen=True, slots=True)
class EngineTime:
    """What an engine's clocks read.

    clock       seconds that never go back
    wall_clock  seconds, of traces
    new_loop    makes the engine's event loop, whose timers go by `clock`
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = wall_clock
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


REAL_TIME = EngineTime()
