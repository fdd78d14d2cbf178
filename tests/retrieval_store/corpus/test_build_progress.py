from __future__ import annotations

import io
from itertools import count

from draftline.retrieval_store.corpus.build import BuildProgress, SpeedColumn
from rich.console import Console


def test_a_bar_tells_units_a_second_and_the_time_left() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    seconds = count()
    with BuildProgress(shown=True, console=console) as progress:
        # Every look at the clock is a second later.
        progress.get_time = lambda: float(next(seconds))
        task = progress.start_work("Scoring", "tokens", 100_000)
        [bar] = progress.tasks
        assert SpeedColumn().render(bar).plain == ""
        for _ in range(3):
            progress.advance(task, 5000)
        assert bar.speed is not None
        assert SpeedColumn().render(bar).plain == f"{bar.speed:,.0f} tokens/s"
        assert bar.time_remaining is not None
    assert "Scoring" in shown.getvalue()
    assert "tokens/s" in shown.getvalue()
