"""A limit to how long a server takes to end."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End the process if the context lasts longer: exit status 1, and what each thread does on
    stderr.

    Ray waits without a limit for some answers of what may be gone. The limit holds whatever the
    process waits for, the interpreter's lock included; there is one at a time.
    """
    exits_within(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def exits_within(seconds: float) -> None:
    """End the process if it still runs then, likewise: for its last act, behind which the
    interpreter waits for threads of libraries without a limit."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
