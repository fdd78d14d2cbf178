"""The line that shows how far a long run is."""

from __future__ import annotations

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(unit: str, *, is_shown: bool = True) -> Progress:
    """What is done of how many `unit`, and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} " + unit),
        TimeRemainingColumn(),
        disable=not is_shown,
    )
