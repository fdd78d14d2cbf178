"""What long commands show of their progress."""

from __future__ import annotations

import io
from threading import Event

import pytest
from draftline.deploy.cli import progress as shown
from draftline.deploy.cli.progress import ShownWork, lines, progress, span
from rich.console import Console


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ToldStream(io.StringIO):
    """Sets an event when it has two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.has_two_lines = Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.getvalue().count("\n") >= 2:
            self.has_two_lines.set()
        return count


def test_time_left_is_that_of_the_mean_speed() -> None:
    clock = Clock()
    work = ShownWork("scoring", total=12_000, unit="tokens", clock=clock)
    clock.now += 7
    assert work.text() == "0 of 12,000 tokens, 7 s so far"
    work.advance(3000, note="round 1 of 3")
    clock.now += 13
    # 3,000 in 20 seconds.
    assert work.text() == "3,000 of 12,000 tokens, about 1 min 00 s left; round 1 of 3"
    work.advance(9000)
    assert work.text() == "12,000 of 12,000 tokens, 20 s so far; round 1 of 3"
    work.advance(0, note="")
    assert work.text() == "12,000 of 12,000 tokens, 20 s so far"


def test_what_was_done_before_says_nothing_of_the_speed() -> None:
    clock = Clock()
    work = ShownWork("griffin", total=100, unit="steps", done=50, clock=clock)
    clock.now += 10
    assert work.text() == "50 of 100 steps, 10 s so far"
    work.advance(10)
    assert work.text() == "60 of 100 steps, about 40 s left"


def test_work_of_unknown_size_tells_what_is_done() -> None:
    clock = Clock()
    work = ShownWork("reading", total=None, unit="documents", clock=clock)
    work.advance(5)
    clock.now += 3
    assert work.text() == "5 documents, 3 s so far"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7510, "2 h 05 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_lines_come_regularly_without_any_advance() -> None:
    stream = ToldStream()
    work = ShownWork("bench [a]", total=8, unit="requests", clock=Clock())
    with lines(work, Console(file=stream, soft_wrap=True), period_s=0.01):
        assert stream.has_two_lines.wait(60)
        work.advance(8)
    first, *_, last = stream.getvalue().splitlines()
    assert first == "bench [a]: 0 of 8 requests, 0 s so far"
    assert last == "bench [a]: 8 of 8 requests, 0 s so far"


def test_work_shorter_than_a_period_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("bench", total=2, unit="requests") as work:
        work.advance(2)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_terminal_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, force_interactive=True, width=100)
    monkeypatch.setattr(shown, "Console", lambda **_: console)
    with progress("bench [a]", total=4, unit="requests") as work:
        work.advance(3, note="round 1 of 3: target")
    assert "bench [a]" in terminal.getvalue()
    assert "━" in terminal.getvalue()
    assert "3 of 4 requests, about 0 s left; round 1 of 3: target" in terminal.getvalue()
    assert capsys.readouterr().out == ""
