"""The progress of long commands on stderr: a bar on a terminal, a line every few seconds elsewhere.

with progress("scoring", total=12_000, unit="tokens") as work:
    for batch in batches:
        work.advance(len(batch))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

PERIOD_S = 5.0
# A bar drawn ten times a second, as is rich's default, takes time from what is measured.
DRAWN_A_SECOND = 2


class ShownWork:
    """How much of some work is done, as text.

    total  None: unknown
    done   units that were done before it began
    clock  seconds
    """

    def __init__(
        self,
        label: str,
        *,
        total: float | None,
        unit: str,
        done: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.done = label, total, done
        self._unit, self._before, self._note = unit, done, ""
        self._clock, self._begin, self._lock = clock, clock(), Lock()

    def advance(self, count: float = 1, note: str | None = None) -> None:
        """Count units as done, from any thread; a `note` stays until the next one."""
        with self._lock:
            self.done += count
            self._note = self._note if note is None else note

    def text(self) -> str:
        """Such as `12 of 48 requests, about 3 min 20 s left; round 1 of 3: target`."""
        of_all = "" if self.total is None else f" of {self.total:,.0f}"
        text = f"{self.done:,.0f}{of_all} {self._unit}, {self._time()}"
        return f"{text}; {self._note}" if self._note else text

    def _time(self) -> str:
        """The time left at the mean speed up to now; without one, the time that has passed."""
        passed, advanced = self._clock() - self._begin, self.done - self._before
        if self.total is None or not advanced or self.done >= self.total:
            return f"{span(passed)} so far"
        return f"about {span((self.total - self.done) * passed / advanced)} left"


@contextmanager
def progress(label: str, *, total: float | None, unit: str, done: float = 0) -> Iterator[ShownWork]:
    """Show on stderr how far some work is, until the context ends. Not to be nested.

    `total` and `done` are in units, named by `unit` in the plural; `done` were done before.
    """
    work = ShownWork(label, total=total, unit=unit, done=done)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _bar(work, console) if console.is_interactive else lines(work, console):
        yield work


def span(seconds: float) -> str:
    """A time as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    minutes, left = divmod(round(seconds), 60)
    if not minutes:
        return f"{left} s"
    if minutes < 60:
        return f"{minutes} min {left:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


@contextmanager
def lines(work: ShownWork, console: Console, period_s: float = PERIOD_S) -> Iterator[None]:
    """Print a line each `period_s`, and a last one if there was any before."""
    ended, printed = Event(), False

    def show() -> None:
        console.print(f"{work.label}: {work.text()}", markup=False)

    def show_regularly() -> None:
        nonlocal printed
        while not ended.wait(period_s):
            show()
            printed = True

    thread = Thread(target=show_regularly, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if printed:
            show()


class _WorkColumn(ProgressColumn):
    """The text of some work."""

    def __init__(self, work: ShownWork) -> None:
        super().__init__(Column(no_wrap=True))
        self._work = work

    def render(self, task: Task) -> Text:
        """The text, and the bar's length beside it."""
        task.completed, task.total = self._work.done, self._work.total
        return Text(self._work.text())


@contextmanager
def _bar(work: ShownWork, console: Console) -> Iterator[None]:
    bars = Bars(
        TextColumn(escape(work.label)), BarColumn(bar_width=24), _WorkColumn(work),
        console=console, refresh_per_second=DRAWN_A_SECOND, transient=True,
    )  # fmt: skip
    with bars:
        bars.add_task(work.label, total=work.total)
        yield
