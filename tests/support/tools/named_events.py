"""Server-sent events that have names."""

from __future__ import annotations

import json
from typing import Any


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are those of their data."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
