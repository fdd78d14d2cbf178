"""Several stages of a model share a device, and answer as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from support.inputs.quantized_checkpoints import FORMATS, save_pair

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 4, [2, 7, 1, 8] * 6]
PLAIN = RequestOptions(speculative=False)


def answers(checkpoint: Path, device: str, num_stages: int) -> list[tuple[int, ...]]:
    """Drafted and plain, greedy and seeded; the drafted are those of plain decoding."""
    config = EngineConfig(
        model=str(checkpoint),
        device=device,
        dtype="float32",
        pipeline_parallel_size=num_stages,
        max_model_len=128,
        kv_cache_tokens=512,
        node_budget="full",
        drafters=(DrafterConfig(kind="spectra"), DrafterConfig(kind="prompt_lookup")),
    )
    found: list[tuple[int, ...]] = []
    with Engine(config) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
            drafted, plain = (
                [tuple(one.token_ids) for one in engine.generate(PROMPTS, params, options)]
                for options in (None, PLAIN)
            )
            assert drafted == plain
            found += drafted
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_stages_answer_as_one(checkpoint: Path, device: str) -> None:
    assert answers(checkpoint, device, 2) == answers(checkpoint, device, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", ["gptq 4, act order", "awq", "packed 4", "fp8 blocks", "compressed int8"]
)
def test_drafts_change_no_text_of_quantised_weights(form: str, tmp_path: Path) -> None:
    assert answers(save_pair("qwen2", FORMATS[form], tmp_path).quantized, "cuda", 1)


@pytest.mark.gpu
def test_a_closed_engine_leaves_its_gpu_to_the_next(checkpoint: Path) -> None:
    """Though it is still held, and each takes all that is free."""
    config = EngineConfig(model=str(checkpoint), device="cuda", max_model_len=128)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    closed = []
    for _ in range(2):
        with Engine(config) as engine:
            closed.append((engine, engine.generate(PROMPTS, params)))
    (_, first), (_, second) = closed
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
