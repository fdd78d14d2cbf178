"""What each step held and when; for `--trace-steps`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..arrays import Span
from ..steps import StepInput, StepOutput
from .ask_plan import DraftBatch
from .prompt_chunk import PromptChunk
from .tree_steps import TreeSteps


class SliceCounts(NamedTuple):
    """See `StepRecord.slices`."""

    request: int
    nodes: int
    killed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One answered step. Times are wall-clock seconds since the epoch.

    planned_at       planning began; the drafters are asked right after it
    drafters         who was asked
    draft_wait_s     how long they were waited for
    submitted_at     it went to the pipeline
    answered_at      the engine took its answer
    committed_at     its tokens were in their requests
    rows             of the step: roots, nodes, probe rows and prompt rows
    prompt_rows      of these, how many belong to prompts
    requests         that verified a tree, be it empty
    tree_nodes       nodes of all trees; nodes_by_source says who proposed them first
    accepted_nodes   of these, how many were committed; likewise by source
    tokens           committed to requests that verified a tree
    first_tokens     tokens that prompts asked for
    slices           of each request whose tree went out in slices: its number of arrival, nodes of
                     the slice, and how many of them the text had left before the answer came
    stages           when each stage began and ended its work, by the clock of its own host
    """

    step: int
    planned_at: float
    drafters: tuple[str, ...]
    draft_wait_s: float
    submitted_at: float
    answered_at: float
    committed_at: float
    rows: int
    prompt_rows: int
    requests: int
    tree_nodes: int
    accepted_nodes: int
    tokens: int
    first_tokens: int
    nodes_by_source: Mapping[str, int]
    accepted_by_source: Mapping[str, int]
    slices: tuple[SliceCounts, ...]
    stages: tuple[Span, ...]


class StepTrace:
    """Hands a record of each answered step of an engine to `write`.

    clock  wall-clock seconds, as the stages take theirs (`StepOutput.stage_spans`)
    write  must not raise, and should return soon: the engine waits for it
    """

    __slots__ = ("_planned_at", "clock", "write")

    def __init__(self, clock: Callable[[], float], write: Callable[[StepRecord], None]) -> None:
        self.clock = clock
        self.write = write
        self._planned_at = 0.0

    def planning(self) -> None:
        """The planning of the next step begins."""
        self._planned_at = self.clock()

    def submitting(
        self,
        step: StepInput,
        trees: TreeSteps,
        chunks: Sequence[PromptChunk],
        draft_batch: DraftBatch | None,
    ) -> TracedStep:
        """A step is about to be submitted."""
        return TracedStep(self, self._planned_at, step, trees, chunks, draft_batch)


class TracedStep:
    """One step on its way. A step that fails leaves no record."""

    __slots__ = ("_answered_at", "_before", "_chunks", "_draft_batch", "_planned_at", "_slices",
                 "_spans", "_step", "_submitted_at", "_trace", "_trees")  # fmt: skip

    def __init__(  # noqa: PLR0917 - made by `StepTrace.submitting` alone
        self,
        trace: StepTrace,
        planned_at: float,
        step: StepInput,
        trees: TreeSteps,
        chunks: Sequence[PromptChunk],
        draft_batch: DraftBatch | None,
    ) -> None:
        self._trace = trace
        self._step = step
        self._trees = trees
        self._chunks = chunks
        self._draft_batch = draft_batch
        self._planned_at = planned_at
        self._submitted_at = trace.clock()

    def landed(self) -> None:
        """Its answer is there, and no tree has moved for it."""
        self._slices = tuple(
            SliceCounts(self._trees.states[place].order[1], len(part.nodes), part.num_killed)
            for place, part in self._trees.slices.items()
        )

    def answered(self, output: StepOutput) -> None:
        """Its answer is read; nothing of it is in the requests yet."""
        self._answered_at = self._trace.clock()
        self._spans = output.stage_spans
        self._before = self._totals()

    def committed(self) -> None:
        """Its tokens are in the requests: the record is complete."""
        committed_at = self._trace.clock()
        totals = self._totals()
        nodes = Counter[str]()
        for counts in self._trees.trees.count_sources():
            nodes.update(counts)
        accepted = totals.accepted - self._before.accepted
        draft_batch = self._draft_batch
        record = StepRecord(
            step=self._step.step_id,
            planned_at=self._planned_at,
            drafters=tuple(sorted(draft_batch.plan.by_drafter)) if draft_batch else (),
            draft_wait_s=draft_batch.seconds if draft_batch else 0.0,
            submitted_at=self._submitted_at,
            answered_at=self._answered_at,
            committed_at=committed_at,
            rows=len(self._step.token_ids),
            prompt_rows=sum(chunk.end - chunk.start for chunk in self._chunks),
            requests=len(self._trees),
            tree_nodes=nodes.total(),
            accepted_nodes=accepted.total(),
            tokens=totals.tokens - self._before.tokens,
            first_tokens=totals.first_tokens - self._before.first_tokens,
            nodes_by_source=dict(nodes),
            accepted_by_source=dict(accepted),
            slices=self._slices,
            stages=self._spans,
        )
        self._trace.write(record)

    def _totals(self) -> _Totals:
        accepted: Counter[str] = Counter()
        for state in self._trees.states:
            accepted.update(state.nodes.totals.accepted)
        return _Totals(
            tokens=sum(len(state.token_ids) for state in self._trees.states),
            first_tokens=sum(len(chunk.state.token_ids) for chunk in self._chunks),
            accepted=accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What the requests of a step have got so far."""

    tokens: int
    first_tokens: int
    accepted: Counter[str]
