"""How far the host keeps the device busy in a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ....core.steps import StepInput
from ....models.stage.stage import Stage
from ..instruments.clock import Clock, median_ms

AHEAD = 4


@dataclass(frozen=True, slots=True)
class HostTime:
    """Milliseconds of one step of a stage with the head.

    step_ms     for who waits for its tokens
    ahead_ms    of a step among `AHEAD` that are launched before the first is waited for, as
                stages of a pipeline do
    enqueue_ms  until the host has enqueued everything up to the logits
    span_ms     between an event before and one after that, on the device
    device_ms   of the whole step on the device, launched well ahead of it
    busy_ms     in which the device computes or copies; None where the profiler saw nothing
    """

    what: str
    step_ms: float
    ahead_ms: float
    enqueue_ms: float
    span_ms: float
    device_ms: float
    busy_ms: float | None

    @property
    def between_share(self) -> float:
        """Share of the step in which the device waits for the host: between graphs, where a step is
        one.
        """
        return max(0.0, 1 - self.device_ms / self.step_ms)

    @property
    def inside_share(self) -> float | None:
        """Share of its own time in which the device does nothing: gaps between kernels."""
        return None if self.busy_ms is None else max(0.0, 1 - self.busy_ms / self.device_ms)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        shares = {"between_share": self.between_share, "inside_share": self.inside_share}
        return asdict(self) | shares


def measure_host(what: str, stage: Stage, step: StepInput, clock: Clock) -> HostTime:
    """Time of one step on the host; `what` names the step in findings."""

    def enqueue() -> object:
        return stage.logits(step, None, step.logits_rows)

    def run() -> object:
        return stage.run(step, None)

    def run_ahead() -> None:
        for answer in [stage.launch(step) for _ in range(AHEAD)]:
            assert not isinstance(answer, Tensor), "the stage has the head"
            answer()

    waited, busy = clock.waited(run), clock.busy(run)
    return HostTime(
        what=what,
        step_ms=median_ms(waited),
        ahead_ms=median_ms(clock.waited(run_ahead)) / AHEAD,
        enqueue_ms=median_ms(clock.enqueued(enqueue)),
        span_ms=median_ms(clock.spanned(enqueue)),
        device_ms=median_ms(clock.on_device(lambda: stage.launch(step))),
        busy_ms=None if busy is None else 1e3 * busy,
    )
