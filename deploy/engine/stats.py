"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...cluster.drafting.replies import DrafterStats
from ...core.fair_share import TenantTotals
from ...core.interfaces import StageMemory
from ...core.pipelined.drafting import TreeChunkCounts
from ...core.step.in_flight import StepTimes
from .shadow import ShadowCounts


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
    stage_memory         bytes that each stage keeps of the target
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
    stage_memory: tuple[StageMemory, ...] = ()
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    by_tenant: Mapping[str, TenantTotals] = field(default_factory=dict)
    usage_dropped: int = 0
    num_not_finite: int = 0
    num_recoveries: int = 0
