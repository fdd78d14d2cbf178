"""Answers through the socket are those of the engine in this process, to the letter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import StructuredOutput
from draftline.core.request.output import Delta
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.api.engine_client import EngineClient, LocalEngineClient
from support.servers.split_engine import Split, split_engine

pytestmark = [pytest.mark.net, pytest.mark.asyncio(loop_scope="module")]

BASE = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
PROMPT = "def read_json(path):\n    with open(path) as"
PLAIN = RequestOptions(speculative=False)


CONFIG = EngineConfig(
    model="demo",
    max_model_len=128,
    kv_cache_tokens=2048,
    drafters=(DrafterConfig(kind="prompt_lookup"), DrafterConfig(kind="spectra")),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[tuple[LocalEngineClient, Split]]:
    local = LocalEngineClient(AsyncEngine(CONFIG))
    await local.start()
    try:
        async with split_engine(local._engine, CONFIG.model) as split:
            yield local, split
    finally:
        await local.close()


async def answer(
    engine_client: EngineClient, params: SamplingParams, request_id: str = "a", prompt: Any = PROMPT
) -> dict[str, Any]:
    """What a client can tell of an answer, with its deltas' pieces put together."""
    ids = await engine_client.codec.encode(prompt) if isinstance(prompt, str) else prompt
    deltas: list[Delta] = []
    # In batches of other shapes, log-probabilities differ in their last digits.
    options = RequestOptions() if params.logprobs is None else PLAIN
    stream = engine_client.stream(ids, params, options, request_id=request_id)
    async for delta in stream:
        assert delta.request_id == request_id
        assert len(delta.sources) == len(delta.token_ids)
        deltas.append(delta)
    last = deltas[-1]
    assert last.metrics is not None
    return {
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "log_probs": [entry for delta in deltas for entry in delta.log_probs],
        "prompt_log_probs": deltas[0].prompt_log_probs,
        "generated_tokens": last.metrics.generated_tokens,
        "prompt_tokens": last.metrics.prompt_tokens,
    }


def changed(**changes: Any) -> SamplingParams:
    return replace(BASE, **changes)


FORM = StructuredOutput(kind="regex", value="[a-c]{6,9}")
CASES = {
    "plain": BASE,
    "greedy": changed(temperature=0.0),
    "log-probabilities": changed(logprobs=3, prompt_logprobs=2),
    "only the prompt": changed(max_tokens=0, prompt_logprobs=1),
    "one token": changed(max_tokens=1),
    "special tokens": changed(skip_special_tokens=False),
    "a form": changed(structured_output=FORM, ignore_eos=False, temperature=0.7),
    "penalties": changed(repetition_penalty=1.3, presence_penalty=0.5),
    "bad words": changed(bad_words=("json", "f")),
}


@pytest.mark.parametrize("name", CASES)
async def test_answers_are_the_same(both: tuple[LocalEngineClient, Split], name: str) -> None:
    local, split = both
    expected = await answer(local, CASES[name])
    assert await answer(split.client, CASES[name]) == expected


async def test_stops_are_the_same(both: tuple[LocalEngineClient, Split]) -> None:
    """At texts, at tokens, before and after the least number of tokens, shown and cut."""
    local, split = both
    free = await answer(local, BASE)
    tokens, text = free["token_ids"], free["text"]
    texts = [text[start : start + size] for start, size in ((2, 1), (3, 3), (9, 2))]
    cases = [changed(stop=(one,)) for one in texts if one]
    cases += [changed(stop=tuple(filter(None, texts)), min_tokens=8)]
    cases += [changed(stop_token_ids=(tokens[5],)), changed(stop_token_ids=tuple(tokens[7:9]))]
    cases += [changed(stop_token_ids=(tokens[2],), min_tokens=6)]
    cases += [replace(case, include_stop_str_in_output=True) for case in cases]
    ends = set()
    for case in cases:
        expected = await answer(local, case)
        assert await answer(split.client, case) == expected
        ends.add((expected["finish_reason"], type(expected["stop_reason"])))
    assert {("stop", str), ("stop", int)} <= ends


async def test_many_at_once_are_the_same(both: tuple[LocalEngineClient, Split]) -> None:
    local, split = both
    params = [changed(seed=seed, max_tokens=16 + seed) for seed in range(12)]
    expected = [await answer(local, one) for one in params]
    before = await num_ended(split)
    answers = [answer(split.client, one, f"r{i}") for i, one in enumerate(params)]
    assert await asyncio.gather(*answers) == expected
    stats = await split.client.stats()
    assert [one.engine_id for one in stats] == ["0"]
    assert await num_ended(split) == before + 12


async def num_ended(split: Split) -> float:
    """Answers through the socket that came to their length, as the metrics count them."""
    name = 'vllm:request_success_total{finished_reason="length",model_name="tiny"} '
    lines = (await split.client.metrics_text()).decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("prompt", "changes", "field"),
    [
        ([], {}, "prompt"),
        ([30_000], {}, r"prompt\[0\]"),
        ([2**40], {}, "prompt"),
        ([1] * 127, {"max_tokens": 30}, "max_tokens"),
        ([1], {"logit_bias": {30_000: 1.0}}, "logit_bias"),
    ],
)
async def test_what_is_refused_names_its_field(
    both: tuple[LocalEngineClient, Split], prompt: list[int], changes: dict[str, Any], field: str
) -> None:
    _, split = both
    with pytest.raises(RequestError, match=field):
        await answer(split.client, changed(**changes), prompt=prompt)
    assert split.session.num_running == 0
    assert (await answer(split.client, BASE))["generated_tokens"] == 24
