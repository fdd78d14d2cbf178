"""A share of requests is repeated without drafts, and what differs is counted by its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.core.errors import CapacityError, ConfigError
from draftline.core.request.output import Delta, TokenLogProb
from draftline.core.request.request import Request, Sink
from draftline.core.request.sampling_params import MAX_PRIORITY, RequestOptions
from draftline.core.sampling import gumbel
from draftline.core.steps import StepInput, StepOutput
from draftline.deploy.engine.shadow import Shadow

PROMPT = (5, 6, 7)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, seed=4)


def top(*pairs: tuple[int, float]) -> TokenLogProb:
    """A token and its rivals, best first."""
    (token, log_prob), ids, values = pairs[0], *zip(*pairs, strict=True)
    return TokenLogProb(token, log_prob, tuple(ids), tuple(values))


class Bench:
    """A shadow over an engine whose plain answers are given."""

    def __init__(self, plain: Sequence[TokenLogProb], **options: Any) -> None:
        self.plain, self.has_room = plain, True
        self.added: list[tuple[Any, ...]] = []
        self.heard: list[object] = []
        self.shadow = Shadow(1.0, self._add, lambda: self.has_room, **options)

    def _add(
        self, name: str, prompt: Sequence[int], params: SamplingParams, sink: Sink,
        options: RequestOptions,
    ) -> None:  # fmt: skip
        self.added.append((name, prompt, params, options))
        for place, one in enumerate(self.plain, 1):
            reason = "length" if place == len(self.plain) else None
            sink(Delta(name, (one.token_id,), ("target",), "", reason, log_probs=(one,)))

    def served(
        self,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        reason: Any = "stop",
        options: RequestOptions | None = None,
    ) -> dict[str, int]:
        """The counts that are not 0 after an answer of these tokens."""
        watched = self.shadow.watch(params, options or RequestOptions(), self.heard.append)
        if watched is not None:
            watched.request = Request(
                "one", np.array(PROMPT, dtype=np.int32), params, 4, 9, watched.on_output
            )
            for token in tokens[:-1]:
                watched.on_output(Delta("one", (token,), ("a",), ""))
            watched.on_output(Delta("one", tuple(tokens[-1:]), ("a",), "", reason))
        self.shadow._worker.submit(int).result()
        return {name: count for name, count in asdict(self.shadow.counts).items() if count}


def test_an_answer_that_is_the_target_s_own_is_the_same() -> None:
    bench = Bench([top((1, -0.1)), top((2, -0.2))])
    stopping = replace(GREEDY, seed=None, stop=("x",), min_tokens=2, logprobs=None)
    options = RequestOptions(namespace="acme", tenant="acme", cache_salt="theirs", priority=3)
    assert bench.served([1, 2], stopping, options=options) == {"same": 1}
    [(name, prompt, params, plain)] = bench.added
    assert (name, tuple(prompt), params.seed, params.max_tokens) == ("shadow-one", PROMPT, 4, 2)
    assert (params.stop, params.min_tokens) == ((), 2)
    assert (plain.speculative, plain.priority, plain.store) == (False, MAX_PRIORITY, False)
    assert plain.tenant == "shared", "no tenant asked for it"
    assert plain.cache_salt not in ("", "theirs"), "it shares no KV with what it is to check"
    assert len(bench.heard) == 2


@pytest.mark.parametrize(
    ("is_float32", "gap", "expected"),
    [(True, 2e-4, "near_tie"), (True, 0.02, "differs"), (False, 0.02, "near_tie"),
     (False, 0.5, "differs")],
)  # fmt: skip
def test_the_gap_of_the_first_other_token_tells_a_tie(
    is_float32: bool, gap: float, expected: str
) -> None:
    plain = [top((1, -0.1)), top((2, -1.0), (3, -1.0 - gap)), top((9, -0.1))]
    assert Bench(plain, is_float32=is_float32).served([1, 3, 4]) == {expected: 1}


def test_with_a_temperature_the_noise_counts() -> None:
    """The served token is far less probable, and its noise makes up for it but for a hair."""

    def noise(token: int) -> float:
        one = np.array([token], dtype=np.int64)
        return float(gumbel(np.array([4]), np.array([len(PROMPT)]), one)[0])

    params = replace(GREEDY, temperature=0.5)
    rival = 0.5 * ((-1.0 / 0.5 + noise(2)) - noise(3))
    for change, expected in ((1e-4, "near_tie"), (0.05, "differs")):
        plain = [top((2, -1.0), (3, rival - change))]
        assert Bench(plain).served([3], params) == {expected: 1}


@pytest.mark.parametrize(
    "changes", [{"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"bad_words": ("x",)}]
)
def test_where_parameters_change_scores_nobody_is_accused(changes: dict[str, Any]) -> None:
    assert Bench([top((2, -1.0), (3, -5.0))]).served([3], replace(GREEDY, **changes)) == {
        "unknown": 1
    }


def test_a_token_that_is_not_among_the_best_is_worse_than_they() -> None:
    plain = [top((2, -1.0), (5, -5.0))]
    assert Bench(plain).served([3]) == {"differs": 1}
    # Unless its noise may make up for it.
    params = replace(GREEDY, temperature=100.0)
    results = [Bench(plain).served([token], params) for token in range(10, 30)]
    assert {"unknown": 1} in results
    assert {"differs": 1} in results


def test_an_answer_that_ends_elsewhere_differs() -> None:
    assert Bench([top((1, -0.1))]).served([1, 2]) == {"differs": 1}


def test_nobody_waits_for_it() -> None:
    bench = Bench([top((1, -0.1))])
    bench.has_room = False
    assert bench.served([1]) == {"skipped": 1}
    assert not bench.added
    bench.has_room = True
    assert bench.served([1]) == {"skipped": 1, "same": 1}


def test_one_is_repeated_at_a_time() -> None:
    bench = Bench([])
    assert bench.served([1]) == {}
    assert bench.served([1]) == {"skipped": 1}


def test_what_cannot_differ_or_did_not_end_is_not_repeated() -> None:
    bench = Bench([top((1, -0.1))])
    assert bench.served([1], options=RequestOptions(speculative=False)) == {}
    assert bench.served([1], options=RequestOptions(answered=(8, 9))) == {}
    assert bench.served([1], reason="cancelled") == {}
    assert not bench.added


def test_a_repetition_that_fails_is_counted_and_ends() -> None:
    bench = Bench([top((1, -0.1))])

    def refuse(*_: object) -> None:
        raise CapacityError("the queue is full")

    bench.shadow._add = refuse
    assert bench.served([1]) == {"failed": 1}
    assert bench.served([1]) == {"failed": 2}


def test_the_rate_is_that_of_the_requests() -> None:
    shadow = Shadow(0.25, lambda *_: None, lambda: True, chance=iter([0.1, 0.3, 0.2, 0.9]).__next__)
    chosen = [shadow.watch(GREEDY, RequestOptions(), lambda _: None) for _ in range(4)]
    assert [one is not None for one in chosen] == [True, False, True, False]


def test_rules_of_acceptance_are_refused() -> None:
    with pytest.raises(ConfigError, match="shadow_rate"):
        EngineConfig(model="demo", shadow_rate=0.1, acceptance="rejection")


REQUESTS: Sequence[SamplingParams] = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, frequency_penalty=0.6),
    SamplingParams(max_tokens=12, temperature=0.0, stop=("a",), min_tokens=3),
)


class Wrong:
    """A pipeline that answers drafted nodes, and nothing else, wrong."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    async def submit(self, step: StepInput) -> StepOutput:
        output = await self._pipeline.submit(step)
        has_nodes = any(tree is not None and len(tree.slots) > 1 for tree in step.trees)
        if not has_nodes:
            return output
        return replace(output, target_tokens=(output.target_tokens + 1) % 200)


async def counts_of(checkpoint: Path, change: Callable[[Any], Any] | None = None) -> dict[str, int]:
    config = EngineConfig(
        model=str(checkpoint), max_model_len=128, kv_cache_tokens=512, shadow_rate=1.0,
        drafters=(DrafterConfig(kind="prompt_lookup"),), node_budget="full",
    )  # fmt: skip
    engine = AsyncEngine(config, pipelines=change)
    await engine.start()
    try:
        for done, params in enumerate(REQUESTS, 1):
            await engine.generate("abcabcab" * 3, params)
            while sum(asdict(engine.stats().shadow).values()) < done:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        return {name: count for name, count in asdict(engine.stats().shadow).items() if count}
    finally:
        await engine.close()


def test_an_engine_s_answers_are_its_target_s_own(checkpoint: Path) -> None:
    assert asyncio.run(counts_of(checkpoint)) == {"same": len(REQUESTS)}


def test_an_engine_whose_drafts_change_answers_is_found_out(checkpoint: Path) -> None:
    found = asyncio.run(counts_of(checkpoint, lambda make: lambda *parts: Wrong(make(*parts))))
    assert found["differs"]
