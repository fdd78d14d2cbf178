"""Answers equal plain decoding's with a block drafter that knows nothing."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.models.heads.dflash_config import DFlashConfig
from draftline.models.heads.dspark import DSparkConfig
from draftline.models.heads.load_head import build_head
from draftline.models.heads.p_eagle import PEagleConfig
from draftline.training.heads.export import export_head

LAYERS = (-1, 2, 5)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random drafters for the demo model, one of whose layers is causal and sees eight tokens."""
    torch.manual_seed(2)
    sizes = DFlashConfig(
        hidden_size=256, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        block_size=5, mask_token=4095, num_layers=2, num_features=len(LAYERS), feature_size=256,
        feature_layers=LAYERS, vocab_size=4096, causal_layers=(True, False), windows=(8, 0),
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    own = {field.name: getattr(sizes, field.name) for field in fields(sizes)} | {"is_shifted": True}
    configs = {"dflash": sizes, "dspark": DSparkConfig(**own, markov_kind="rnn", markov_rank=16)}
    masked = PEagleConfig(
        fusion="pair", hidden_size=256, intermediate_size=64, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab_size=4096, num_layers=2, num_features=3, feature_size=256,
        feature_layers=LAYERS, mask_token=4095, rope=sizes.rope,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("heads")
    for kind, config in configs.items():
        export_head(build_head(config), folder / kind, {}, {})
    ids = [layer + 1 for layer in LAYERS]
    said = {"mask_token_id": masked.mask_token, "eagle_aux_hidden_state_layer_ids": ids}
    export_head(build_head(masked), folder / "p_eagle", said, {})
    return {kind: folder / kind for kind in (*configs, "p_eagle")}


@pytest.mark.parametrize(
    ("kind", "tree", "stages"),
    [
        pytest.param("dflash", "best_first", 1, marks=pytest.mark.full),
        ("dflash", "best_first", 3),
        pytest.param("dflash", "chain", 2, marks=pytest.mark.full),
        pytest.param("dflash", "dynamic", 1, marks=pytest.mark.full),
        ("dspark", "dynamic", 2),
        pytest.param("p_eagle", "best_first", 1, marks=pytest.mark.full),
        ("p_eagle", "chain", 3),
    ],
)
def test_block_drafts_change_no_token(
    untrained: dict[str, Path], kind: str, tree: str, stages: int
) -> None:
    drafter = DrafterConfig(kind="head", model=str(untrained[kind]), tree=tree, top_k=2)
    check_equal(drafter, pipeline_parallel_size=stages)


@pytest.mark.net
@pytest.mark.full
def test_masked_drafts_of_another_process_change_no_token(untrained: dict[str, Path]) -> None:
    head = DrafterConfig(kind="head", model=str(untrained["p_eagle"]), transport="grpc")
    check_equal(head, pipeline_parallel_size=2, draft_deadline_ms=5000)


def check_equal(drafter: DrafterConfig, **settings: Any) -> None:
    config = EngineConfig(
        model="demo", drafters=(drafter,), node_budget="full", max_num_batched_tokens=48, **settings
    )
    prompts = [prompt.text for prompt in held_out_prompts()[:4]]
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
            plain = engine.generate(prompts, params, options=RequestOptions(speculative=False))
            drafted = engine.generate(prompts, params)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            # Drafts were verified, and most of them refused.
            assert sum(one.metrics.num_draft_tokens for one in drafted) > 0
