"""The engine's loop body: what one step of a replica does, in order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from .committing import Committing
from .drafting.asking import Drafting, DraftingGroup
from .drafting.form_queue import FormQueue
from .drafting.tree_choice import TreeChoice
from .drafting.tree_fit import TreeFit
from .errors import (
    Contained,
    DraftlineError,
    NotFinite,
    RequestError,
    RequestSuspected,
    StageLost,
    as_request_failure,
    contain_each,
)
from .interfaces import ProposalSource, StepPipeline
from .request.draft_tally import DraftTally
from .request.outbox import Outbox
from .request.output import Delta
from .request.request import Request, RequestState
from .request.sampling_params import StreamingMode
from .request.stop import StopRule
from .schedule.scheduler import Scheduler
from .schedule.shares.tenant_work import EndedRequests
from .schedule.streaming import Streaming
from .schedule.wakeup import Wakeup
from .speculation.draft_plan import DraftBatch, StepOutcome, nobody_asked
from .speculation.policy import SpeculationPolicy
from .step.builder import build_step
from .step.edits import edits_of_parts
from .step.head_drafts import with_head_tasks
from .step.in_flight import BuiltStep, Flights, StepDeadline, StepInFlight, StepResults
from .step.outputs import TreeOutput
from .step.trace import StepTrace
from .step.tree_steps import NO_TREE_STEPS, TreeSteps
from .steps import StepOutput
from .verify.rules import COUPLED
from .verify.walk import Walk, walks_along

logger = logging.getLogger(__name__)

# So many steps of a request may be lost with a stage, one after the other, before it is taken for
# the cause and ends.
MAX_LOSSES = 1
# How long a wait may last that no answer of a stage ends.
IDLE_WAIT_S = 0.05


class EngineCore:
    """Runs requests through one pipeline with many drafters. One event loop uses it.

    Owns no thread and no clock; `clock` gives seconds for metrics only, `trace` records steps.
    """

    def __init__(
        self,
        pipeline: StepPipeline,
        drafters: ProposalSource,
        scheduler: Scheduler,
        policy: SpeculationPolicy,
        clock: Callable[[], float],
        *,
        acceptance: str = COUPLED,
        trace: StepTrace | None = None,
        step_timeout_s: float = math.inf,
        streaming: StreamingMode = "off",
    ) -> None:
        """`acceptance`: the rule that decides about drafts (`core/verify/rules.py`).

        `streaming`: whether the tree of a request may go through the stages in slices, several of
        them at a time (`core/schedule/streaming.py`).
        A step whose answer takes longer than `step_timeout_s`, and many times longer than steps
        take, is a lost stage's.
        """
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._policy = policy
        # Only a coupled walk needs nothing of a node but the target's token after it.
        mode: StreamingMode = streaming if acceptance == COUPLED else "off"
        self.streaming = Streaming(scheduler, policy, clock, mode)
        self._drafting = Drafting(drafters, scheduler, policy, clock, streaming=self.streaming)
        self._choice = TreeChoice(scheduler, policy, clock, acceptance, streaming=self.streaming)
        self._fit = TreeFit(scheduler, policy, acceptance)
        self._tally = DraftTally()
        self._outbox = Outbox(self._fail)
        self._committing = Committing(
            scheduler, self._drafting, policy, self._outbox, clock,
            tally=self._tally, finish=self._finish,
        )  # fmt: skip
        self._clock = clock
        self._acceptance = acceptance
        self._trace = trace
        self._wakeup = Wakeup()
        self._forms = FormQueue(self._choice.allow, self._fail, self._wakeup.notify)
        self.deadline = StepDeadline(step_timeout_s)
        self._in_flight = Flights()
        self._asking: DraftingGroup | None = None
        self._states: dict[str, RequestState] = {}
        self._answered_at = 0.0
        self.num_steps = 0
        # Requests that ended since the target's logits were NaN or infinite.
        self.num_not_finite = 0
        self.ended = EndedRequests()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._states or self._in_flight)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._states)

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request; from now on its sink gets its deltas, and the error if it fails.

        Raises `CapacityError`; `RequestError` where a request of that id runs.
        """
        if request.request_id in self._states:
            raise RequestError("request_id", "is that of a request that runs; take another")
        state = RequestState(request, stop, blocks=[], arrival_time=self._clock())
        self._scheduler.add(state)
        state.nodes = self._tally.open()
        self._states[request.request_id] = state
        self._wakeup.notify()

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
            self._outbox.deliver()

    def use_pipeline(self, pipeline: StepPipeline) -> None:
        """Go on with another pipeline, whose KV cache is empty: requests compute theirs again."""
        assert not self._in_flight
        self._scheduler.forget_kv()
        self._pipeline = pipeline

    def fail_all(self, error: DraftlineError) -> None:
        """End every request, running or waiting, with `error`."""
        self._in_flight.drop()
        for state in list(self._states.values()):
            self._fail(state, error)
        self._outbox.deliver()

    def abandon(self, error: DraftlineError) -> None:
        """Give every request `error`; for another thread, while the engine's hangs in a step."""
        for state in list(self._states.values()):
            self._outbox.tell(state, error)

    async def step(self) -> None:
        """Commit what is answered; admit, draft, merge, build and submit a step; tell; else wait.

        What is waited for is the first event: an answer, proposals, token masks, a new request, a
        cancellation. What goes wrong with a request ends that request; what no request can be
        blamed for ends those that run. Raises `StageLost`: the pipeline must be replaced then
        (`use_pipeline`), or all requests ended (`fail_all`).
        """
        with self._supervised():
            self._wakeup.clear()
            while (in_flight := self._in_flight.answered) is not None:
                results = self._verify(in_flight)
                if results is not None:
                    self._commit(in_flight, results)
            self._admit()
            await self._draft()
            if self._has_room:
                if self._trace is not None:
                    self._trace.building()
                draft_batch, trees = await self._merge()
                if (built := self._build(trees)) is not None:
                    self._submit(built, draft_batch)
                    return
            self._outbox.deliver()
            await self._wait()

    @contextmanager
    def _supervised(self) -> Iterator[None]:
        try:
            yield
        except StageLost:
            self._blame_lost()
            self._in_flight.drop()
            raise
        except Exception as error:  # noqa: BLE001 - it supervises: the engine goes on
            self._fail_running(error)
        finally:
            self._outbox.deliver()

    def _admit(self) -> None:
        """Start the requests that have room."""
        for state in self._scheduler.admit():
            with self._contain(state):
                state.start_time = state.start_time or self._clock()
                self._drafting.open(state)

    async def _draft(self) -> None:
        """Ask the drafters about requests whose commits are known, one group of them at a time.

        Other steps are answered and submitted while drafters of other processes work.
        """
        if self._asking is not None:
            return
        decoding = ()
        if len(self._in_flight) < self._pipeline.max_in_flight:
            decoding = self._scheduler.decoding(self._forms.late(), self.streaming.may_follow)
        if decoding:
            if self._trace is not None:
                self._trace.asking()
            self._asking = self._drafting.start(decoding)
            # Drafters of this process alone have answered after one turn of the loop.
            await asyncio.sleep(0)
            self._asking.answer.add_done_callback(self._wakeup.notify)
        elif self._in_flight:
            self._wakeup.notify_in(self.streaming.pace.take_delay())

    @property
    def _has_room(self) -> bool:
        """Whether a step may go out now. A group that is being drafted for keeps its place."""
        is_late = self._asking is not None and not self._asking.answer.done()
        return len(self._in_flight) + is_late < self._pipeline.max_in_flight

    async def _merge(self) -> tuple[DraftBatch | None, TreeSteps]:
        """The proposals that are there, and every request's tree of them, cut to the nodes that
        are allowed and worth their time."""
        if self._asking is None or not self._asking.answer.done():
            return None, NO_TREE_STEPS
        asking, self._asking = self._asking, None
        draft_batch = asking.answer.result()
        in_rounds = [state for state in asking.states if self._is_ready(state)]
        drafted = self._choice.merge(in_rounds, draft_batch)
        most = self._scheduler.nodes_each(len(drafted))
        joined = await self._forms.join(drafted, self.deadline.patience_s, most)
        # Where no masks were wanted nothing was awaited.
        chosen = joined if joined is drafted else joined.where(self._is_ready)
        trees = self._choice.choose(chosen, draft_batch)
        streamed = [s for s in asking.states if s.stream is not None and not s.has_ended]
        return draft_batch, self._choice.with_slices(trees, streamed, draft_batch)

    def _is_ready(self, state: RequestState) -> bool:
        """Whether a tree can be verified for it; it may have ended, or lost its KV, while drafters
        were asked or masks awaited."""
        is_free = not (state.in_flight or state.has_ended) and state.stream is None
        return is_free and state.is_decoding

    def _build(self, trees: TreeSteps) -> BuiltStep | None:
        """The trees that have KV slots, prompt chunks beside them, and both as one step, if any."""
        fitting, num_decode_steps = self._fit.fit(trees)
        chunks = self._scheduler.prompt_chunks(int(fitting.num_rows.sum()))
        fitting, chunks, edits = edits_of_parts(fitting, chunks, self._contain)
        if not fitting.states and not chunks:
            return None
        step = build_step(
            self.num_steps, chunks, fitting, self._scheduler.block_size, edits, num_decode_steps
        )
        heads = self._drafting.stage_heads
        level_tokens = self._drafting.level_tokens
        step = with_head_tasks(step, heads, fitting.states, chunks, level_tokens)
        return BuiltStep(step, fitting, chunks)

    def _submit(self, built: BuiltStep, draft_batch: DraftBatch | None) -> None:
        step, trees, chunks = built
        if self.streaming.wants_spans(trees) or self._trace is not None:
            step = replace(step, is_traced=True)
        trace = self._trace
        traced = None if trace is None else trace.submitting(step, trees, chunks, draft_batch)
        sent_at = self._clock()
        answer = asyncio.ensure_future(self._pipeline.submit(step))
        answer.add_done_callback(self._wakeup.notify)
        in_flight = StepInFlight(
            step, trees, chunks, answer, draft_batch, sent_at, traced,
            self._scheduler.block_size,
        )  # fmt: skip
        self._in_flight.add(in_flight)
        self.streaming.note_sent(in_flight)
        self.num_steps += 1

    def _verify(self, in_flight: StepInFlight) -> StepResults | None:
        """What the step's answer means; None if the step failed."""
        try:
            output = in_flight.answer.result()
            if in_flight.traced is not None:
                in_flight.traced.answered(output)
            self.streaming.note_answer(in_flight, output.stage_spans)
            apart = self._set_apart(in_flight, output)
            results = in_flight.read(output)
            if apart:
                results = results.without(apart, in_flight)
        except StageLost:
            raise
        except Exception as error:  # noqa: BLE001 - it supervises: only this step's requests end
            self._in_flight.land()
            for state in in_flight.states:
                self._fail(state, as_request_failure(error, state.request_id))
            return None
        self._in_flight.land()
        return results

    def _set_apart(self, in_flight: StepInFlight, output: StepOutput) -> list[RequestState]:
        """Requests with rows whose logits are NaN or infinite, of which this step's answers do not
        count.

        Nodes of drafts, and KV of others, may be what is wrong: a request that has any computes its
        KV again without them. Any other ends.
        """
        found = in_flight.not_finite(output)
        for state, num_nodes in found:
            if state.has_ended:
                continue
            has_shared = state.keys is not None and bool(state.num_cached_tokens)
            self._scheduler.set_apart(state)
            if num_nodes or has_shared:
                # Otherwise it has given up its KV since, and computes it again anyway.
                if state.blocks:
                    self._scheduler.start_over(state)
                continue
            self.num_not_finite += 1
            logger.error("event=logits_not_finite request_id=%s", state.request_id)
            self._fail(state, NotFinite())
        return [state for state, _ in found]

    async def _wait(self) -> None:
        """Wait for the first event. Raises `StageLost` where the oldest step has no answer in time.

        Where nothing is under way, the caller looks again at once.
        """
        if self._in_flight:
            limit_s = self.deadline.limit_s
            left_s = self._in_flight.oldest.seconds_left(limit_s, self._answered_at, self._clock())
            if not await self._wakeup.wait(left_s) and self._in_flight.answered is None:
                raise StageLost(
                    f"no answer to a step for {limit_s:.0f} s (step_timeout_s): a stage hangs"
                )
        elif self._asking is not None or self._forms.late():
            await self._wakeup.wait(IDLE_WAIT_S)

    def _commit(self, in_flight: StepInFlight, results: StepResults) -> None:
        """Take a step's results into its requests."""
        outcome = self._outcome(in_flight, results)
        for state in in_flight.states:
            state.num_losses = 0
        trees = in_flight.trees
        self._drafting.note_features(results.features)
        self._drafting.note_drafted(results.drafted)
        self._committing.count(trees, results, outcome)
        walks = walks_along(results.paths, trees.trees.names, in_flight.row_slots)
        parts = zip(trees.states, walks, results.trees, strict=True)
        contain_each(self._committing.commit_tree, parts, self._fail_part)
        for chunk, first in zip(in_flight.chunks, results.chunks, strict=True):
            with self._contain(chunk.state):
                self._committing.commit_chunk(chunk, first)
        now = self._clock()
        self._policy.update(outcome, now)
        self._policy.note_host(self._clock() - now)
        if in_flight.traced is not None:
            in_flight.traced.committed()

    def _outcome(self, in_flight: StepInFlight, results: StepResults) -> StepOutcome:
        """What an answered step took: from its start, or from the answer before it."""
        before, self._answered_at = self._answered_at, self._clock()
        seconds = self._answered_at - max(in_flight.sent_at, before)
        self.deadline.record(seconds)
        chunks = in_flight.chunks
        num_prompt_rows = sum(chunk.num_rows for chunk in chunks)
        num_in_flight, num_passes = 1 + len(self._in_flight), results.num_passes
        self._scheduler.note_step(in_flight.num_rows, chunks, seconds / num_passes, num_in_flight)
        draft_batch = in_flight.draft_batch or nobody_asked(in_flight.sent_at)
        return StepOutcome(
            in_flight.num_rows, seconds, num_prompt_rows, draft_batch, num_passes, results.ahead_s,
            bool(in_flight.trees.slices), in_flight.trees.followers,
        )  # fmt: skip

    def _finish(self, state: RequestState, last: Delta) -> None:
        self._forget(state, last.finish_reason or "")
        self._outbox.post(
            state, last._replace(metrics=state.metrics(self._clock(), self._acceptance))
        )

    def _fail_part(self, part: tuple[RequestState, Walk, TreeOutput], error: Exception) -> None:
        self._fail(part[0], as_request_failure(error, part[0].request_id))

    def _contain(self, state: RequestState) -> Contained:
        return Contained(state.request_id, partial(self._fail, state))

    def _fail_running(self, error: Exception) -> None:
        """End those that run; or the first that waits, so that the engine always gets on."""
        running = list(self._scheduler.running.values()) or self._scheduler.waiting[:1]
        for state in running:
            self._fail(state, as_request_failure(error, state.request_id))

    def _blame_lost(self) -> None:
        """End requests whose steps were lost again and again: one of them may be the cause."""
        for state in self._in_flight.states():
            state.num_losses += 1
            if state.num_losses > MAX_LOSSES:
                self._fail(state, RequestSuspected.after(state.num_losses))

    def _fail(self, state: RequestState, error: DraftlineError) -> None:
        if not state.has_ended:
            self._forget(state, type(error).__name__)
            self._outbox.post(state, error)

    def _forget(self, state: RequestState, status: str) -> None:
        del self._states[state.request_id]
        state.has_ended = True
        self._scheduler.remove(state)
        state.nodes.close()
        self.ended.note(state, status, self._clock())
        self._forms.forget(state.request_id)
        permitted = state.request.allowed_tokens
        if permitted is not None and permitted.constraint is not None:
            permitted.constraint.close()
        self._drafting.close(state)
