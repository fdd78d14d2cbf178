"""`draftline.Engine` over a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.errors import RequestError
from draftline.core.request_options import RequestOptions

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(checkpoint),
        max_model_len=128,
        kv_cache_tokens=512,
        drafters=(DrafterConfig(kind="spectra"), DrafterConfig(kind="prompt_lookup")),
    )
    with Engine(config) as engine:
        yield engine


def test_unknown_drafter_of_a_request(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"speculative.drafters.*'spectre'.*prompt_lookup"):
        engine.generate(["abc"], PARAMS, RequestOptions(drafters=("spectre",)))


def test_totals_of_the_engine(engine: Engine) -> None:
    before = engine.stats()
    prompts = [[1, 2, 3, 1, 2, 3] * 8, [1, 2, 3, 1, 2, 3] * 8]
    outputs = [engine.generate([prompt], PARAMS)[0] for prompt in prompts]
    after = engine.stats()
    assert after.num_prefix_queries - before.num_prefix_queries == 2 * 48
    cached = [output.metrics.cached_tokens for output in outputs]
    assert cached[1] > 0
    assert after.num_prefix_hits - before.num_prefix_hits == sum(cached)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    wasted = sum(after.wasted_by_source.values()) - sum(before.wasted_by_source.values())
    assert wasted == drafted - accepted
    for output in outputs:
        metrics = output.metrics
        times = (metrics.arrival_time, metrics.start_time, metrics.first_token_time)
        assert list(times) == sorted(times)
        assert metrics.start_time > 0


def test_a_request_chooses_its_drafters(engine: Engine) -> None:
    prompt = ["abcabcabcabcabc"]
    (plain,) = engine.generate(prompt, PARAMS, RequestOptions(speculative=False))
    (one,) = engine.generate(prompt, PARAMS, RequestOptions(drafters=("prompt_lookup",)))
    assert one.token_ids == plain.token_ids
    assert set(one.metrics.drafted_by_source) <= {"prompt_lookup"}
