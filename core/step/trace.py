"""When the engine, its stages and its drafters did what; for `--trace-steps`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..steps import StepInput, StepOutput
from .parts import PromptChunk, ScheduledStep, TreeSteps


class TraceEvent(NamedTuple):
    """Something that took a while.

    row         of `TraceSink.row`
    begin, end  wall-clock seconds since the epoch
    args        what is said of it, as JSON would have it
    """

    row: int
    name: str
    begin: float
    end: float
    args: Mapping[str, Any]


class TraceSink(Protocol):
    """Keeps the events of one engine."""

    def row(self, name: str) -> int:
        """A new row of this name, for events that lie one inside the other or apart."""
        ...

    def write(self, events: Sequence[TraceEvent]) -> None:
        """Keep these. Must not raise, and should return soon: the engine waits for it."""
        ...


class StepTrace:
    """Writes the events of an engine: a row for the host, one a stage and one a drafter.

    Of each step the host asks the drafters (`ask`: planning and waiting), merges their drafts and
    builds it (`build`), and takes its output into the requests (`commit`). Other steps are built
    and committed while drafters are asked. A stage's events are named by what the step holds
    (`kind_of`).

    clock  wall-clock seconds, as the stages take theirs (`StepOutput.stage_spans`)
    """

    __slots__ = ("_asked_at", "_built_at", "_stages", "clock", "host", "sink")

    def __init__(self, clock: Callable[[], float], sink: TraceSink) -> None:
        self.clock = clock
        self.sink = sink
        self.host = sink.row("host")
        self._stages: list[int] = []
        self._asked_at = self._built_at = 0.0

    def stage(self, index: int) -> int:
        """The row of a stage."""
        while len(self._stages) <= index:
            self._stages.append(self.sink.row(f"stage {len(self._stages)}"))
        return self._stages[index]

    def drafter(self, name: str) -> Callable[[float, int], None]:
        """A row for one that has a message on its way at a time; to be called with each reply:
        the seconds since its message, and for how many requests it has drafts."""
        row, last_end = self.sink.row(name), 0.0

        def replied(seconds: float, num_requests: int) -> None:
            nonlocal last_end
            end = self.clock()
            # The seconds are another clock's: events of one row must not overlap.
            begin, last_end = max(end - seconds, last_end), end
            kind = "draft" if num_requests else "observe"
            self.sink.write([TraceEvent(row, kind, begin, end, {"requests": num_requests})])

        return replied

    def asking(self) -> None:
        """The planning of the next step begins, and drafters are asked."""
        self._asked_at = self.clock()

    def building(self) -> None:
        """The next step is built from what the drafters said."""
        self._built_at = self.clock()

    def submitting(self, step: StepInput, scheduled: ScheduledStep) -> TracedStep:
        """A step is about to be submitted."""
        return TracedStep(self, step, scheduled, self._asked_at, self._built_at, self.clock())


@dataclass(slots=True, eq=False)
class TracedStep:
    """One step on its way. A step that fails leaves no events."""

    _trace: StepTrace
    _step: StepInput
    _scheduled: ScheduledStep
    _asked_at: float
    _built_at: float
    _submitted_at: float
    _finished_at: float = field(init=False)
    _output: StepOutput = field(init=False)
    _before: _Totals = field(init=False)

    def finished(self, output: StepOutput) -> None:
        """Its output is there; nothing of it is in the requests yet."""
        self._finished_at = self._trace.clock()
        self._output = output
        self._before = self._totals()

    def committed(self) -> None:
        """Its tokens are in the requests."""
        self._trace.sink.write([*self._host_events(), *self._stage_events()])

    def _host_events(self) -> Iterator[TraceEvent]:
        host, step_id = self._trace.host, self._step.step_id
        trees, chunks, _, _, batch = self._scheduled
        if batch is not None:
            asked = {
                "step": step_id,
                "drafters": {n: len(ids) for n, ids in batch.plan.by_drafter.items()},
                "waited_us": round(1e6 * batch.seconds),
            }
            yield TraceEvent(host, "ask", self._asked_at, self._built_at, asked)
        nodes = Counter[str]()
        for counts in trees.trees.count_sources():
            nodes.update(counts)
        built = {
            "step": step_id,
            "rows": len(self._step.token_ids),
            "prompt_rows": sum(chunk.end - chunk.start for chunk in chunks),
            "requests": len(trees),
            "nodes": dict(nodes),
        }
        yield TraceEvent(host, "build", self._built_at, self._submitted_at, built)
        totals, before = self._totals(), self._before
        committed = {
            "step": step_id,
            "requests": len(trees),
            "tokens": totals.tokens - before.tokens,
            "first_tokens": totals.first_tokens - before.first_tokens,
            "accepted": dict(totals.accepted - before.accepted),
        }
        yield TraceEvent(host, "commit", self._finished_at, self._trace.clock(), committed)

    def _stage_events(self) -> Iterator[TraceEvent]:
        name, args = (
            kind_of(self._scheduled.trees, self._scheduled.prompt_chunks),
            {"step": self._step.step_id},
        )
        spans = self._output.stage_spans
        for index, (begin, end) in enumerate(spans):
            yield TraceEvent(self._trace.stage(index), name, begin, end, args)
        if not spans:
            return
        # Heads draft at the end of the last stage, one after the other.
        row, (first, last) = self._trace.stage(len(spans) - 1), spans[-1]
        for drafts in reversed(self._output.head_drafts):
            begin = max(first, last - drafts.seconds)
            yield TraceEvent(row, drafts.source, begin, last, args)
            last = begin

    def _totals(self) -> _Totals:
        trees, chunks = self._scheduled.trees, self._scheduled.prompt_chunks
        accepted: Counter[str] = Counter()
        for state in trees.states:
            accepted.update(state.stats.nodes.totals.accepted)
        return _Totals(
            sum(len(state.token_ids) for state in trees.states),
            sum(len(chunk.state.token_ids) for chunk in chunks),
            accepted,
        )


class _Totals(NamedTuple):
    """What the requests of a step have got so far.

    tokens        of those that verify a tree, be it empty
    first_tokens  of those whose prompts the step computes
    accepted      nodes that were committed, by who proposed them first
    """

    tokens: int
    first_tokens: int
    accepted: Counter[str]


def kind_of(trees: TreeSteps, chunks: Sequence[PromptChunk]) -> str:
    """Whether a step holds prompt rows, trees, chunks of trees, or prompt rows and trees."""
    if not len(trees):
        return "prompt"
    if chunks:
        return "mixed"
    return "chunk" if trees.tree_chunks else "tree"
