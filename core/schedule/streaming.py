"""Which requests' trees go through the pipeline in slices, and which nodes each slice takes.

A request whose steps go one at a time keeps one stage busy. As long as there are more steps in
flight than requests, each may have several: slices of one tree that grows below them. With more
requests each has one step in flight again, which is a round, so streaming fades out by itself. See
docs/how-it-works.md, "Pipelined trees".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Span
from ..proposals import DraftCost, Proposal, Query
from ..request.request import RequestState
from ..request.sampling_params import StreamingMode
from ..speculation.policy import SpeculationPolicy
from ..step.in_flight import StepInFlight
from ..step.tree_steps import TreeSteps
from ..streaming.misses import Misses
from ..streaming.pace import SlicePace
from ..streaming.slices import Node, Stream, TreeSlice
from ..tree.merge import merge, reroot
from ..tree.streamed_tree import StreamedTree, path_to
from .scheduler import Scheduler

# No node that is less probable, for each request that runs, is sent ahead of what is known, however
# cheap a row is.
LEAST_VALUE = 0.004
# A drafted token that is more probable than not: nobody is waited for who may know of others.
SURE_VALUE, MOST_FIRSTS = 0.5, 16
# Fewer are no stream.
MIN_FLIGHTS = 2
# Fewer stages leave little to fill, and on CPUs they share cores.
LEAST_STAGES = 4


@dataclass(slots=True)
class StreamingCounts:
    """What went through the stages in slices.

    slices        that were sent
    nodes         in them
    killed_nodes  of these, how many the text had left before they were answered
    idle_turns    turns of a request that might have sent a slice, and had nothing new
    """

    slices: int = 0
    nodes: int = 0
    killed_nodes: int = 0
    idle_turns: int = 0


class Streaming:
    """Grows the trees of streamed requests."""

    __slots__ = ("_clock", "_misses", "_mode", "_policy", "_scheduler", "counts", "pace")

    def __init__(
        self,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        clock: Callable[[], float],
        mode: StreamingMode = "off",
    ) -> None:
        """`mode`: of the engine; a request may ask for less, and for `on` where this is `auto`."""
        self._scheduler = scheduler
        self._policy = policy
        self._mode: StreamingMode = mode
        self._clock = clock
        # Of greedy requests, and of those that draw.
        self._misses = Misses(), Misses()
        num_stages = max(1, scheduler.num_groups - 1)
        self.pace = SlicePace(lambda: policy.cost, num_stages, clock)
        self.counts = StreamingCounts()

    def num_flights(self, state: RequestState) -> int:
        """Steps that a request may have in flight."""
        options = state.request.options
        wanted = "off" if options.explain else options.streaming
        if wanted == "off" or not self._may_be:
            return 1
        each = self._scheduler.num_flights_each
        if "on" in (self._mode, wanted):
            return max(MIN_FLIGHTS, each)
        return each if self.pace.num_stages >= LEAST_STAGES else 1

    def may_follow(self, state: RequestState) -> bool:
        """Whether a request that has steps in flight may send another."""
        stream = state.stream
        if stream is None or state.in_flight >= self.num_flights(state):
            return False
        if stream.is_new:
            return True
        least, depth = self._least_value, max_depth(state)
        value = max((node.value for node in stream.unsent(least, 1, depth)), default=0.0)
        if (leaf := stream.to_extend(least, depth)) is not None:
            # Of what is drafted behind it half is right, as far as anybody knows.
            value = max(value, leaf.value / 2)
        return value > 0 and self.pace.is_turn(stream, value)

    def begin(self, states: Sequence[RequestState]) -> None:
        """Before drafters are asked for these requests: say which of them may be streamed, and
        which node of each is to be extended.
        """
        for state in states:
            if not state.in_flight:
                # All that was sent is answered: nothing is lost with an old tree but drafts.
                if self.num_flights(state) == 1 or not may_stream(state):
                    state.stream = None
                elif state.stream is None:
                    last = len(state.token_ids) - 1
                    state.stream = StreamedTree(state.token_ids[last], last)
            if (stream := state.stream) is not None:
                stream.asked = stream.to_extend(self._least_value, max_depth(state))

    def begin_runs(self, states: Sequence[RequestState]) -> None:
        """Nothing of these requests' trees is on its way: runs of slices so far are over."""
        for state in states:
            if state.stream is not None and state.stream.outcomes:
                self.misses(state).note(state.stream.outcomes)
                state.stream.outcomes = []

    def misses(self, state: RequestState) -> Misses:
        """How often slices of requests like this one end a run."""
        return self._misses[state.request.params.temperature > 0]

    def in_time(self, names: Sequence[str], costs: Mapping[str, DraftCost]) -> tuple[str, ...]:
        """Those of them that draft in the time that a stage takes: slices go out so often."""
        own = [(name, costs[name]) for name in names if name in costs]
        return tuple(
            name
            for name, cost in own
            if not cost.is_ahead and cost.message_s + cost.query_s <= self.pace.stage_s
        )

    def query(self, state: RequestState, max_nodes: int) -> Query | None:
        """What drafters are asked; None where nothing is to be extended."""
        committed_len, stream = len(state.token_ids), state.stream
        if stream is None:
            return Query(state.request_id, committed_len, max_nodes)
        if stream.asked is None:
            return None
        assumed = tuple(path_to(stream.asked)) or None
        return Query(state.request_id, committed_len, max_nodes, assumed)

    def is_sure(self, proposals: Sequence[Proposal]) -> bool:
        """Whether the next token is probably one that these propose."""
        firsts = merge(proposals, MOST_FIRSTS, 1, self._policy.table)
        return float(firsts.values.max(initial=0.0)) >= SURE_VALUE

    def grow(self, state: RequestState, proposals: Sequence[Proposal], max_nodes: int) -> None:
        """Add what drafters said to the tree, as far as the text has not gone another way."""
        stream = state.stream
        assert stream is not None
        at, stream.asked = stream.asked, None
        if at is None:
            return
        at.was_asked = True
        if not at.is_alive:
            # The text may have gone over it, and along the drafts.
            since = state.token_ids[at.position + 1 :]
            proposals = [] if at.is_dropped else _rerooted(proposals, since)
            at = stream.root
        depth = max_depth(state) - (at.position - stream.root.position)
        if proposals and depth > 0:
            offered = self._policy.num_offered(proposals, max_nodes)
            stream.graft(merge(proposals, offered, depth, self._policy.table), at)

    def slice(self, state: RequestState, max_nodes: int) -> TreeSlice | None:
        """What goes into the next step; None where nothing is new."""
        stream = state.stream
        assert stream is not None
        nodes = self._worth(stream, stream.unsent(self._least_value, max_nodes, max_depth(state)))
        if not nodes and not stream.is_new:
            self.counts.idle_turns += 1
            return None
        self.counts.slices += 1
        self.counts.nodes += len(nodes)
        return TreeSlice.of(stream, nodes, self._policy.table.names)

    def _worth(self, stream: Stream, nodes: Sequence[Node]) -> Sequence[Node]:
        """Those that are worth their rows, given that the text comes to the best of them: a slice
        that is in vain delays nobody who waits for its answer."""
        if not nodes:
            return nodes
        values = np.sort([node.value for node in nodes])[::-1]
        if stream.is_new:
            count = self._policy.num_worth(values)
        else:
            count = max(1, self._policy.num_worth(values / values[0]))
        return [node for node in nodes if count and node.value >= values[count - 1]]

    def note_sent(self, step: StepInFlight) -> None:
        """A step went out."""
        if not self._may_be:
            return
        planned_at = None if step.draft_batch is None else step.draft_batch.began_at
        self.pace.sent(_streams(step), step.num_rows, planned_at)

    def wants_spans(self, trees: TreeSteps) -> bool:
        """Whether stages are to say how long they work on a step."""
        return bool(trees.slices) and self.pace.wants_spans()

    def note_answer(self, step: StepInFlight, spans: Sequence[Span]) -> None:
        """Count what an answer came too late for; before it moves any root.

        spans: what stages said of it, if they were to
        """
        if spans and step.trees.slices:
            self.pace.note_spans(spans, step.num_rows)
        for part in step.trees.slices.values():
            self.counts.killed_nodes += part.num_killed
        self.pace.answered(_streams(step), step.num_rows, step.sent_at)

    @property
    def _may_be(self) -> bool:
        """Whether any request may be streamed; where none may, no step is kept account of."""
        return self._mode != "off" and self._scheduler.num_groups >= MIN_FLIGHTS

    @property
    def _least_value(self) -> float:
        """Of a node that is worth its row.

        A row makes every stage's next step longer, for all requests; a node that is missing when
        the text comes there costs its request the time of all stages.
        """
        num_running = len(self._scheduler.running)
        row = self._policy.row_share / self.pace.num_stages
        return max(LEAST_VALUE, row) * num_running


def _streams(step: StepInFlight) -> list[Stream]:
    return [part.stream for part in step.trees.slices.values()]


def max_depth(state: RequestState) -> int:
    """Deepest useful node: one more token, the bonus, follows the deepest accepted one."""
    return state.stop.num_tokens_left - 1


def may_stream(state: RequestState) -> bool:
    """Whether the request wants drafts, and no masks of a grammar, which follows whole trees."""
    permitted = state.request.allowed_tokens
    has_form = permitted is not None and permitted.constraint is not None
    return state.request.options.speculative and not has_form


def _rerooted(proposals: Sequence[Proposal], tokens: Sequence[int]) -> list[Proposal]:
    ids = np.array(tokens, dtype=np.int32)
    found = [reroot(proposal, ids) for proposal in proposals]
    return [proposal for proposal in found if proposal is not None]
