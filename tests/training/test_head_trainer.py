"""Heads are trained from texts that a target said, go on after a kill, and load as published."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.load_head import load_head, misfits
from draftline.models.load.model_info import read_model_info
from draftline.training.heads import trainer
from draftline.training.heads.distilled_texts import (
    DistilledText,
    TextFolder,
    read_texts,
    text_batch,
)
from draftline.training.heads.export import export_head
from draftline.training.heads.feature_passes import vocabulary_of
from draftline.training.heads.trainer import HeadPlan, read_log, read_losses, train_head
from support.fakes.recorded_progress import RecordedProgress
from support.inputs.tiny_heads import CONFIGS, PLAN, eagle3, griffin, p_eagle, texts
from support.tools.tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

PUBLISHED = {
    "griffin": "GriffinModel",
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
    "eagle3": "LlamaForCausalLMEagle3",
    "p_eagle": "LlamaForCausalLMEagle3",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


class Killed(Exception):
    """What ends a run in the middle."""


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config, said = CONFIGS[kind](checkpoint), texts(read_model_info(checkpoint).vocab_size)
    whole = train_head(config, checkpoint, said, PLAN, tmp_path / "whole")
    texts_of = trainer._texts_of

    def until_killed(all_texts, plan, step, accelerator):
        if step == 4:
            raise Killed
        return texts_of(all_texts, plan, step, accelerator)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_texts_of", until_killed)
        with pytest.raises(Killed):
            train_head(config, checkpoint, said, PLAN, tmp_path / "killed")
    progress = RecordedProgress()
    again = train_head(config, checkpoint, said, PLAN, tmp_path / "killed", progress=progress)
    [work] = progress.works
    # The last checkpoint is that of step 3.
    assert (work.total, work.done, len(work.notes)) == (6, 6, 3)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    log = list(read_log(tmp_path / "whole"))
    assert log == list(read_log(tmp_path / "killed"))
    assert [row[0] for row in log] == [3, 6]
    losses = read_losses(tmp_path / "whole")
    assert losses == read_losses(tmp_path / "killed")
    assert (len(losses), losses[2], losses[5]) == (6, log[0][1], log[1][1])
    assert all(0 <= share <= 1 for row in log for share in row[2:])


def test_a_folder_of_another_heads_run_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    said = texts(read_model_info(checkpoint).vocab_size)
    train_head(griffin(checkpoint), checkpoint, said, PLAN, tmp_path)
    other = replace(griffin(checkpoint), intermediate_size=28)
    with pytest.raises(ConfigError, match="run_dir"):
        train_head(other, checkpoint, said, PLAN, tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_exported_head_loads_and_fits_its_target(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    info = read_model_info(checkpoint)
    said = texts(info.vocab_size)
    head = train_head(CONFIGS[kind](checkpoint), checkpoint, said, PLAN, tmp_path / "run")
    folder = tmp_path / "head"
    export_head(head, folder, {"architectures": [PUBLISHED[kind]]}, asdict(PLAN))
    loaded = load_head(folder)
    assert loaded.config == replace(head.config, rope=loaded.config.rope)
    assert loaded.config.rope["rope_theta"] == 10000.0
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name
    assert misfits(loaded.config, info) == []
    assert json.loads((folder / "training.json").read_text())["num_steps"] == 6


def test_an_eagle3_head_begins_with_the_targets_output(checkpoint: Path, tmp_path: Path) -> None:
    """Rows of the tokens that it can draft, and the norm that they are used to."""
    said = texts(read_model_info(checkpoint).vocab_size)
    # So small a rate that nothing is learned.
    plan = replace(PLAN, num_steps=1, peak_lr=1e-12)
    head = train_head(eagle3(checkpoint), checkpoint, said, plan, tmp_path)
    assert isinstance(head, FeatureHead)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    output = model.get_output_embeddings().weight
    tokens = vocabulary_of(head)
    assert len(tokens.unique()) == 50
    torch.testing.assert_close(head.lm_head.weight, output[tokens], atol=1e-6, rtol=0)
    torch.testing.assert_close(head.norm.weight, model.model.norm.weight, atol=1e-4, rtol=0)


def test_a_p_eagle_drafter_begins_with_the_targets_embedding(
    checkpoint: Path, tmp_path: Path
) -> None:
    said = texts(read_model_info(checkpoint).vocab_size)
    plan = replace(PLAN, num_steps=1, peak_lr=1e-12)
    head = train_head(p_eagle(checkpoint), checkpoint, said, plan, tmp_path)
    assert isinstance(head, FeatureHead)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(head.embed_tokens.weight, table, atol=1e-6, rtol=0)


def test_the_learning_rate_rises_and_falls() -> None:
    plan = HeadPlan(num_steps=100, warmup_fraction=0.1)
    factors = [plan.lr_factor(step) for step in range(100)]
    assert max(factors) == pytest.approx(1.0, abs=0.06)
    assert factors.index(max(factors)) in {9, 10}
    assert factors[0] < 0.1 > factors[-1]
    assert math.isclose(factors[54], 0.505, abs_tol=0.01)


def test_texts_go_on_behind_half_a_line(tmp_path: Path) -> None:
    said = texts(50, 3)
    folder = TextFolder(tmp_path, {"model": "demo", "seed": 1})
    assert not folder.done()
    folder.add(1, said[1:2])
    folder.add(0, said[:1])
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"tokens": [1, 2')
    again = TextFolder(tmp_path, {"model": "demo", "seed": 1})
    assert again.done() == {0, 1}
    again.add(2, said[2:])
    assert read_texts(tmp_path) == said, "in the order of their prompts"


def test_texts_of_another_target_are_not_mixed_in(tmp_path: Path) -> None:
    TextFolder(tmp_path, {"model": "demo", "seed": 1})
    with pytest.raises(ConfigError, match="model is 'demo', not 'other'"):
        TextFolder(tmp_path, {"model": "other", "seed": 1})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ('{"tokens": [1]}\n', "line 1"),
        ('{"prompt": 0, "tokens": [1, 2], "answers": [[1, 3]]}\n', "line 1.*no parts of 2 tokens"),
        ('{"prompt": 0, "tokens": [1, 2], "answers": []}\n', "line 1"),
        ("x\n", "line 1"),
    ],
)
def test_a_folder_without_texts_says_so(tmp_path: Path, content: str | None, named: str) -> None:
    if content is not None:
        (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=named):
        read_texts(tmp_path)


def test_texts_are_cut_at_the_window_and_filled_up() -> None:
    texts = [DistilledText((5, 6, 7, 8), ((0, 1), (2, 4))), DistilledText((9, 4), ((1, 2),))]
    tokens, said = text_batch(texts, 3)
    assert tokens.tolist() == [[5, 6, 7], [9, 4, 0]]
    assert said.tolist() == [[True, False, True], [False, True, False]]
