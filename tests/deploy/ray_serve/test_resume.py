"""What becomes of a request whose replica is lost, over replicas that only look like some."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from draftline import SamplingParams
from draftline.core.errors import (
    CapacityError,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    RequestError,
    RequestSuspected,
    StageLost,
)
from draftline.core.request.output import TARGET_SOURCE, Delta, RequestMetrics, TokenLogProb
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.ray_serve.resume import (
    NoReplica,
    OtherModel,
    ReplicaDied,
    ResumeLimits,
    ServerEnds,
    resumed,
)

NUM_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, seed=7, logprobs=0, prompt_logprobs=0)
LIMITS = ResumeLimits(max_tries=2, timeout_s=5.0)


def token_at(seed: int | None, position: int) -> int:
    return (31 * (seed or 0) + position * position) % 97


@dataclass
class Counts:
    """Causes, by what became of the requests."""

    resumed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def record_resumed(self, cause: str) -> None:
        self.resumed[cause] += 1

    def record_lost(self, cause: str) -> None:
        self.lost[cause] += 1


@dataclass
class Replicas:
    """Each try tells two tokens at a time, until it has told as many as `ends` says; then it fails.

    After those of `ends`, tries go on to the answer's end.
    """

    ends: list[tuple[int, Exception]]
    asked: list[tuple[SamplingParams, RequestOptions]] = field(default_factory=list)
    num_open: int = 0

    async def begin(
        self, params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[Sequence[Delta], None]:
        self.asked.append((params, options))
        count, error = self.ends.pop(0) if self.ends else (NUM_TOKENS, None)
        self.num_open += 1
        try:
            first = len(options.answered)
            last = min(first + count, NUM_TOKENS)
            for start in range(first, last, 2):
                await asyncio.sleep(0)
                yield [self._delta(params, first, start, min(start + 2, last))]
            if error is not None:
                raise error
        finally:
            self.num_open -= 1

    def _delta(self, params: SamplingParams, first: int, start: int, stop: int) -> Delta:
        tokens = tuple(token_at(params.seed, position) for position in range(start, stop))
        sources = ("drafts", TARGET_SOURCE)[2 - len(tokens) :] if start else (TARGET_SOURCE,) * 2
        is_last = stop == NUM_TOKENS
        metrics = RequestMetrics(
            prompt_tokens=3, generated_tokens=stop, num_steps=1, num_draft_tokens=4,
            drafted_by_source={"drafts": 4}, accepted_by_source={"drafts": 1},
            accepted_lengths=(1,), arrival_time=1000.0, start_time=1000.1,
            first_token_time=1000.2, finish_time=1000.5,
        )  # fmt: skip
        wants_prompt = params.prompt_logprobs is not None and start == first
        return Delta(
            "a", tokens, sources, "", "length" if is_last else None, metrics if is_last else None,
            tuple(TokenLogProb(token, -1.0) for token in tokens),
            (None,) if wants_prompt else None,
        )  # fmt: skip


async def told(
    replicas: Replicas, counts: Counts, limits: ResumeLimits = LIMITS
) -> tuple[list[int], list[Delta]]:
    deltas = []
    async for batch in resumed(replicas.begin, PARAMS, RequestOptions(), limits, counts):
        deltas += batch
    return [token for delta in deltas for token in delta.token_ids], deltas


EXPECTED = [token_at(7, position) for position in range(NUM_TOKENS)]


@pytest.mark.parametrize("count", range(NUM_TOKENS))
async def test_lost_after_any_number_of_tokens_the_answer_is_the_same(count: int) -> None:
    replicas, counts = Replicas([(count, ReplicaDied("dead"))]), Counts()
    tokens, deltas = await told(replicas, counts)
    assert tokens == EXPECTED
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert sum(len(delta.log_probs) for delta in deltas) == NUM_TOKENS
    assert [delta.prompt_log_probs for delta in deltas] == [(None,)] + [None] * (len(deltas) - 1)
    params, options = replicas.asked[1]
    assert options.answered == tuple(EXPECTED[:count])
    assert params.seed == PARAMS.seed
    assert (params.prompt_logprobs is None) == (count > 0)
    assert counts == Counts(resumed=Counter(replica_died=1))


async def test_metrics_of_the_end_are_of_the_whole_request() -> None:
    replicas = Replicas([(4, ReplicaDied("dead"))])
    before = asyncio.get_running_loop().time()
    _, deltas = await told(replicas, Counts())
    took = asyncio.get_running_loop().time() - before
    metrics = deltas[-1].metrics
    assert metrics is not None
    # Two deltas were told by the lost one; the first came with the prompt.
    assert metrics.accepted_lengths == (1, 1)
    assert metrics.num_steps == 2
    assert dict(metrics.accepted_by_source) == {"drafts": 2}
    assert dict(metrics.drafted_by_source) == {"drafts": 5}
    assert metrics.num_draft_tokens == 5
    assert metrics.finish_time == 1000.5
    assert 1000.5 - took <= metrics.arrival_time == metrics.start_time
    assert metrics.start_time <= metrics.first_token_time < 1000.5


async def test_without_a_loss_metrics_are_the_replicas_own() -> None:
    _, deltas = await told(Replicas([]), Counts())
    assert deltas[-1].metrics is not None
    assert deltas[-1].metrics.arrival_time == 1000.0


async def test_a_request_that_was_lost_in_the_queue_begins_anew() -> None:
    replicas, counts = Replicas([(0, ReplicaDied("dead")), (0, NoReplica("none"))]), Counts()
    tokens, deltas = await told(replicas, counts)
    assert tokens == EXPECTED
    assert deltas[-1].metrics is not None
    assert deltas[-1].metrics.first_token_time == 1000.2
    assert counts == Counts(resumed=Counter(replica_died=1))


async def test_refusals_are_waited_for_and_are_no_tries() -> None:
    refusals: list[tuple[int, Exception]] = [
        (0, error)
        for error in (
            CapacityError("full"), StageLost("recovers"), OtherModel("changes"),
        )
    ]  # fmt: skip
    replicas, counts = Replicas([(5, EngineFailed("hangs")), *refusals]), Counts()
    tokens, _ = await told(replicas, counts)
    assert tokens == EXPECTED
    assert counts == Counts(resumed=Counter(engine_failed=1))


async def test_a_stream_that_ends_unanswered_is_lost() -> None:
    replicas, counts = Replicas([]), Counts()

    async def begin(
        params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[Sequence[Delta], None]:
        async with aclosing(replicas.begin(params, options)) as batches:
            async for batch in batches:
                yield batch
                if not options.answered:
                    return

    batches = resumed(begin, PARAMS, RequestOptions(), LIMITS, counts)
    deltas = [delta async for batch in batches for delta in batch]
    assert [token for delta in deltas for token in delta.token_ids] == EXPECTED
    assert counts == Counts(resumed=Counter(replica_died=1))


async def test_a_request_may_outlive_several_replicas() -> None:
    replicas, counts = Replicas([(3, ReplicaDied("one")), (4, EngineClosed("two"))]), Counts()
    assert (await told(replicas, counts))[0] == EXPECTED
    assert counts == Counts(resumed=Counter(replica_died=1, replica_stopped=1))


async def test_one_that_kills_every_replica_ends() -> None:
    replicas = Replicas([(2, ReplicaDied(str(number))) for number in range(9)])
    counts = Counts()
    with pytest.raises(ReplicaDied, match="2"):
        await told(replicas, counts)
    assert len(replicas.asked) == 1 + LIMITS.max_tries
    assert counts == Counts(
        resumed=Counter(replica_died=LIMITS.max_tries), lost=Counter(replica_died=1)
    )


async def test_without_a_replica_in_time_it_ends_with_its_loss() -> None:
    limits = ResumeLimits(max_tries=3, timeout_s=0.2)
    refusals: list[tuple[int, Exception]] = [(0, NoReplica("none"))] * 99
    counts = Counts()
    with pytest.raises(ReplicaDied, match="the loss"):
        await told(Replicas([(2, ReplicaDied("the loss")), *refusals]), counts, limits)
    assert counts == Counts(lost=Counter(replica_died=1))


async def test_where_there_will_be_no_replica_it_ends_with_its_loss() -> None:
    replicas, counts = Replicas([(2, ReplicaDied("the loss")), (0, ServerEnds("none"))]), Counts()
    with pytest.raises(ReplicaDied, match="the loss"):
        await told(replicas, counts)
    assert len(replicas.asked) == 2
    assert counts == Counts(lost=Counter(replica_died=1))


async def test_a_try_that_hangs_is_given_up_in_time() -> None:
    replicas = Replicas([])

    async def begin(
        params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[Sequence[Delta], None]:
        if options.answered:
            await asyncio.sleep(60)
        yield [replicas._delta(params, 0, 0, 2)]
        raise ReplicaDied("the loss")

    limits = ResumeLimits(max_tries=3, timeout_s=0.1)
    with pytest.raises(ReplicaDied, match="the loss"):
        async for _ in resumed(begin, PARAMS, RequestOptions(), limits, Counts()):
            pass


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (CapacityError("full"), Counter()),
        (NoReplica("none"), Counter()),
        (RequestError("prompt", "bad"), Counter()),
        (RequestSuspected("kills stages"), Counter(stage_lost=1)),
        (ServerEnds("ends"), Counter()),
    ],
)
async def test_some_errors_end_a_request_at_once(error: DraftlineError, lost: Counter[str]) -> None:
    replicas, counts = Replicas([(0, error)]), Counts()
    with pytest.raises(type(error)):
        await told(replicas, counts)
    assert len(replicas.asked) == 1
    assert counts == Counts(lost=lost)


async def test_without_further_tries_the_error_is_told_and_counted() -> None:
    limits = ResumeLimits(max_tries=0, timeout_s=5.0)
    replicas, counts = Replicas([(2, ReplicaDied("dead"))]), Counts()
    with pytest.raises(ReplicaDied, match="dead"):
        await told(replicas, counts, limits)
    assert counts == Counts(lost=Counter(replica_died=1))


async def test_whoever_leaves_ends_the_try() -> None:
    replicas = Replicas([])
    stream = resumed(replicas.begin, PARAMS, RequestOptions(), LIMITS, Counts())
    async with aclosing(stream):
        await anext(stream)
        assert replicas.num_open == 1
    assert replicas.num_open == 0
