"""Progress bars of a build: share done, speed, time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# The speed is that of the last so many seconds: batches of a slow target are seconds apart.
SPEED_SECONDS = 60.0


class BuildProgress(Progress):
    """Bars on stderr; none with `shown` False."""

    def __init__(self, *, shown: bool, console: Console | None = None) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            disable=not shown,
            speed_estimate_period=SPEED_SECONDS,
        )

    def start_work(self, description: str, unit: str, total: int | None) -> TaskID:
        """One more bar; `unit` is what is counted, in the plural."""
        return self.add_task(description, total=total, unit=unit)


class SpeedColumn(ProgressColumn):
    """Units a second."""

    def render(self, task: Task) -> Text:
        """Empty until there is a speed."""
        speed = task.finished_speed or task.speed
        unit = task.fields.get("unit", "")
        return Text("" if speed is None else f"{speed:,.0f} {unit}/s", style="progress.data.speed")
