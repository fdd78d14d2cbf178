"""Logits that are NaN or infinite end their own request, with the text that plain decoding has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.errors import NotFinite
from draftline.core.kv_cache import PrefixKeys
from draftline.core.request.output import Delta
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.steps import LogProbOutput, StepInput, StepOutput
from support.fakes.fake_bench import Bench, NoText
from support.fakes.fake_target import FakeTarget, plain_answer

VOCAB, BAD, LENGTH = 7, 1000, 30
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
GOOD = {"a": [1, 2, 3], "bb": [4, 5, 6, 1, 2], "ccc": PROMPT}
# Whether a row of the request that is seeded with `BAD`, which sees these tokens, is not finite.
Rule = Callable[[list[int]], bool]


class BadTarget(FakeTarget):
    """Some rows of one request have no logits."""

    rule: Rule

    def __init__(self, *args: Any, rule: Rule, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule = rule
        self.bad: list[int] = []
        self.num_steps_with_bad = 0

    def choose(self, step: StepInput, texts: list[list[int]]) -> Int32:
        rows = zip(texts, step.sampling.seed.tolist(), strict=True)
        self.bad = [
            place for place, (text, seed) in enumerate(rows) if seed == BAD and self.rule(text)
        ]
        tokens = super().choose(step, texts)
        # Whatever it is: often it happens to be a child's.
        tokens[self.bad] = 0
        return tokens

    def _decode(self, step: StepInput, texts: list[list[int]], targets: Int32) -> Int32:
        first, count = self.bad, 1
        wanted = step.multi_step
        assert wanted is not None
        found = targets[:, None]
        while not self.bad and count < wanted.num_tokens:
            count += 1
            shorter = replace(step, multi_step=replace(wanted, num_tokens=count))
            one = super()._decode(shorter, [list(text) for text in texts], targets)
            found = found if self.bad else one
        self.bad = first
        return found

    def _run(self, step: StepInput) -> StepOutput:
        self.bad = []
        output = super()._run(step)
        if not self.bad:
            return output
        self.num_steps_with_bad += 1
        return replace(output, not_finite=np.array(self.bad, dtype=np.int32))


def bench_of(rule: Rule, **options: Any) -> tuple[Bench, BadTarget]:
    bench = Bench(vocab=VOCAB, **options)
    turns = (lambda: 2) if options.get("pipelined_trees") == "on" else None
    target = BadTarget(VOCAB, bench.block_size, bench.num_groups, rule=rule, turns=turns)
    bench.use_target(target)
    return bench, target


def assert_good(bench: Bench) -> None:
    for name, prompt in GOOD.items():
        assert bench.tokens(name) == plain_answer(prompt, LENGTH, len(name), VOCAB)
    bench.check_empty()


WAYS: dict[str, dict[str, Any]] = {
    "drafted": {},
    "plain": {"nodes": 0},
    "two groups": {"num_groups": 2},
    "streamed": {"pipelined_trees": "on", "num_groups": 3},
    "several tokens": {"nodes": 0, "multi_step_s": 10.0},
    "with features": {"features": True, "is_adaptive": False},
    "with heads": {"heads": True},
    "with probes": {"probes": True, "top_next_tokens": True},
}


@pytest.mark.parametrize("num_right", [0, 1, 11])
@pytest.mark.parametrize("way", WAYS)
async def test_the_request_ends_and_the_others_go_on(way: str, num_right: int) -> None:
    """Its text ends where plain decoding's would, whatever was drafted."""
    bench, target = bench_of(lambda text: len(text) >= len(PROMPT) + num_right, **WAYS[way])
    bench.add("bad", PROMPT, LENGTH, seed=BAD)
    for name, prompt in GOOD.items():
        bench.add(name, prompt, LENGTH)
    await bench.run()
    assert isinstance(bench.heard["bad"][-1], NotFinite)
    assert bench.tokens("bad") == plain_answer(PROMPT, num_right, BAD, VOCAB)
    assert (bench.core.num_not_finite, target.num_steps_with_bad > 0) == (1, True)
    assert_good(bench)
    # Nothing behind the text reaches drafters, which may learn of it.
    assert bench.drafters.ended.get("bad", PROMPT) == PROMPT + plain_answer(
        PROMPT, num_right, BAD, VOCAB
    )


@pytest.mark.parametrize("way", ["drafted", "two groups", "streamed", "with features"])
async def test_nodes_that_are_not_finite_end_nothing(way: str) -> None:
    """What is wrong with a draft token is no matter of the text."""
    text = PROMPT + plain_answer(PROMPT, LENGTH, BAD, VOCAB)
    bench, target = bench_of(lambda seen: seen != text[: len(seen)], **WAYS[way])
    bench.add("bad", PROMPT, LENGTH, seed=BAD)
    for name, prompt in GOOD.items():
        bench.add(name, prompt, LENGTH)
    await bench.run()
    assert target.num_steps_with_bad
    assert bench.tokens("bad") == text[len(PROMPT) :]
    assert isinstance(bench.heard["bad"][-1], Delta)
    assert bench.core.num_not_finite == 0
    assert_good(bench)


class SharedIsBad(BadTarget):
    """The request's rows are not finite while it reads KV that another has computed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, rule=lambda _text: self.is_shared, **options)
        self.is_shared = False
        self._writers: dict[int, int] = {}

    def _run(self, step: StepInput) -> StepOutput:
        for source, target in step.moves.tolist():
            self._writers[target] = self._writers[source]
        self.is_shared = False
        for place, key in enumerate(step.request_keys):
            first, end = step.request_starts[place : place + 2].tolist()
            self._writers |= dict.fromkeys(step.slots[first:end].tolist(), key)
            blocks = step.block_tables[place][: int(step.context_lens[place]) // self._block_size]
            writers = {self._writers[int(block) * self._block_size] for block in blocks}
            chosen = (step.logits_rows >= first) & (step.logits_rows < end)
            is_seeded = BAD in step.sampling.seed[np.flatnonzero(chosen)].tolist()
            self.is_shared |= is_seeded and bool(writers - {key})
        return super()._run(step)


async def test_kv_that_others_computed_is_computed_again_and_shared_no_more() -> None:
    prompt = PROMPT * 4
    bench = Bench(vocab=VOCAB, share_prefixes=True)
    bench.use_target(SharedIsBad(VOCAB, bench.block_size, bench.num_groups))
    bench.add("first", prompt, 4)
    await bench.run()
    keys = PrefixKeys(RequestOptions().salt, bench.block_size).upto(prompt, len(prompt))
    assert bench.pool.num_shared(keys)[0] > 1
    bench.add("bad", prompt, LENGTH, seed=BAD)
    await bench.run()
    assert bench.tokens("bad") == plain_answer(prompt, LENGTH, BAD, VOCAB)
    assert bench.pool.num_shared(keys)[0] == 0
    assert bench.core.num_not_finite == 0
    bench.add("last", prompt, 4)
    await bench.run()
    last = bench.heard["last"][-1]
    assert isinstance(last, Delta)
    assert last.metrics is not None
    assert last.metrics.cached_tokens == 0
    bench.check_empty()


async def test_scores_that_are_not_finite_end_their_request() -> None:
    """Of a prompt whose log-probabilities are wanted."""
    bench, _ = bench_of(lambda _text: False)

    class BadScores(BadTarget):
        def _run(self, step: StepInput) -> StepOutput:
            scores = np.zeros(len(step.log_probs.scored_rows), dtype=np.float32)
            scores[: len(scores) // 2] = np.nan
            return replace(super()._run(step), log_probs=LogProbOutput(scores=scores))

    bench.use_target(BadScores(VOCAB, bench.block_size, rule=lambda _text: False))
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, prompt_logprobs=0)
    sink = bench.heard.setdefault("scored", []).append
    prompt = np.array(PROMPT, dtype=np.int32)
    request = Request("scored", prompt, params, 3, LENGTH, sink)
    bench.core.add(request, StopRule(params, (), LENGTH, NoText()))
    bench.add("a", GOOD["a"], LENGTH)
    await bench.run()
    assert isinstance(bench.heard["scored"][-1], NotFinite)
    assert bench.tokens("a") == plain_answer(GOOD["a"], LENGTH, 1, VOCAB)
    bench.check_empty()
