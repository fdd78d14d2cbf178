"""A bar of a timeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """What was done when, in seconds since the first step's planning."""

    begin: float
    length: float
    kind: str
    label: str = ""
