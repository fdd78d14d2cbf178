"""`draftline train export`: a folder in the form in which EAGLE-3's authors publish their heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train.fit import head_config
from draftline.deploy.cli.train.job import head_job
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.head_tensors import HeadTensors
from draftline.models.heads.load_head import build_head, load_head
from draftline.training.heads.export import export_head
from safetensors.torch import load_file
from support.inputs import head_checkpoints as published
from support.inputs.tiny_heads import griffin, texts
from support.tools.tiny_models import save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

runner = CliRunner()
DRAFTED = 20
# The fields of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B that describe the head.
PUBLISHED_FIELDS = {
    "architectures", "model_type", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "rms_norm_eps", "tie_word_embeddings", "vocab_size", "draft_vocab_size",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers: enough for the three that every server takes where a head names none."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("deep"), num_layers=12)


def new_config(target: Path, **fields: object) -> FeatureHeadConfig:
    """Of `draftline train eagle3 --draft-vocab-size 20 --share-output-head`."""
    given = {"draft_vocab_size": DRAFTED, "share_output_head": True, **fields}
    job = head_job("eagle3", {"texts": target, "output": target, **given})
    config = head_config(target, "eagle3", job, texts(50))
    assert isinstance(config, FeatureHeadConfig)
    return config


def saved(config: FeatureHeadConfig, folder: Path) -> Path:
    """A random head of every third token, as training writes it."""
    head = build_head(config)
    assert isinstance(head, FeatureHead)
    if config.has_token_map:
        head.d2t.copy_(2 * torch.arange(DRAFTED))
    export_head(head, folder, {"architectures": ["LlamaForCausalLMEagle3"]}, {"steps": 7})
    return folder


def test_an_exported_head_has_the_published_form(target: Path, tmp_path: Path) -> None:
    config = new_config(target)
    shared = saved(config, tmp_path / "shared")
    assert "lm_head.weight" not in HeadTensors(shared).shapes
    output = tmp_path / "published"
    result = runner.invoke(
        app, ["train", "export", str(shared), "--model", str(target), "--output", str(output)]
    )
    assert result.exit_code == 0, result.output

    tensors = load_file(output / "model.safetensors")
    assert tensors.keys() == published.eagle3().keys()
    size = config.hidden_size
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["fc.weight"] == (size, 3 * size)
    assert shapes["midlayer.self_attn.q_proj.weight"][1] == 2 * size
    assert shapes["lm_head.weight"] == (DRAFTED, size)
    assert shapes["t2d"] == (config.vocab_size,)
    own = {"d2t": torch.int64, "t2d": torch.bool}
    for name, tensor in tensors.items():
        assert tensor.dtype == own.get(name, torch.bfloat16), name
    drafted = torch.arange(DRAFTED) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == drafted.tolist()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    rows = model.get_output_embeddings().weight[drafted]
    assert torch.equal(tensors["lm_head.weight"], rows.bfloat16())
    before = load_file(shared / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())

    fields = json.loads((output / "config.json").read_text())
    assert fields.keys() >= PUBLISHED_FIELDS
    # Servers number layers differently; without ids all of them take the default ones.
    assert fields["eagle_config"] == {"use_aux_hidden_state": True}
    read = AutoConfig.from_pretrained(output)
    assert (read.model_type, read.draft_vocab_size) == ("llama", DRAFTED)
    theta = AutoConfig.from_pretrained(target).rope_parameters["rope_theta"]
    assert read.rope_parameters["rope_theta"] == theta
    assert json.loads((output / "training.json").read_text()) == {"steps": 7}
    loaded = load_head(output).config
    assert loaded == replace(config, has_target_rows=False, rope=loaded.rope)
    assert loaded.layers_of(12) == (1, 5, 8)


def test_default_layers_of_an_older_head_lose_their_ids(target: Path, tmp_path: Path) -> None:
    older = saved(replace(new_config(target), feature_layers=(1, 5, 8)), tmp_path / "older")
    assert "eagle_aux_hidden_state_layer_ids" in (older / "config.json").read_text()
    output = tmp_path / "published"
    command = ["train", "export", str(older), "--model", str(target), "--output", str(output)]
    assert runner.invoke(app, command).exit_code == 0
    assert "eagle_aux_hidden_state_layer_ids" not in (output / "config.json").read_text()


def test_other_layers_are_named_by_their_inputs(target: Path, tmp_path: Path) -> None:
    config = new_config(target, feature_layers="0,4,11")
    folder = saved(config, tmp_path / "head")
    fields = json.loads((folder / "config.json").read_text())
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 12]
    loaded = load_head(folder).config
    assert isinstance(loaded, FeatureHeadConfig)
    assert loaded.feature_layers == (0, 4, 11)


def test_a_head_of_another_kind_or_target_is_refused(target: Path, tmp_path: Path) -> None:
    other = replace(new_config(target), vocab_size=60)
    for config, named in ((griffin(target), "no EAGLE-3 head"), (other, "does not fit")):
        folder = saved(config, tmp_path / named)
        result = runner.invoke(
            app,
            ["train", "export", str(folder), "--model", str(target), "--output", str(tmp_path)],
        )
        assert isinstance(result.exception, ConfigError)
        assert named in str(result.exception)
