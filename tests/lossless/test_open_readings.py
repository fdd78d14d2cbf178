"""A drafter whose config does not say its layout: its first drafts tell, answers stay the same."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.drafters.heads import reading_trial
from draftline.models.load.checkpoint import resolve_head_path
from draftline.models.stage.stage_heads import StageHeads
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

RANK = 4
LAYOUT = "sample_from_anchor"


@pytest.fixture(scope="module")
def unsaid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled DFlash, which fills in, as an older DSpark file of speculators whose tokens add
    nothing."""
    source = resolve_head_path("demo-dflash")
    fields = json.loads((source / "config.json").read_text())
    own = fields.pop("dflash_config")
    config = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": fields,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "block_size": fields.pop("block_size"),
    }
    tensors = load_file(source / "model.safetensors")
    for index in (1, 2):
        weight = torch.zeros(fields["vocab_size"], RANK, dtype=torch.bfloat16)
        tensors[f"markov_head.markov_w{index}.weight"] = weight
    folder = tmp_path_factory.mktemp("dspark")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_found(folder: Path, message: str) -> None:
    assert f"kept={LAYOUT}=false" in message
    assert f"not={LAYOUT}=true" in message
    assert str(folder) in message
    right, wrong = (float(part.split()[0].rstrip(":")) for part in message.split("tokens=")[1:])
    # Where a text repeats a token, a wrong row may be right.
    assert right > max(0.5, 2 * wrong)


@pytest.mark.parametrize(
    ("stages", "placement"),
    [
        pytest.param(1, "last_stage", marks=pytest.mark.full),
        (2, "last_stage"),
        pytest.param(2, "actor", marks=pytest.mark.full),
    ],
)
def test_an_engine_finds_the_layout_out(
    unsaid: Path, stages: int, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = DrafterConfig(kind="head", model=str(unsaid), placement=placement)
    config = EngineConfig(
        model="demo", drafters=(drafter,), node_budget="full", pipeline_parallel_size=stages,
        draft_deadline_ms=5000,
    )  # fmt: skip
    prompts = [prompt.text for prompt in held_out_prompts()[:6]]
    with Engine(config) as engine, caplog.at_level(logging.WARNING):
        for temperature in (0.0, 0.7):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
            plain = engine.generate(prompts, params, options=RequestOptions(speculative=False))
            drafted = engine.generate(prompts, params)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        [record] = [one for one in caplog.records if "event=probed" in one.getMessage()]
        check_found(unsaid, record.getMessage())
        assert not engine.stats().drafters[0].left_out


def test_what_is_kept_by_the_reading_that_was_wrong_is_freed(
    unsaid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default such a head drafts in the last stage."""
    monkeypatch.setattr(reading_trial, "NUM_DRAFTS", 4)
    made: list[StageHeads] = []
    make = StageHeads.__init__

    def noted(self: StageHeads, *args: object, **options: object) -> None:
        made.append(self)
        make(self, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(StageHeads, "__init__", noted)
    drafters = (DrafterConfig(kind="head", model=str(unsaid)),)
    config = EngineConfig(model="demo", drafters=drafters, node_budget="full")
    with Engine(config) as engine:
        [heads] = made
        before = heads.kv_bytes
        params = SamplingParams(temperature=0.0, max_tokens=32)
        engine.generate([prompt.text for prompt in held_out_prompts()[:4]], params)
        assert 2 * heads.kv_bytes == before


def test_doctor_finds_the_layout_out(unsaid: Path) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--drafter", str(unsaid)])
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert f"leaves open how it is read; take {LAYOUT}=false (right tokens" in said
