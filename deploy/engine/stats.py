"""What an engine counts, for metrics and for clients that should come back later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...cluster.drafting.stats import DrafterStats
from ...core.fair_share import TenantTotals
from ...core.pipelined.drafting import TreeChunkCounts
from ...core.step.in_flight import StepTimes
from .shadow import ShadowCounts

# Shorter than this, a full queue is asked again and again; longer, clients give up.
MIN_RETRY_S = 1
MAX_RETRY_S = 60
# Before any request has ended: what runs takes long.
UNKNOWN_RETRY_S = 5
# Requests that the rate is measured over.
WINDOW = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine does now, and totals since its start. `kv_usage` is 0 to 1.

    engine_id            of this engine among those of a server; a restart changes it
    num_prefix_queries   prompt tokens that were looked for in the prefix cache
    num_prefix_hits      of these, how many were there
    wasted_by_source     nodes of ended requests that were verified and not committed
    by_tenant            what ended requests took, by the tenants' labels
    tree_chunks          what went through the stages in chunks
    shadow               requests that were repeated without drafts
    num_recoveries       how often lost stages were replaced, and requests went on
    num_not_finite       requests that ended since the target's logits were NaN or infinite
    usage_dropped        usage records that could not be written
    step_times           how long steps took, from one's submission, or the answer before it, to its
                         answer
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
    tree_chunks: TreeChunkCounts
    step_times: StepTimes
    drafters: tuple[DrafterStats, ...]
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    by_tenant: Mapping[str, TenantTotals] = field(default_factory=dict)
    usage_dropped: int = 0
    num_not_finite: int = 0
    num_recoveries: int = 0


class FinishRate:
    """How many requests end in a second, over the last ones. Times are seconds of one clock."""

    def __init__(self, window: int = WINDOW) -> None:
        self._ends: deque[float] = deque(maxlen=window)

    def finished(self, now: float) -> None:
        """A request has ended."""
        self._ends.append(now)

    def per_second(self, now: float) -> float:
        """The rate from the oldest end that is known until now; 0.0 before two have ended."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 0.0
        return (len(self._ends) - 1) / (now - self._ends[0])


def retry_after_s(num_waiting: int, num_running: int, finished_per_s: float) -> int:
    """Whole seconds until as many requests as wait now have probably left the queue.

    A place is free at once where nothing waits or runs. Between `MIN_RETRY_S` and `MAX_RETRY_S`.
    """
    if num_waiting + num_running == 0:
        return MIN_RETRY_S
    if finished_per_s <= 0:
        return UNKNOWN_RETRY_S
    seconds = min(max(num_waiting, 1) / finished_per_s, MAX_RETRY_S)
    return max(math.ceil(seconds), MIN_RETRY_S)
