"""The events of `--trace-steps`, as tests read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftline.core.arrays import Span


class Event(NamedTuple):
    """An event of a row; `span` in seconds since the epoch."""

    name: str
    span: Span
    args: Mapping[str, Any]


def read_rows(path: Path) -> dict[str, list[Event]]:
    """The events of each row, by its name; servers of one drafter have one together."""
    text = path.read_text("utf-8").rstrip()
    # Of an engine that still writes, or was killed, the array has no end.
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    rows: dict[str, list[Event]] = {name: [] for name in names.values()}
    for one in events:
        if one["ph"] == "X":
            span = one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6
            rows[names[one["tid"]]].append(Event(one["name"], span, one["args"]))
    return rows
