"""Keeps what work tells of its progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RecordedWork:
    """`done` of `total` units; `notes` in order."""

    def __init__(self, label: str, total: float | None, done: float) -> None:
        self.label, self.total, self.done = label, total, done
        self.notes: list[str] = []
        self.is_ended = False

    def advance(self, count: float = 1, note: str | None = None) -> None:
        self.done += count
        self.notes += [] if note is None else [note]


class RecordedProgress:
    """A `Progress` whose `works` are those that were begun."""

    def __init__(self) -> None:
        self.works: list[RecordedWork] = []

    @contextmanager
    def __call__(
        self, label: str, *, total: float | None, unit: str, done: float = 0
    ) -> Iterator[RecordedWork]:
        assert all(work.is_ended for work in self.works), "works are shown one after the other"
        self.works.append(work := RecordedWork(label, total, done))
        yield work
        work.is_ended = True
