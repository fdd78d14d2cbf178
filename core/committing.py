"""The committing half of a step: what its results mean for its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .arrays import Int32
from .drafting.asking import Drafting
from .proposals import StepCommit
from .request.chosen import Chosen
from .request.draft_tally import DraftTally
from .request.outbox import Outbox
from .request.output import TARGET_SOURCE, Delta, StepTiming, TokenLogProb, VerifiedTree
from .request.request import RequestState
from .request.stop import Advance
from .schedule.scheduler import Scheduler
from .speculation.draft_plan import StepOutcome
from .speculation.policy import SpeculationPolicy
from .step.in_flight import StepResults
from .step.outputs import NO_TREE_OUTPUT, TreeOutput
from .step.prompt_chunk import PromptChunk
from .step.tree_steps import TreeSteps
from .verify.walk import Walk


class Committing:
    """Takes results into requests, and tells their sinks, the drafters and the policy.

    tally   of the nodes of all requests
    finish  ends a request with its last delta
    """

    __slots__ = ("_clock", "_drafting", "_finish", "_outbox", "_policy", "_scheduler", "_tally")

    def __init__(
        self,
        scheduler: Scheduler,
        drafting: Drafting,
        policy: SpeculationPolicy,
        outbox: Outbox,
        clock: Callable[[], float],
        *,
        tally: DraftTally,
        finish: Callable[[RequestState, Delta], None],
    ) -> None:
        self._scheduler = scheduler
        self._drafting = drafting
        self._policy = policy
        self._outbox = outbox
        self._tally = tally
        self._clock = clock
        self._finish = finish

    def count(self, trees: TreeSteps, results: StepResults, outcome: StepOutcome) -> None:
        """Count the paths through the trees of requests that have not ended meanwhile."""
        states, paths = trees.states, results.paths
        rows = [state.nodes.row for state in states]
        self._tally.add(rows, trees.trees, paths.sources, paths.ends)
        if not self._scheduler.fair.is_alone:
            self._scheduler.fair.charge_trees(states, trees.num_rows * results.num_passes)
        ended = [place for place, state in enumerate(states) if state.has_ended]
        for place, state in enumerate(states):
            if state.request.options.explain:
                timing = _timing(state.request_id, outcome, self._clock())
                state.verified = trees.trees[place], timing
        ids = [state.request_id for state in states]
        verified = results.verified.without(ended)
        outcome.count(ids, trees.trees, results.judged, paths.without(ended), verified)

    def commit_tree(self, part: tuple[RequestState, Walk, TreeOutput]) -> None:
        """Take the walk through a request's tree, and tell of the tokens that it took."""
        state, walk, answer = part
        if state.has_ended:
            return
        stream = state.stream
        if stream is not None:
            answer = answer.behind(stream.unheard)
            # What follows the root may be on its way still.
            stream.unheard = answer.top_next_tokens if not walk.tokens else {}
        if not walk.tokens:
            return
        num_final = len(state.token_ids) - 1 if stream is None else stream.num_in_place
        self._scheduler.share(state, num_final)
        rows, tokens, sources, token_ids, moves = walk
        advance = state.stop.advance(tokens)
        taken = advance.num_tokens
        if sources[0] == TARGET_SOURCE:
            # Without drafts each token had a pass of its own.
            state.accepted_lengths += [0] * max(taken, 1)
        else:
            state.nodes.take_back(source for source in sources[taken:] if source != TARGET_SOURCE)
            # Mostly the last one is the target's own token, and no node.
            num_targets = taken > 0 and sources[taken - 1] == TARGET_SOURCE
            state.accepted_lengths.append(taken - num_targets)
        if taken < len(tokens):
            tokens, sources, token_ids = tokens[:taken], sources[:taken], token_ids[:taken]
        verified = self._explained(state, rows[1 : taken + 1])
        self._append(state, tokens, token_ids, answer)
        # A request that was preempted meanwhile has no KV to move.
        # A streamed one's were noted when its root went on.
        if advance.finish_reason is None and state.blocks and stream is None:
            state.moves = moves
        num_top = state.request.params.logprobs
        log_probs = () if num_top is None else answer.chosen.logprobs_of(rows[:taken], num_top)
        self._emit(state, advance, tokens, sources, log_probs, trees=verified)

    def commit_chunk(self, chunk: PromptChunk, chosen: Chosen | None) -> None:
        """Take the token that the last prompt chunk predicts; None: nothing of the chunk."""
        if chosen is None:
            return
        state = chunk.state
        self._scheduler.share(state, chunk.end)
        if state.has_ended or not chunk.wants_token:
            return
        state.first_token_time = self._clock()
        tokens = chosen.tokens.tolist()
        if not state.stop.num_tokens_left:
            # Only the prompt was to be computed.
            self._emit(state, Advance(0, "", "length"), [], [], ())
            return
        advance = state.stop.advance(tokens)
        self._append(state, tokens, chosen.tokens, NO_TREE_OUTPUT)
        log_probs = chosen.logprobs_of([0], state.request.params.logprobs)
        self._emit(state, advance, tokens, [TARGET_SOURCE], log_probs)

    def _append(
        self, state: RequestState, tokens: Sequence[int], token_ids: Int32, answer: TreeOutput
    ) -> None:
        base_len = len(state.token_ids)
        state.append(tokens)
        if state.is_open:
            commit = StepCommit(
                state.request_id, base_len, token_ids, answer.probe_ids, answer.top_next_tokens
            )
            self._drafting.note_commit(commit)

    def _emit(
        self,
        state: RequestState,
        advance: Advance,
        tokens: Sequence[int],
        sources: Sequence[str],
        log_probs: tuple[TokenLogProb, ...],
        *,
        trees: tuple[VerifiedTree, ...] = (),
    ) -> None:
        """Tell of committed tokens."""
        prompt_log_probs = None
        if state.prompt_log_probs is not None and state.num_answered == len(tokens):
            prompt_log_probs = tuple(state.prompt_log_probs)
        _, text, finish_reason, stop_reason = advance
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
            request = state.request
            if request.allowed_tokens is not None:
                request.allowed_tokens.advance(tokens)
            self._outbox.post(state, delta)
        else:
            self._finish(state, delta)

    def _explained(self, state: RequestState, rows: Sequence[int]) -> tuple[VerifiedTree, ...]:
        """The tree that tokens of these rows come from, where the request wants to know it."""
        if state.verified is None:
            return ()
        (tree, timing), state.verified = state.verified, None
        # Without nodes, a stage may have decoded several tokens behind the root.
        path = [row - 1 for row in rows] if len(tree) else []
        timing = timing._replace(committed_at=self._clock())
        return (VerifiedTree.of(tree, state.token_ids[-1], path, timing),)


def _timing(request_id: str, outcome: StepOutcome, now: float) -> StepTiming:
    """What a step that has just been answered took of a request."""
    batch = outcome.draft_batch
    asked = tuple(name for name, ids in batch.plan.by_drafter.items() if request_id in ids)
    return StepTiming(asked, batch.began_at, batch.seconds, now, outcome.seconds, now)
