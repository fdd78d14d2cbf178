"""How long work takes: for who waits for it, on the device alone, and for who only enqueues it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]

# Written before each measured launch: the host gets ahead of the device, by hundreds of launches,
# and no input is in a cache from the run before. About three milliseconds on an H100.
LEAD_BYTES = 8 << 30
# Of the memory that is free, for it, where that is less.
LEAD_SHARE = 0.1
ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


@dataclass(frozen=True, slots=True)
class Repeats:
    """Runs before any is measured, and then `least` to `most` until `seconds` have passed."""

    warm: int = 3
    least: int = 5
    most: int = 40
    seconds: float = 0.6


DEFAULT = Repeats()


class TimeBudget:
    """What is left of some seconds."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.monotonic,
        *, start: float | None = None,
    ) -> None:  # fmt: skip
        """They began at `start`, by default now."""
        self._clock, self._seconds = clock, seconds
        self._start = clock() if start is None else start

    def is_over(self, share: float = 1.0) -> bool:
        """Whether so much of it is used up."""
        return self._clock() - self._start >= share * self._seconds


class Clock:
    """Measures on one device."""

    def __init__(self, device: torch.device, repeats: Repeats = DEFAULT) -> None:
        self.device, self._repeats = device, repeats
        self._lead: Tensor | None = None

    def wait(self) -> None:
        """Until the device has done all that was enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def waited(self, run: Run) -> list[float]:
        """Seconds of each run for a caller that waits for the device after it."""

        def once() -> float:
            start = time.perf_counter()
            run()
            self.wait()
            return time.perf_counter() - start

        return self._repeat(once)

    def enqueued(self, run: Run) -> list[float]:
        """Seconds until `run` returns, the device idle before it."""

        def once() -> float:
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            self.wait()
            return seconds

        return self._repeat(once)

    def on_device(self, run: Run) -> list[float]:
        """Seconds of each run between two events on the device; cold caches.

        On a CPU those of the call.
        """
        return self._repeat(lambda: self._on_device_once(run))

    def spanned(self, run: Run) -> list[float]:
        """The same without a lead: the waits of the device for the host are in it."""
        return self._repeat(lambda: self._between_events(run))

    def busy(self, run: Run, count: int = 10) -> float | None:
        """Seconds of a run in which the device computes or copies; None where nobody saw that.

        On a CPU those in which it is inside one of torch's operators.
        """
        kind = self.device.type
        run()
        self.wait()
        with profile(activities=[ACTIVITIES[kind]], acc_events=True) as found:
            for _ in range(count):
                run()
            self.wait()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in found.events() or ()
            if event.device_type.name == kind.upper()
        ]
        return covered(spans) * 1e-6 / count if spans else None

    def _on_device_once(self, run: Run) -> float:
        if self.device.type == "cuda":
            if self._lead is None:
                free, _ = torch.cuda.mem_get_info(self.device)
                size = min(LEAD_BYTES, int(LEAD_SHARE * free))
                self._lead = torch.empty(size, dtype=torch.int8, device=self.device)
            self._lead.zero_()
        return self._between_events(run)

    def _between_events(self, run: Run) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        self.wait()
        return 1e-3 * first.elapsed_time(last)

    def _repeat(self, once: Callable[[], float]) -> list[float]:
        limits = self._repeats
        for _ in range(limits.warm):
            once()
        found: list[float] = []
        start = time.perf_counter()
        while len(found) < limits.most:
            found.append(once())
            if len(found) >= limits.least and time.perf_counter() - start > limits.seconds:
                break
        return found


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def median_ms(seconds: Sequence[float]) -> float:
    """Their median, milliseconds."""
    return 1e3 * statistics.median(seconds)
