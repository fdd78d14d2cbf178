"""Small models with servers of their own, prefix caches, rounded weights: no text changes."""

from __future__ import annotations

from typing import Any

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions

# Long enough to share blocks, and alike up to the last line.
SHARED = "import os\nimport sys\n\n\ndef read_lines(path, limit=100):\n    lines = []\n" * 3
PROMPTS = [SHARED + end for end in ("    for", "    with", "    return", "    while")]
POOL: dict[str, Any] = {"transport": "grpc", "servers": 2}
TREES: dict[str, Any] = {"tree": "dynamic", "num_tokens": 2}
OTHER: dict[str, Any] = {"model": "demo-drafter-other-vocab", "vocabulary": "slem"}
ROUNDED: dict[str, Any] = {"weights": "int8", "tree": "dynamic"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        pytest.param(POOL, 0.0, id="greedy, pool", marks=pytest.mark.full),
        pytest.param(POOL, 0.8, id="sampled, pool", marks=pytest.mark.full),
        pytest.param(ROUNDED, 0.0, id="greedy, int8", marks=pytest.mark.full),
        pytest.param(ROUNDED, 0.8, id="sampled, int8"),
    ],
)
def test_texts_are_those_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    drafter = DrafterConfig(kind="model", model="demo-drafter", **options)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    config = EngineConfig(
        model="demo", node_budget="full", draft_deadline_ms=5000, drafters=(drafter,)
    )
    with Engine(config) as engine:
        plain = engine.generate(PROMPTS, params, options=RequestOptions(speculative=False))
        alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
        together = engine.generate(PROMPTS, params)
        # What a server tells of itself comes with its first answer and then every 32nd.
        for _ in range(3):
            engine.generate(PROMPTS, params)
        [stats] = engine.stats().drafters
    expected = [output.token_ids for output in plain]
    assert [output.token_ids for output in alone] == expected
    assert [output.token_ids for output in together] == expected
    assert sum(output.metrics.num_accepted_tokens for output in together) > 0
    assert stats.errors == 0
    assert stats.prefix.hits > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "temperature", "streaming"),
    [
        pytest.param({}, 0.8, "on", id="sampled, streamed", marks=pytest.mark.full),
        pytest.param(TREES, 0.8, "off", id="sampled, trees", marks=pytest.mark.full),
        pytest.param(OTHER, 0.8, "on", id="sampled, other tokenizer, streamed"),
        pytest.param({}, 0.0, "off", id="greedy", marks=pytest.mark.full),
        pytest.param(TREES, 0.0, "on", id="greedy, trees, streamed", marks=pytest.mark.full),
    ],
)
def test_a_model_in_a_process_of_its_own_drafts_for_two_stages(
    options: dict[str, Any], temperature: float, streaming: Any
) -> None:
    given = {"model": "demo-drafter", "transport": "grpc", **options}
    drafter = DrafterConfig(kind="model", **given)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    config = EngineConfig(
        model="demo", pipeline_parallel_size=2, node_budget="full", draft_deadline_ms=5000,
        pipelined_trees=streaming, drafters=(drafter,),
    )  # fmt: skip
    with Engine(config) as engine:
        plain = engine.generate(PROMPTS, params, options=RequestOptions(speculative=False))
        # One at a time, and all at once.
        alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
        together = engine.generate(PROMPTS, params)
        [stats] = engine.stats().drafters
    expected = [output.token_ids for output in plain]
    assert [output.token_ids for output in alone] == expected
    assert [output.token_ids for output in together] == expected
    assert sum(output.metrics.num_accepted_tokens for output in alone) > 0
    assert stats.errors == 0
