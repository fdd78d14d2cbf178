"""How long work reports what is done of it. `deploy/cli/progress.py` shows it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Work(Protocol):
    """Work that is being done."""

    def advance(self, count: float = 1, note: str | None = None) -> None:
        """Count `count` more units as done; a `note` says what goes on, up to the next note."""
        ...


class Progress(Protocol):
    """Announces work; the `Work` that it returns reports how far it is."""

    def __call__(
        self, label: str, *, total: float | None, unit: str, done: float = 0
    ) -> AbstractContextManager[Work]:
        """Begin work of `total` units, in the plural, `done` of them earlier; None: unknown."""
        ...


class Unseen:
    """Work without a progress display."""

    def advance(self, count: float = 1, note: str | None = None) -> None:
        """Nothing."""


def unseen(
    label: str,  # noqa: ARG001 - the parameters are those of `Progress`
    *,
    total: float | None,  # noqa: ARG001
    unit: str,  # noqa: ARG001
    done: float = 0,  # noqa: ARG001
) -> AbstractContextManager[Work]:
    """A `Progress` that shows nothing."""
    return nullcontext(Unseen())
