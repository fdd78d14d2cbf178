"""A model's own layer for multi-token prediction drafts in trees beside others, and changes
nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draftline import Engine, EngineConfig, SamplingParams
from draftline.core.errors import ConfigError
from support.fakes.fake_engine import byte_tokenizer
from support.inputs.mtp_checkpoint import NUM_LAYERS, VOCAB, write_mtp_checkpoint

TOKENS = 20


@pytest.fixture(scope="module", params=["glm4_moe", "qwen3_next", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_mtp_checkpoint(tmp_path_factory.mktemp("mtp"), request.param)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def answers(model: str, drafters: list[dict[str, str]], temperature: float, stages: int) -> tuple:
    prompts = [np.random.default_rng(seed).integers(3, VOCAB, 16).tolist() for seed in range(4)]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=TOKENS)
    config = EngineConfig(
        model=model, drafters=drafters, pipeline_parallel_size=stages, node_budget="full"
    )
    with Engine(config) as engine:
        said = engine.generate(prompts, params)
        proposals = {one.name: one.proposals for one in engine.stats().drafters}
    return [list(one.token_ids) for one in said], proposals


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_drafts_change_nothing(model: str, temperature: float) -> None:
    plain, _ = answers(model, [], temperature, 1)
    for stages in (1, 2):
        mixed = [{"kind": "mtp"}, {"kind": "suffix"}]
        said, proposals = answers(model, mixed, temperature, stages)
        assert said == plain
        assert proposals["mtp"] > TOKENS


def test_it_keeps_as_much_as_a_layer_of_the_model(tmp_path: Path) -> None:
    """Latents of DeepSeek-V3 once, as its layers do."""
    folder = write_mtp_checkpoint(tmp_path, "deepseek_v3")
    byte_tokenizer().save_pretrained(folder)
    sizes = []
    for drafters in ([], [{"kind": "mtp"}]):
        with Engine(EngineConfig(model=str(folder), drafters=drafters)) as engine:
            [kept] = engine.stats().stage_memory
        sizes.append(kept.kv)
    assert sizes[1] * NUM_LAYERS == sizes[0] * (NUM_LAYERS + 1)


@pytest.mark.parametrize(
    ("own", "field"),
    [
        ({"model": "demo-griffin"}, "model"),
        ({"placement": "actor"}, "placement"),
        ({"tree": "bush"}, "tree"),
    ],
)
def test_what_it_does_not_take_is_named(model: str, own: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Engine(EngineConfig(model=model, drafters=[{"kind": "mtp", **own}])).close()
    assert field in raised.value.field


def test_a_model_without_the_layer_is_named() -> None:
    with pytest.raises(ConfigError, match="has none"):
        Engine(EngineConfig(model="demo", drafters=[{"kind": "mtp"}])).close()
