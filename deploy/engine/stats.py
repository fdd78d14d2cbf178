"""What an engine counts, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...cluster.drafting.stats import DrafterStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine does now, and totals since its start. `kv_usage` is 0 to 1.

    engine_id            tells the engines behind one server apart; a restarted one has another
    num_prefix_queries   prompt tokens that were looked for in the prefix cache
    num_prefix_hits      of these, how many were there
    wasted_by_source     nodes of ended requests that were verified and not committed
    """

    engine_id: str
    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    wasted_by_source: Mapping[str, int]
    drafters: tuple[DrafterStats, ...]
