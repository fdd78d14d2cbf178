"""A small model that drafts while the target computes: the text is the target's all the same."""

from __future__ import annotations

from typing import Any

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions

PROMPTS = ["def read(path):\n", "class Tree:\n    def __init__(self", "import os\n\nfor name in"]
COMMON: dict[str, Any] = {"transport": "grpc", "ahead": True}
AHEAD = DrafterConfig(kind="model", model="demo-drafter", **COMMON)
TREES = DrafterConfig(kind="model", model="demo-drafter", tree="dynamic", num_tokens=2, **COMMON)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("drafter", "stages", "temperature", "streaming"),
    [
        pytest.param(AHEAD, 1, 0.0, "off", id="greedy, one"),
        pytest.param(AHEAD, 2, 0.8, "on", id="sampled, two, streamed"),
        pytest.param(TREES, 2, 0.8, "off", id="sampled, trees"),
        pytest.param(AHEAD, 1, 0.8, "off", id="sampled, one", marks=pytest.mark.full),
        pytest.param(AHEAD, 2, 0.8, "off", id="sampled, two", marks=pytest.mark.full),
        pytest.param(AHEAD, 2, 0.0, "off", id="greedy, two", marks=pytest.mark.full),
        pytest.param(TREES, 2, 0.0, "on", id="greedy, trees, streamed", marks=pytest.mark.full),
    ],
)
def test_texts_are_those_of_plain_decoding(
    drafter: DrafterConfig, stages: int, temperature: float, streaming: str
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    config: dict[str, Any] = {
        "model": "demo",
        "pipeline_parallel_size": stages,
        "node_budget": "full",
        "draft_deadline_ms": 5000,
        "streaming": streaming,
    }
    with Engine(EngineConfig(**config, drafters=(drafter,))) as engine:
        plain = [
            engine.generate([prompt], params, options=RequestOptions(speculative=False))[0]
            for prompt in PROMPTS
        ]
        # One at a time, and all at once.
        alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
        together = [engine.generate(PROMPTS, params)]
        # What is there in time depends on the machine; the texts never do.
        while not engine.stats().drafters[0].ahead_used and len(together) < 40:
            together.append(engine.generate(PROMPTS, params))
        [stats] = engine.stats().drafters
    expected = [output.token_ids for output in plain]
    assert [output.token_ids for output in alone] == expected
    for outputs in together:
        assert [output.token_ids for output in outputs] == expected
    assert stats.errors == 0
    assert stats.ahead_used > 0
