"""An answer that another engine has begun goes on behind any of its tokens as if nothing were."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import StructuredOutput
from draftline.core.request.output import Delta, TokenLogProb
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts

NUM_TOKENS = 48
PROMPT = held_out_prompts(1)[0].text
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}'
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=3),
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.7, seed=5, presence_penalty=0.5,
        frequency_penalty=0.4, repetition_penalty=1.1, logit_bias={7: 3.0, 9: -2.0},
    ),
    "words": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=6, min_tokens=30, bad_words=("self", "return")
    ),
    "stop": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=11, stop=("\n\n", "self.", "return"),
        min_tokens=20, include_stop_str_in_output=True,
    ),
    "logprobs": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=2, logprobs=2, prompt_logprobs=1
    ),
    "form": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=9,
        structured_output=StructuredOutput(kind="json", value=SCHEMA),
    ),
}  # fmt: skip
DRAFTERS = (
    DrafterConfig(kind="suffix"),
    DrafterConfig(kind="prompt_lookup"),
    DrafterConfig(kind="token_recycling"),
    DrafterConfig(kind="model", model="demo-drafter"),
)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    config = EngineConfig(
        model="demo", drafters=DRAFTERS, node_budget="full", draft_deadline_ms=10_000,
        pipeline_parallel_size=request.param, multi_step_ms=0,
    )  # fmt: skip
    engine = AsyncEngine(config)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


async def deltas(
    engine: AsyncEngine, params: SamplingParams, options: RequestOptions
) -> list[Delta]:
    return [delta async for delta in engine.stream(PROMPT, params, options)]


def told(parts: Sequence[Delta]) -> tuple[list[int], str, list[TokenLogProb]]:
    """Tokens, text and log-probabilities."""
    tokens = [token for part in parts for token in part.token_ids]
    entries = [entry for part in parts for entry in part.log_probs]
    return tokens, "".join(part.text for part in parts), entries


@pytest.mark.parametrize("name", PARAMS)
async def test_what_follows_a_cut_is_what_would_have_come(engine: AsyncEngine, name: str) -> None:
    params = PARAMS[name]
    # Token by token, so that the text of every beginning is known.
    plain = await deltas(engine, params, RequestOptions(speculative=False))
    assert all(len(delta.token_ids) == 1 for delta in plain)
    assert len(plain) > 8
    middle = random.Random(name).sample(range(2, len(plain) - 1), 3)
    for cut in (1, *middle, len(plain) - 1):
        answered = tuple(told(plain[:cut])[0])
        for speculative in (True, False):
            options = RequestOptions(answered=answered, speculative=speculative)
            rest = await deltas(engine, params, options)
            tokens, text, entries = told(rest)
            expected_tokens, expected_text, expected_entries = told(plain[cut:])
            assert (tokens, text) == (expected_tokens, expected_text), cut
            assert (rest[-1].finish_reason, rest[-1].stop_reason) == (
                plain[-1].finish_reason, plain[-1].stop_reason,
            )  # fmt: skip
            assert [entry.top_ids for entry in entries] == [e.top_ids for e in expected_entries]
            for entry, other in zip(entries, expected_entries, strict=True):
                assert entry.log_prob == pytest.approx(other.log_prob, abs=1e-4)
            # Those of the prompt were told with the first token.
            assert all(delta.prompt_log_probs is None for delta in rest)
            metrics = rest[-1].metrics
            assert metrics is not None
            assert metrics.generated_tokens == len(plain)
            assert metrics.prompt_tokens == plain[-1].metrics.prompt_tokens  # pyright: ignore[reportOptionalMemberAccess]
            assert metrics.cached_tokens <= metrics.prompt_tokens
            assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time


async def test_many_at_once_each_cut_elsewhere(engine: AsyncEngine) -> None:
    params = PARAMS["sampled"]
    plain = await deltas(engine, params, RequestOptions(speculative=False))
    tokens = told(plain)[0]
    cuts = range(0, len(tokens), 4)
    rests = await asyncio.gather(
        *(deltas(engine, params, RequestOptions(answered=tuple(tokens[:cut]))) for cut in cuts)
    )
    assert [told(rest)[0] for rest in rests] == [tokens[cut:] for cut in cuts]


async def test_other_rules_go_on_behind_what_was_told() -> None:
    """Greedily they have but one text."""
    engine = AsyncEngine(
        EngineConfig(model="demo", acceptance="rejection", drafters=DRAFTERS[:2], multi_step_ms=0)
    )
    await engine.start()
    try:
        plain = await deltas(engine, PARAMS["greedy"], RequestOptions(speculative=False))
        tokens, text, _ = told(plain)
        rest = await deltas(engine, PARAMS["greedy"], RequestOptions(answered=tuple(tokens[:9])))
        assert told(plain[:9])[1] + told(rest)[1] == text
        assert told(rest)[0] == tokens[9:]
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("answered", "problem"), [((10**6,), "vocabulary"), ((5,) * NUM_TOKENS, "end of the answer")]
)
async def test_tokens_that_cannot_be_an_answers_beginning_are_refused(
    engine: AsyncEngine, answered: tuple[int, ...], problem: str
) -> None:
    params = replace(PARAMS["greedy"], ignore_eos=True)
    with pytest.raises(RequestError, match=f"answered: .*{problem}"):
        await deltas(engine, params, RequestOptions(answered=answered))
