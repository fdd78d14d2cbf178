"""The engine: what one step does, from its requests to their deltas.

`EngineCore.step` commits the tokens of finished steps, chooses the parts of the next step, and
submits it:

- update: the trees of a finished step are verified; tokens are committed, cut by stop rules and
  sent to the requests' sinks; drafters and policy learn from them;
- schedule: requests get KV blocks, drafters are asked, their proposals are merged, and the policy
  selects the draft tokens that go to the target (`drafting.py`); prompts give their next chunks;
- submit: all parts become flat arrays, which go to the pipeline.

With several stages, up to one step more than stages is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from .arrays import Int32
from .drafting import Drafting
from .errors import (
    Contained,
    DraftlineError,
    NotFinite,
    RequestError,
    RequestSuspected,
    StageLost,
    as_request_failure,
    contain_each,
    place_of,
)
from .fair_share import EndedRequests
from .interfaces import ProposalSource, StepPipeline
from .pipelined.drafting import PipelinedDrafting, TreeChunkCounts
from .request.output import TARGET_SOURCE, Chosen, Delta, StepTiming, TokenLogProb, VerifiedTree
from .request.request import DraftStats, Request, RequestState, RequestStats
from .request.sampling_params import PipeliningMode
from .request.stop import StopResult, StopRule
from .scheduler import Scheduler
from .speculation.draft_plan import StepOutcome, nobody_asked
from .speculation.policy import SpeculationPolicy
from .step.builder import build_step, edits_of_parts
from .step.in_flight import (
    NO_TREE_OUTPUT,
    Flights,
    StepDeadline,
    StepInFlight,
    StepResults,
    TreeOutput,
)
from .step.parts import PromptChunk, ScheduledStep, TreeSteps
from .step.trace import StepTrace
from .steps import StepOutput
from .verify.rules import COUPLED
from .verify.walk import Walk, walks_along

logger = logging.getLogger(__name__)

# Consecutive steps that a request may lose with a stage before it is ended as the suspected cause.
MAX_LOSSES = 1
# Longest wait while no step is in flight.
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
        pipelined_trees: PipeliningMode = "off",
    ) -> None:
        """`acceptance`: the rule that decides about drafts (`core/verify/rules.py`).

        `pipelined_trees`: whether a request's tree may go through the stages in several chunks
        (`core/pipelined/drafting.py`).
        A step that takes longer than `step_timeout_s`, and far longer than usual, counts
        as lost with its stage.
        """
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._policy = policy
        self._clock = clock
        self._acceptance = acceptance
        self._trace = trace
        self._wakeup = Wakeup()
        # Only the coupled rule verifies by target tokens alone; with one stage there is one group,
        # and no stage that would wait.
        is_pipelined = (
            pipelined_trees != "off" and acceptance == COUPLED and scheduler.num_groups > 1
        )
        make = partial(PipelinedDrafting, mode=pipelined_trees) if is_pipelined else Drafting
        self.drafting: Drafting = make(
            drafters, scheduler, policy, clock,
            acceptance=acceptance, fail=self._fail, notify=self._wakeup.notify,
        )  # fmt: skip
        self._draft_stats = DraftStats()
        self._output = OutputQueue(self._fail)
        self.deadline = StepDeadline(step_timeout_s)
        self._in_flight = Flights()
        self._states: dict[str, RequestState] = {}
        self._finished_at = 0.0
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

    @property
    def tree_chunk_counts(self) -> TreeChunkCounts:
        """What went through the stages in chunks of pipelined trees."""
        if isinstance(self.drafting, PipelinedDrafting):
            return self.drafting.counts
        return TreeChunkCounts()

    def add(self, request: Request, stop: StopRule) -> None:
        """Queue a request; from now on its sink gets its deltas, and the error if it fails.

        Raises `CapacityError`; `RequestError` where a request of that id runs.
        """
        if request.request_id in self._states:
            raise RequestError("request_id", "is that of a request that runs; take another")
        state = RequestState(request, stop, RequestStats(arrival_time=self._clock()))
        self._scheduler.add(state)
        state.stats.nodes = self._draft_stats.open()
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
            self._output.deliver()

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
        self._output.deliver()

    def abandon(self, error: DraftlineError) -> None:
        """Give every request `error`; for another thread, while the engine's hangs in a step."""
        for state in list(self._states.values()):
            self._output.tell(state, error)

    async def step(self) -> None:
        """Take the output of earlier steps, and submit the next one; without one, wait.

        Waits for the first event: the output of a step, proposals, token masks, a new request, a
        cancellation. What goes wrong with a request ends that request; other errors end all running
        requests. Raises `StageLost`: the pipeline must be replaced then (`use_pipeline`), or
        all requests ended (`fail_all`).
        """
        with self._supervised():
            self._wakeup.clear()
            while (in_flight := self._in_flight.finished) is not None:
                self._update(in_flight)
            scheduled = await self._schedule()
            if scheduled is not None:
                self._submit(scheduled)
                return
            self._output.deliver()
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
            self._output.deliver()

    # ---- schedule

    async def _schedule(self) -> ScheduledStep | None:
        """The parts of the next step; None if it is empty, or may not go out now."""
        for state in self._scheduler.admit():
            with self._contain(state):
                state.stats.start_time = state.stats.start_time or self._clock()
                self.drafting.open(state)
        await self._start_drafting()
        if not self._may_submit:
            return None
        if self._trace is not None:
            self._trace.building()
        draft_batch, trees = await self.drafting.merge_and_select(self.deadline.patience_s)
        trees, num_decode_steps = self.drafting.fit_to_kv(trees, draft_batch)
        prompt_chunks = self._scheduler.prompt_chunks(int(trees.num_rows.sum()))
        trees, prompt_chunks, edits = edits_of_parts(trees, prompt_chunks, self._contain)
        if not trees.states and not prompt_chunks:
            return None
        return ScheduledStep(trees, prompt_chunks, edits, num_decode_steps, draft_batch)

    async def _start_drafting(self) -> None:
        """Ask the drafters about requests whose commits are known, one group of them at a time.

        Other steps finish and are submitted while drafters of other processes work.
        """
        if self.drafting.is_asking:
            return
        is_free = len(self._in_flight) < self._pipeline.max_in_flight
        if is_free and (decoding := self.drafting.decoding()):
            if self._trace is not None:
                self._trace.asking()
            await self.drafting.start(decoding)
        elif self._in_flight:
            # When the next chunk of a pipelined tree may go out.
            self._wakeup.notify_in(self.drafting.take_delay())

    @property
    def _may_submit(self) -> bool:
        """Whether a step may go out now. One place in the pipeline is kept free for requests that
        are being drafted for."""
        is_late = self.drafting.is_asking and not self.drafting.has_reply
        return len(self._in_flight) + is_late < self._pipeline.max_in_flight

    # ---- submit

    def _submit(self, scheduled: ScheduledStep) -> None:
        """Build a step's arrays, and send it to the pipeline."""
        block_size = self._scheduler.block_size
        step = build_step(self.num_steps, scheduled, block_size)
        step = self.drafting.prepare(step, scheduled)
        traced = None
        if self._trace is not None:
            step = replace(step, is_traced=True)
            traced = self._trace.submitting(step, scheduled)
        sent_at = self._clock()
        output = asyncio.ensure_future(self._pipeline.submit(step))
        output.add_done_callback(self._wakeup.notify)
        in_flight = StepInFlight(
            step, scheduled.trees, scheduled.prompt_chunks, output, scheduled.draft_batch,
            sent_at, traced, block_size,
        )  # fmt: skip
        self._in_flight.add(in_flight)
        self.num_steps += 1

    async def _wait(self) -> None:
        """Wait for the first event. Raises `StageLost` where the oldest step takes too long.

        Where nothing is under way, the caller looks again at once.
        """
        if self._in_flight:
            limit_s = self.deadline.limit_s
            left_s = self._in_flight.oldest.seconds_left(limit_s, self._finished_at, self._clock())
            if not await self._wakeup.wait(left_s) and self._in_flight.finished is None:
                raise StageLost(
                    f"no answer to a step for {limit_s:.0f} s (step_timeout_s): a stage hangs"
                )
        elif self.drafting.is_waiting:
            await self._wakeup.wait(IDLE_WAIT_S)

    # ---- update

    def _update(self, in_flight: StepInFlight) -> None:
        """Commit what a step's output means for its requests."""
        results = self._verify(in_flight)
        if results is None:
            return
        outcome = self._measure(in_flight, results)
        for state in in_flight.states:
            state.num_losses = 0
        trees = in_flight.trees
        self._account(trees, results, outcome)
        walks = walks_along(results.paths, trees.trees.names, in_flight.row_slots)
        parts = zip(trees.states, walks, results.trees, strict=True)
        contain_each(self._commit_tree, parts, self._fail_part)
        for chunk, chosen in zip(in_flight.prompt_chunks, results.prompt_chunks, strict=True):
            with self._contain(chunk.state):
                self._commit_prompt_chunk(chunk, chosen)
        now = self._clock()
        self._policy.update(outcome, now)
        self._policy.note_host(self._clock() - now)
        if in_flight.traced is not None:
            in_flight.traced.committed()

    def _verify(self, in_flight: StepInFlight) -> StepResults | None:
        """Verify the trees of a finished step; None if the step failed."""
        try:
            output = in_flight.output.result()
            if in_flight.traced is not None:
                in_flight.traced.finished(output)
            excluded = self._handle_not_finite(in_flight, output)
            results = self.drafting.verify(in_flight, output, excluded)
        except StageLost:
            raise
        except Exception as error:  # noqa: BLE001 - it supervises: only this step's requests end
            self._in_flight.land()
            for state in in_flight.states:
                self._fail(state, as_request_failure(error, state.request_id))
            return None
        self._in_flight.land()
        return results

    def _handle_not_finite(self, in_flight: StepInFlight, output: StepOutput) -> list[RequestState]:
        """Requests with NaN or infinite logits, whose part of the output is dropped.

        Drafts or the KV of others may be the cause: a request that has any computes its KV again
        without them. Any other ends.
        """
        found = in_flight.not_finite(output)
        for state, num_nodes in found:
            if state.has_ended:
                continue
            has_shared = state.kv.prefix_keys is not None and bool(state.stats.num_cached_tokens)
            self._scheduler.set_apart(state)
            if num_nodes or has_shared:
                # One without blocks was preempted meanwhile, and computes its KV again anyway.
                if state.kv.blocks:
                    self._scheduler.preempt(state)
                continue
            self.num_not_finite += 1
            logger.error("event=logits_not_finite request_id=%s", state.request_id)
            self._fail(state, NotFinite())
        return [state for state, _ in found]

    def _measure(self, in_flight: StepInFlight, results: StepResults) -> StepOutcome:
        """What a finished step took: from its start, or from when the one before it finished.

        Deadline and scheduler learn it; `_account` adds to it what the drafts gained.
        """
        before, self._finished_at = self._finished_at, self._clock()
        seconds = self._finished_at - max(in_flight.sent_at, before)
        self.deadline.record(seconds)
        prompt_chunks = in_flight.prompt_chunks
        num_prompt_rows = sum(chunk.num_rows for chunk in prompt_chunks)
        # This one is not counted among those in flight any more.
        num_in_flight, num_passes = 1 + len(self._in_flight), results.num_passes
        self._scheduler.note_step(
            in_flight.num_rows, prompt_chunks, seconds / num_passes, num_in_flight
        )
        draft_batch = in_flight.draft_batch or nobody_asked(in_flight.sent_at)
        return StepOutcome(
            in_flight.num_rows, seconds, num_prompt_rows, draft_batch, num_passes,
            results.heads.seconds, bool(in_flight.trees.tree_chunks), in_flight.trees.followers,
        )  # fmt: skip

    def _account(self, trees: TreeSteps, results: StepResults, outcome: StepOutcome) -> None:
        """Count the paths through the trees, charge tenants, and keep what is to be explained."""
        states, paths = trees.states, results.paths
        rows = [state.stats.nodes.row for state in states]
        self._draft_stats.add(rows, trees.trees, paths.sources, paths.ends)
        if not self._scheduler.fair.is_alone:
            self._scheduler.fair.charge_trees(states, trees.num_rows * results.num_passes)
        ended_indices = [index for index, state in enumerate(states) if state.has_ended]
        for index, state in enumerate(states):
            if state.request.options.explain:
                timing = _timing(state.request_id, outcome, self._clock())
                state.to_explain = trees.trees[index], timing
        ids = [state.request_id for state in states]
        step_paths = results.step_paths.without(ended_indices)
        drafted_paths = paths.without(ended_indices)
        outcome.count(ids, trees.trees, results.drafted, drafted_paths, step_paths)

    def _commit_tree(self, part: tuple[RequestState, Walk, TreeOutput]) -> None:
        """Take the walk through a request's tree, and send its tokens to the sink."""
        state, walk, output = part
        if state.has_ended:
            return
        if not walk.tokens:
            # Not finite, or a chunk of a pipelined tree whose root has no target token yet.
            return
        self._scheduler.share(state, state.num_in_place)
        rows, tokens, sources, token_ids, moves = walk
        stopped = state.stop.advance(tokens)
        taken = stopped.num_tokens
        if sources[0] == TARGET_SOURCE:
            # No draft was accepted: each token had a pass of its own (several tokens a step).
            state.stats.accepted_lengths += [0] * max(taken, 1)
        else:
            # Drafts accepted after a stop do not count.
            untaken = (source for source in sources[taken:] if source != TARGET_SOURCE)
            state.stats.nodes.take_back(untaken)
            # Unless a stop cut it off, the last token is the bonus token.
            ends_with_bonus = taken > 0 and sources[taken - 1] == TARGET_SOURCE
            state.stats.accepted_lengths.append(taken - ends_with_bonus)
        if taken < len(tokens):
            tokens, sources, token_ids = tokens[:taken], sources[:taken], token_ids[:taken]
        verified = self._explained(state, rows[1 : taken + 1])
        self._append(state, tokens, token_ids, output)
        if stopped.finish_reason is None:
            state.move_kv(moves)
            state.advance_grammar(tokens)
        num_top = state.request.params.logprobs
        log_probs = () if num_top is None else output.chosen.logprobs_of(rows[:taken], num_top)
        self._emit(state, stopped, tokens, sources, log_probs, trees=verified)

    def _commit_prompt_chunk(self, chunk: PromptChunk, chosen: Chosen | None) -> None:
        """Take the token that the last prompt chunk predicts; None: the request was set apart."""
        if chosen is None:
            return
        state = chunk.state
        self._scheduler.share(state, chunk.end)
        self._scheduler.note_saved(chunk)
        if state.has_ended or not chunk.wants_token:
            return
        state.stats.first_token_time = self._clock()
        tokens = chosen.tokens.tolist()
        if not state.stop.num_tokens_left:
            # Only the prompt was to be computed.
            self._emit(state, StopResult(0, "", "length"), [], [], ())
            return
        stopped = state.stop.advance(tokens)
        self._append(state, tokens, chosen.tokens, NO_TREE_OUTPUT)
        if stopped.finish_reason is None:
            state.advance_grammar(tokens)
        log_probs = chosen.logprobs_of([0], state.request.params.logprobs)
        self._emit(state, stopped, tokens, [TARGET_SOURCE], log_probs)

    def _append(
        self, state: RequestState, tokens: Sequence[int], token_ids: Int32, output: TreeOutput
    ) -> None:
        base_len = len(state.token_ids)
        state.append(tokens)
        self.drafting.note_commit(state, base_len, token_ids, output)

    def _emit(
        self,
        state: RequestState,
        stopped: StopResult,
        tokens: Sequence[int],
        sources: Sequence[str],
        log_probs: tuple[TokenLogProb, ...],
        *,
        trees: tuple[VerifiedTree, ...] = (),
    ) -> None:
        """Send committed tokens to the request's sink."""
        prompt_log_probs = None
        if state.prompt_log_probs is not None and state.num_answered == len(tokens):
            prompt_log_probs = tuple(state.prompt_log_probs)
        _, text, finish_reason, stop_reason = stopped
        delta = Delta(
            state.request_id,
            tuple(tokens),
            tuple(sources),
            text,
            finish_reason,
            None,
            log_probs,
            prompt_log_probs,
            stop_reason,
            trees,
        )
        if finish_reason is None:
            self._output.post(state, delta)
        else:
            self._finish(state, delta)

    def _explained(self, state: RequestState, rows: Sequence[int]) -> tuple[VerifiedTree, ...]:
        """The tree that tokens of these rows come from, where the request wants to know it."""
        if state.to_explain is None:
            return ()
        (tree, timing), state.to_explain = state.to_explain, None
        # Without nodes, a stage may have decoded several tokens after the root.
        path = [row - 1 for row in rows] if len(tree) else []
        timing = timing._replace(committed_at=self._clock())
        return (VerifiedTree.of(tree, state.token_ids[-1], path, timing),)

    # ---- requests that end

    def _finish(self, state: RequestState, last: Delta) -> None:
        self._forget(state, last.finish_reason or "")
        self._output.post(
            state, last._replace(metrics=state.metrics(self._clock(), self._acceptance))
        )

    def _fail_part(self, part: tuple[RequestState, Walk, TreeOutput], error: Exception) -> None:
        self._fail(part[0], as_request_failure(error, part[0].request_id))

    def _contain(self, state: RequestState) -> Contained:
        return Contained(state.request_id, partial(self._fail, state))

    def _fail_running(self, error: Exception) -> None:
        """End those that run, or else the first that waits, so that no error repeats for ever."""
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
            self._output.post(state, error)

    def _forget(self, state: RequestState, status: str) -> None:
        del self._states[state.request_id]
        state.has_ended = True
        self._scheduler.remove(state)
        state.stats.nodes.close()
        self.ended.note(state, status, self._clock())
        permitted = state.request.allowed_tokens
        if permitted is not None and permitted.constraint is not None:
            permitted.constraint.close()
        self.drafting.close(state)


def _timing(request_id: str, outcome: StepOutcome, now: float) -> StepTiming:
    """What a step that has just finished took of a request."""
    batch = outcome.draft_batch
    asked = tuple(name for name, ids in batch.plan.by_drafter.items() if request_id in ids)
    return StepTiming(asked, batch.began_at, batch.seconds, now, outcome.seconds, now)


class Wakeup:
    """Remembers that something happened until the loop has looked. One event loop uses it."""

    __slots__ = ("_has_event", "_timer", "_waiter")

    def __init__(self) -> None:
        self._has_event = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def notify(self, _event: object = None) -> None:
        """Something happened. Takes any argument, to serve as the callback of a future."""
        self._has_event = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def notify_in(self, seconds: float | None) -> None:
        """Call `notify` after so many seconds, in place of any earlier timer; None cancels it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.notify)

    def clear(self) -> None:
        """Forget what happened so far: the caller looks at everything now."""
        self._has_event = False

    async def wait(self, timeout_s: float | None) -> bool:
        """Whether something happened since the last `clear`, or does within `timeout_s`; None: for
        ever."""
        if not self._has_event:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait((self._waiter,), timeout=timeout_s)
            finally:
                self._waiter = None
        return self._has_event


class OutputQueue:
    """Events for the sinks of requests, in order. One event loop uses it.

    A sink wakes other threads, which take the interpreter while they format and send. Between a
    step and the next one the stages would wait for that; beside the next step they do not.
    """

    __slots__ = ("_events", "_fail")

    def __init__(self, fail: Callable[[RequestState, DraftlineError], None]) -> None:
        """`fail` ends a request whose sink failed, if it has not ended."""
        self._events: deque[tuple[RequestState, Delta | DraftlineError]] = deque()
        self._fail = fail

    def post(self, state: RequestState, event: Delta | DraftlineError) -> None:
        """Keep an event for a request's sink."""
        self._events.append((state, event))

    def deliver(self) -> None:
        """Send all events that are kept, also those that are posted meanwhile."""
        while self._events:
            self.tell(*self._events.popleft())

    def tell(self, state: RequestState, event: Delta | DraftlineError) -> None:
        """Send one event at once; also for other threads, where it is the last one."""
        try:
            state.request.sink(event)
        except Exception as error:  # noqa: BLE001 - it supervises: the other requests go on
            self._sink_failed(state, event, error)

    def _sink_failed(
        self, state: RequestState, event: Delta | DraftlineError, error: Exception
    ) -> None:
        if isinstance(event, Delta) and event.finish_reason is None:
            self._fail(state, as_request_failure(error, state.request_id))
            return
        # It was the last event: only the log shows this.
        logger.error("event=sink_failed request_id=%s error=%s", state.request_id, place_of(error))
