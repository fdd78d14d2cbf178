"""Options of a stage's CUDA graphs; imports little, for modules that only pass them on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """The steps that graphs are captured for.

    max_rows       rows of the largest step; graphs end at `graph_runner.MOST_ROWS`
    max_requests   requests of a step
    max_positions  positions are below this
    seconds        no capture begins after this time; steps then use the next larger graph
    """

    max_rows: int
    max_requests: int
    max_positions: int
    seconds: float = 60.0
