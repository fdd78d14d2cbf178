"""Texts of requests whose steps travel as differences, while stages die and KV runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from draftline import EngineConfig, SamplingParams
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.engine.assembly import Assembly, local_pipeline, plan_model
from draftline.cluster.engine.engine_thread import EngineThread
from draftline.cluster.transport.stage_spec import Pipeline, StageSpec
from draftline.core.request.output import OutputCollector, RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter
from support.fakes.message_pipeline import MessagePipeline
from support.tools.tiny_models import save_tiny_model
from support.tools.tiny_tokenizers import single_bytes

NUM_TOKENS = 40
PARAMS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True),
    SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.2,
        ignore_eos=True,
    ),
    SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.7, seed=5, presence_penalty=0.5, top_k=40,
        logit_bias={7: 3.0, 9: -2.0}, banned_token_ids=(3, 4), ignore_eos=True,
    ),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=6, min_tokens=30),
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9 + number] * (3 + number) for number in range(len(PARAMS))]


def answers(
    model: str, make_pipeline: Callable[[Sequence[StageSpec]], Pipeline], is_speculative: bool
) -> list[RequestOutput]:
    """All requests at once, with KV for some of them."""
    config = EngineConfig(
        model=model, pipeline_parallel_size=2, kv_cache_tokens=160, max_num_seqs=4, tree_nodes=8,
        device="cpu", compile="off", node_budget="full",
    )  # fmt: skip
    plan = plan_model(config)

    async def build() -> Assembly:
        return Assembly(plan, make_pipeline, [LocalDrafter(PromptLookupDrafter())])

    engine, factory = EngineThread(build), plan.request_factory()
    engine.start()
    outputs = []
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        collector = OutputCollector(str(number))
        options = RequestOptions(speculative=is_speculative)
        engine.enqueue(*factory.build(str(number), prompt, params, collector.on_output, options))
        outputs.append(collector)
    got = [collector.wait() for collector in outputs]
    engine.close()
    return got


@pytest.fixture(scope="module", params=["demo", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose layers keep no states, and one of whose some do."""
    if request.param == "demo":
        return "demo"
    folder = save_tiny_model(request.param, tmp_path_factory.mktemp("hybrid"))
    single_bytes().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(model: str) -> list[RequestOutput]:
    return answers(model, local_pipeline, is_speculative=False)


@pytest.mark.parametrize("is_speculative", [False, True])
def test_texts_outlive_stages_that_are_replaced(
    model: str, plain: list[RequestOutput], is_speculative: bool
) -> None:
    pipelines: list[MessagePipeline] = []

    def pipeline(specs: Sequence[StageSpec]) -> MessagePipeline:
        pipelines.append(MessagePipeline(specs, lost_at=(60, 75, 90)))
        return pipelines[-1]

    got = answers(model, pipeline, is_speculative)
    assert [output.token_ids for output in got] == [output.token_ids for output in plain]
    assert pipelines[0].num_restarts >= 2
    assert sum(output.metrics.num_preemptions for output in got) > pipelines[0].num_restarts
    if is_speculative:
        assert max(output.metrics.acceptance_length for output in got) > 1
