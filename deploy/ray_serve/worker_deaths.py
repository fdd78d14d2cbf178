"""What Ray prints of a process that died, in one line in place of its 800 characters.

Only the words that say the same of every death are left out: which process it was, and how it
ended, stay. What draftline itself made of it (`event=stage_replaced`) is a line of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

_REPORT = re.compile(
    r"A worker died or was killed while executing a task.*?Worker PID: (\d+)"
    r".*?Worker exit detail: (.*?)\.?(?: Some common causes include:.*)?(?=\x1b|\n|$)"
)


def shortened(text: str) -> str:
    """The text with what Ray reports of deaths cut short; what is worded otherwise stays."""
    return _REPORT.sub(r"process \1 died: \2", text)


@contextmanager
def short_reports() -> Iterator[None]:
    """Shorten what Ray prints on stdout, in a thread of its own, within the context."""
    with redirect_stdout(cast("TextIO", _Shortened(sys.stdout))):
        yield


class _Shortened:
    """A text stream before another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Ray writes each report in one call."""
        return self._stream.write(shortened(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
