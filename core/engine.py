"""The engine's loop body: what one step of a replica does, in order."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .acceptance_rules import COUPLED
from .budget import NodeBudget, StepOutcome
from .drafting import Drafting, Offers
from .errors import DraftlineError, StageError, StageLost
from .output import TARGET_SOURCE, Delta, TokenLogProb
from .ports import ProposalSource, StepPipeline
from .request import Request, RequestState
from .scheduler import Scheduler
from .step_answers import Chosen, StepAnswers, TreeAnswers
from .step_builder import PromptChunk, TreeStep, build_step, slots_of
from .step_trace import StepTrace, TracedStep
from .stop import Advance, StopRule
from .types import Int32, StepCommit, StepOutput, Successors
from .verify import Walk, walks_of


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step on its way through the pipeline."""

    trees: list[TreeStep]
    chunks: list[PromptChunk]
    answer: Awaitable[StepOutput]
    offers: Offers | None
    num_rows: int
    sent_at: float
    traced: TracedStep | None

    @property
    def states(self) -> list[RequestState]:
        return [part.state for part in (*self.trees, *self.chunks)]


class EngineCore:
    """Runs requests through one pipeline with many drafters. One event loop uses it.

    Owns no thread and no clock; `clock` gives seconds for metrics only, `trace` hears of steps.
    """

    def __init__(  # noqa: PLR0913 - one parameter a part
        self,
        pipeline: StepPipeline,
        drafters: ProposalSource,
        scheduler: Scheduler,
        budget: NodeBudget,
        clock: Callable[[], float],
        *,
        acceptance: str = COUPLED,
        trace: StepTrace | None = None,
    ) -> None:
        """`acceptance`: the rule that decides about drafts (`core/acceptance_rules.py`)."""
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._budget = budget
        self._drafting = Drafting(drafters, scheduler, budget, clock, acceptance)
        self._clock = clock
        self._acceptance = acceptance
        self._trace = trace
        self._flights: deque[_Flight] = deque()
        self._states: dict[str, RequestState] = {}
        self._answered_at = 0.0
        self.num_steps = 0
        # Nodes of ended requests that were verified and thrown away.
        self.wasted_by_source: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._states or self._flights)

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request. Raises `CapacityError`; afterwards its sink hears everything."""
        assert request.request_id not in self._states, request.request_id
        state = RequestState(request, stop, blocks=[], arrival_time=self._clock())
        self._scheduler.add(state)
        self._states[request.request_id] = state

    def cancel(self, request_id: str) -> None:
        """End a request now, wherever it stands; an unknown id is ignored."""
        if state := self._states.get(request_id):
            last = Delta(
                request_id=request_id,
                token_ids=(),
                sources=(),
                text="",
                finish_reason="cancelled",
            )
            self._finish(state, last)

    def use_pipeline(self, pipeline: StepPipeline) -> None:
        """Go on with another pipeline, whose KV cache is empty; no request may be left."""
        assert not self.has_work
        self._scheduler.forget_kv()
        self._pipeline = pipeline

    def fail_all(self, error: DraftlineError) -> None:
        """End every request, running or waiting, with `error`."""
        for flight in self._flights:
            # Nobody waits for these answers any more; whatever they raise has been told.
            asyncio.ensure_future(flight.answer).add_done_callback(_ignore)
        self._flights.clear()
        for state in list(self._states.values()):
            self._fail(state, error)

    async def step(self) -> None:
        """Submit one step if there is something to submit and room for it, else commit the oldest.

        Raises `StageLost` after ending all requests with it; the pipeline must be replaced then.
        """
        try:
            room = len(self._flights) < self._pipeline.max_in_flight
            if not (room and await self._submit()) and self._flights:
                await self._commit(self._flights.popleft())
        except StageLost as error:
            self.fail_all(error)
            raise

    async def _submit(self) -> bool:
        """Plan a step over everything that is ready; False if nothing is."""
        planned_at = self._trace.clock() if self._trace is not None else 0.0
        for state in self._scheduler.admit():
            state.start_time = state.start_time or self._clock()
            self._drafting.open(state)
        decoding = self._scheduler.decoding()
        offers = await self._drafting.ask(decoding)
        # Some may have been cancelled while the drafters were asked.
        decoding = [state for state in decoding if self._is_alive(state)]
        trees = self._fit(self._drafting.grow(decoding, offers))
        chunks = self._scheduler.prompt_chunks(sum(tree.num_rows for tree in trees))
        if not trees and not chunks:
            return False
        step = build_step(self.num_steps, chunks, trees, self._scheduler.block_size)
        traced = None
        if self._trace is not None:
            step = replace(step, is_traced=True)
            traced = self._trace.submitting(planned_at, step, trees, chunks, offers)
        sent_at = self._clock()
        answer = self._pipeline.submit(step)
        flight = _Flight(trees, chunks, answer, offers, len(step.token_ids), sent_at, traced)
        for state in flight.states:
            state.in_flight += 1
        self._flights.append(flight)
        self.num_steps += 1
        return True

    async def _commit(self, flight: _Flight) -> None:
        """Take a step's answer into its requests."""
        try:
            output = await flight.answer
        except StageError as error:
            self._fail_step(flight, error)
            return
        outcome = self._outcome(flight)
        if flight.traced is not None:
            flight.traced.answered(output)
        for state in flight.states:
            state.in_flight -= 1
        answers = StepAnswers(output)
        has_rule = any(step.candidates is not None for step in flight.trees)
        assert has_rule == (output.verdicts is not None), "the stage did not do what it was asked"
        walks = walks_of([step.tree for step in flight.trees], output)
        for step, walk in zip(flight.trees, walks, strict=True):
            answer = answers.of_tree(step)
            self._scheduler.share(step.state, len(step.state.token_ids) - 1)
            self._commit_tree(step, walk, answer, outcome)
        for chunk in flight.chunks:
            chosen = answers.of_chunk(chunk)
            self._scheduler.share(chunk.state, chunk.end)
            if chunk.wants_token:
                self._commit_first(chunk.state, chosen)
        self._budget.note_step(outcome)
        if flight.traced is not None:
            flight.traced.committed()

    def _fit(self, trees: Sequence[TreeStep]) -> list[TreeStep]:
        """Trees of all that have KV slots for them; they come in order."""
        fitting = []
        for tree in trees:
            state = tree.state
            # Preempted for one before it.
            if not state.blocks:
                continue
            root_position = len(state.token_ids) - 1
            if self._scheduler.reserve(state, root_position + tree.num_rows):
                fitting.append(tree)
            # Drafts are never worth the KV of another request.
            elif self._scheduler.make_room(state, root_position + 1):
                fitting.append(self._drafting.bare(state))
        return fitting

    def _outcome(self, flight: _Flight) -> StepOutcome:
        """What an answered step took: from its start, or from the answer before it."""
        before, self._answered_at = self._answered_at, self._clock()
        seconds = self._answered_at - max(flight.sent_at, before)
        offers = flight.offers
        if offers is None:
            return StepOutcome(flight.num_rows, seconds, frozenset(), {})
        return StepOutcome(flight.num_rows, seconds, offers.asked, offers.costs)

    def _commit_tree(
        self, step: TreeStep, walk: Walk, answer: TreeAnswers, outcome: StepOutcome
    ) -> None:
        state = step.state
        if not self._is_alive(state):
            return
        rows, tokens, sources, drafted = walk
        outcome.count(step.tree, rows)
        if step.candidates is None:
            self._budget.learn(step.offered, tokens)
        advance = state.stop.advance(tokens)
        taken = advance.num_tokens
        state.record_walk(drafted, sources[:taken])
        self._append(state, tokens[:taken], answer.probe_ids, answer.successors)
        # A request that was preempted meanwhile has no KV to move.
        if advance.finish_reason is None and state.blocks:
            state.moves = _moves(state, rows, self._scheduler.block_size)
        log_probs = answer.chosen.logprobs_of(rows[:taken], state.request.params.logprobs)
        self._emit(state, advance, tokens[:taken], sources[:taken], log_probs)

    def _commit_first(self, state: RequestState, chosen: Chosen) -> None:
        """Take the token that the last prompt chunk predicts."""
        if not self._is_alive(state):
            return
        state.first_token_time = self._clock()
        tokens = chosen.tokens.tolist()
        if not state.stop.num_tokens_left:
            # Only the prompt was to be computed.
            self._emit(state, Advance(0, "", "length"), [], [], ())
            return
        advance = state.stop.advance(tokens)
        self._append(state, tokens, {}, {})
        log_probs = chosen.logprobs_of([0], state.request.params.logprobs)
        self._emit(state, advance, tokens, [TARGET_SOURCE], log_probs)

    def _append(
        self,
        state: RequestState,
        tokens: list[int],
        probe_ids: Mapping[str, Int32],
        successors: Mapping[str, Successors],
    ) -> None:
        base_len = len(state.token_ids)
        state.append(tokens)
        if state.is_open:
            ids = np.array(tokens, dtype=np.int32)
            commit = StepCommit(state.request_id, base_len, ids, probe_ids, successors)
            self._drafting.note_commit(commit)

    def _emit(
        self,
        state: RequestState,
        advance: Advance,
        tokens: Sequence[int],
        sources: Sequence[str],
        log_probs: tuple[TokenLogProb, ...],
    ) -> None:
        """Tell of committed tokens."""
        is_first = state.num_answered == len(tokens)
        prompt_log_probs = state.prompt_log_probs if is_first else None
        delta = Delta(
            request_id=state.request_id,
            token_ids=tuple(tokens),
            sources=tuple(sources),
            text=advance.text,
            finish_reason=advance.finish_reason,
            stop_reason=advance.stop_reason,
            log_probs=log_probs,
            prompt_log_probs=None if prompt_log_probs is None else tuple(prompt_log_probs),
        )
        if advance.finish_reason is None:
            if state.request.rules is not None:
                state.request.rules.advance(tokens)
            state.request.sink(delta)
        else:
            self._finish(state, delta)

    def _finish(self, state: RequestState, last: Delta) -> None:
        self._forget(state)
        state.request.sink(replace(last, metrics=state.metrics(self._clock(), self._acceptance)))

    def _fail_step(self, flight: _Flight, error: DraftlineError) -> None:
        for state in flight.states:
            self._fail(state, error)

    def _fail(self, state: RequestState, error: DraftlineError) -> None:
        if self._is_alive(state):
            self._forget(state)
            state.request.sink(error)

    def _forget(self, state: RequestState) -> None:
        del self._states[state.request_id]
        self._scheduler.remove(state)
        self.wasted_by_source.update(state.wasted_by_source())
        self._drafting.close(state)

    def _is_alive(self, state: RequestState) -> bool:
        return self._states.get(state.request_id) is state


def _ignore(answer: asyncio.Future[StepOutput]) -> None:
    if not answer.cancelled():
        answer.exception()


def _moves(state: RequestState, rows: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """KV copies that bring the rows of the root and the accepted nodes together, in order.

    A row's KV stands as many slots behind the root's as the row does in the step.
    """
    last = rows[-1]
    if last == len(rows) - 1:
        return []
    root_position = len(state.token_ids) - len(rows) - 1
    slots = slots_of(state.blocks, root_position, last + 1, block_size).tolist()
    return [(slots[row], slots[place]) for place, row in enumerate(rows) if row != place]
