"""What the hub counts about a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.interfaces import PrefixCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStats:
    """Totals since start, for metrics.

    connected      whether messages can be sent now
    servers        that requests may go to now: 0 or 1, or more of a pool
    circuit_open   whether it failed and is not tried again before its delay is over
    left_out       it is a head whose drafts are never right: it is not asked any more
    messages       sent
    proposals      used: given out by the hub, late ones included
    late           came after their step's deadline
    late_used      of these, how many still fitted the text
    dropped        late ones that fit the text no more, or were replaced by a newer one
    errors         failures of any kind: raised, broke the contract, never answered, lost
    reconnects     connections after the first
    memory_bytes   what it takes now for requests and learned texts; 0 before its first report
    learning       ended requests by outcome, see `core.interfaces.LearningDrafter`; empty where it
                   learns nothing, or before its first report
    prefix         how much of new texts the cache of a model had already, in tokens
    moved          openings of a request at another server of the pool, since its own was lost, slow
                   or about to stop
    latency_sum_s  from message to answer, over the `latency_count` answers to queries
    open_s, observe_s, propose_s  seconds that the drafter itself worked, by kind of call
    """

    name: str
    connected: bool
    servers: int = 0
    circuit_open: bool
    messages: int
    proposals: int
    late: int = 0
    late_used: int = 0
    dropped: int = 0
    errors: int
    reconnects: int
    latency_sum_s: float
    latency_count: int
    open_s: float = 0.0
    observe_s: float = 0.0
    propose_s: float = 0.0
    left_out: bool = False
    memory_bytes: int = 0
    learning: Mapping[str, int] = field(default_factory=dict)
    prefix: PrefixCounts = field(default_factory=PrefixCounts)
    moved: int = 0
