"""Heads are trained from texts that a target said, go on after a kill, and load as published."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.models.heads.feature_head import FeatureHead, GuidedFusion
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.head_layer import HeadLayer
from draftline.models.heads.load_head import (
    load_head,
    misfits,
    read_head_checkpoint,
    take_target_rows,
)
from draftline.models.load.model_info import read_model_info
from draftline.training.heads import trainer
from draftline.training.heads.distilled_texts import (
    DistilledText,
    TextFolder,
    read_texts,
    text_batch,
)
from draftline.training.heads.export import export_head
from draftline.training.heads.feature_passes import LossWeights, PassPlan, vocabulary_of
from draftline.training.heads.learning_rate import LearningRate
from draftline.training.heads.trainer import read_log, read_losses, train_head
from support.fakes.recorded_progress import RecordedProgress
from support.inputs.tiny_heads import CONFIGS, PLAN, eagle3, griffin, p_eagle, texts
from support.tools.tiny_models import save_tiny_model
from torch import Tensor, nn
from torch.nn import functional
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
    config, distilled = CONFIGS[kind](checkpoint), texts(read_model_info(checkpoint).vocab_size)
    whole = train_head(config, checkpoint, distilled, PLAN, tmp_path / "whole")
    texts_of = trainer._texts_of

    def until_killed(all_texts, plan, step, accelerator):
        if step == 4:
            raise Killed
        return texts_of(all_texts, plan, step, accelerator)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_texts_of", until_killed)
        with pytest.raises(Killed):
            train_head(config, checkpoint, distilled, PLAN, tmp_path / "killed")
    progress = RecordedProgress()
    again = train_head(config, checkpoint, distilled, PLAN, tmp_path / "killed", progress=progress)
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
    distilled = texts(read_model_info(checkpoint).vocab_size)
    train_head(griffin(checkpoint), checkpoint, distilled, PLAN, tmp_path)
    other = replace(griffin(checkpoint), intermediate_size=28)
    with pytest.raises(ConfigError, match="run_dir"):
        train_head(other, checkpoint, distilled, PLAN, tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_exported_head_loads_and_fits_its_target(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    info = read_model_info(checkpoint)
    distilled = texts(info.vocab_size)
    head = train_head(CONFIGS[kind](checkpoint), checkpoint, distilled, PLAN, tmp_path / "run")
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
    distilled = texts(read_model_info(checkpoint).vocab_size)
    # So small a rate that nothing is learned.
    plan = replace(PLAN, num_steps=1, rate=LearningRate(peak=1e-12))
    head = train_head(eagle3(checkpoint), checkpoint, distilled, plan, tmp_path)
    assert isinstance(head, FeatureHead)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    output = model.get_output_embeddings().weight
    tokens = vocabulary_of(head)
    assert len(tokens.unique()) == 50
    torch.testing.assert_close(head.lm_head.weight, output[tokens], atol=1e-6, rtol=0)
    torch.testing.assert_close(head.norm.weight, model.model.norm.weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["eagle3", "griffin"])
def test_a_head_may_have_the_targets_rows_of_some_tokens(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    """Its file has none of them, and what loads it reads them off the target's projection."""
    info = read_model_info(checkpoint)
    config = replace(
        CONFIGS[kind](checkpoint), draft_vocab_size=50, has_token_map=True, has_target_rows=True
    )
    assert isinstance(config, FeatureHeadConfig)
    head = train_head(config, checkpoint, texts(info.vocab_size), PLAN, tmp_path / "run")
    assert isinstance(head, FeatureHead)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    output = model.get_output_embeddings()
    rows = output.weight[vocabulary_of(head)]
    assert torch.equal(head.lm_head.weight, rows), "training leaves them"
    export_head(head, tmp_path / "head", {"architectures": [PUBLISHED[kind]]}, {})
    checkpoint_read = read_head_checkpoint(tmp_path / "head")
    assert "lm_head.weight" not in checkpoint_read.tensors.shapes
    loaded = load_head(tmp_path / "head")
    assert loaded.config == replace(config, rope=loaded.config.rope)
    assert misfits(loaded.config, info) == []
    take_target_rows(loaded, output)
    assert isinstance(loaded, FeatureHead)
    assert torch.equal(loaded.lm_head.weight, rows)


@pytest.mark.parametrize("kind", ["griffin", "eagle3", "dflash"])
def test_a_run_may_go_on_from_another_head(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    distilled = texts(read_model_info(checkpoint).vocab_size)
    config = CONFIGS[kind](checkpoint)
    first = train_head(config, checkpoint, distilled, PLAN, tmp_path / "first")
    export_head(first, tmp_path / "head", {"architectures": [PUBLISHED[kind]]}, {})
    initial = load_head(tmp_path / "head")
    still = replace(PLAN, num_steps=1, rate=LearningRate(peak=1e-30))
    same = train_head(
        initial.config, checkpoint, distilled, still, tmp_path / "same", initial=initial
    )
    for name, tensor in initial.state_dict().items():
        assert torch.equal(same.state_dict()[name], tensor), name
    moved = train_head(
        initial.config, checkpoint, distilled, PLAN, tmp_path / "on", initial=initial
    )
    assert any(
        not torch.equal(moved.state_dict()[name], tensor)
        for name, tensor in initial.state_dict().items()
    )


def test_a_p_eagle_drafter_begins_with_the_targets_embedding(
    checkpoint: Path, tmp_path: Path
) -> None:
    distilled = texts(read_model_info(checkpoint).vocab_size)
    plan = replace(PLAN, num_steps=1, rate=LearningRate(peak=1e-12))
    head = train_head(p_eagle(checkpoint), checkpoint, distilled, plan, tmp_path)
    assert isinstance(head, FeatureHead)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(head.embed_tokens.weight, table, atol=1e-6, rtol=0)


def test_the_learning_rate_rises_and_falls() -> None:
    line = LearningRate(peak=2.0, warmup=0.1)
    rates = [line.at(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 + 0.2 * step for step in range(10)])
    assert rates[10:] == pytest.approx([2 * (99.5 - step) / 90 for step in range(10, 100)])
    half = LearningRate(peak=2.0, final=0.5, warmup=0.1, is_cosine=True)
    assert half.at(10, 100) == pytest.approx(2.0, abs=1e-3)
    assert half.at(54, 100) == pytest.approx((half.at(54, 99) + half.at(54, 101)) / 2, abs=1e-3)
    assert half.at(54, 100) == pytest.approx(1.26, abs=0.01), "half way down"
    assert half.at(99, 100) == pytest.approx(0.5, abs=1e-3)
    steps = LearningRate(peak=2.0, warmup_steps=4)
    assert [steps.at(step, 100) for step in range(4)] == pytest.approx([0.25, 0.75, 1.25, 1.75])
    assert steps.at(0, 20) == pytest.approx(2 * 0.5 / 2), "at most a tenth of the run"


def test_one_step_of_the_papers_griffin_is_that_of_its_formulas(
    checkpoint: Path, tmp_path: Path
) -> None:
    """0.1 |R - f| and cross-entropy with the next token, layer norms and biases, AdamW."""
    distilled = texts(read_model_info(checkpoint).vocab_size)
    config = replace(griffin(checkpoint), has_paper_fusion=True)
    weights = LossWeights(0.1, 1.0, 0.0, is_l1=True, is_one_hot=True)
    plan = replace(
        PLAN, num_steps=1, texts_per_step=1, rate=LearningRate(peak=1e-3, warmup=0.5), noise=0.0,
        eps=1e-2, clip=100.0, passes=PassPlan(num_passes=1, num_aligned=0, weights=weights),
    )  # fmt: skip
    begun = train_head(
        config,
        checkpoint,
        distilled,
        replace(plan, rate=LearningRate(peak=1e-30)),
        tmp_path / "begun",
    )
    stepped = train_head(config, checkpoint, distilled, plan, tmp_path / "stepped")
    assert isinstance(begun, FeatureHead)
    begun.zero_grad()
    [text] = [distilled[index] for index in np.random.default_rng((0, 0)).permutation(8)[:1]]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([text.tokens[:12]])
    with torch.no_grad():
        states = model.model(input_ids=ids).last_hidden_state
        embeddings = model.get_input_embeddings()(ids[:, 1:-1])
    fc = begun.fc
    assert isinstance(fc, GuidedFusion)
    fused = functional.linear(torch.cat([embeddings, states[:, :-2]], -1), fc.fc.weight, fc.fc.bias)
    first, second = fc.post_attention_layernorm, fc.mlp["input_layernorm"]
    assert isinstance(first, nn.LayerNorm)
    assert isinstance(second, nn.LayerNorm)
    pair = torch.cat([second(first(fused)), second(embeddings)], -1)
    up, down = fc.mlp["up_proj"], fc.mlp["down_proj"]
    inner = functional.silu(functional.linear(pair, up.weight, up.bias))
    fused = fused + functional.linear(inner, down.weight, down.bias)
    layer = begun.layers[0]
    assert isinstance(layer, HeadLayer)
    places = torch.arange(10).expand(1, 10)
    rotation = begun.rotation(embeddings, places)
    both = layer(fused, embeddings, rotation, causal)
    predict, regress = both.chunk(2, -1)
    answered = torch.arange(2, 12) >= 3
    log_probs = (predict @ model.get_output_embeddings().weight.T).log_softmax(-1)
    right = log_probs[0].gather(-1, ids[0, 2:, None])[answered]
    distance = (regress - states[:, 1:-1]).abs()[0, answered].mean()
    (0.1 * distance - right.mean()).backward()
    for name, parameter in begun.named_parameters():
        assert parameter.grad is not None, name
        # The first step of AdamW, whose weight decay is 0.01.
        moved = parameter.grad / (parameter.grad.abs() + 1e-2)
        expected = parameter * (1 - 1e-3 * 0.01) - 1e-3 * moved
        torch.testing.assert_close(stepped.get_parameter(name), expected, atol=2e-7, rtol=0)


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of rows to themselves and those before."""
    queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2)


def test_texts_go_on_behind_half_a_line(tmp_path: Path) -> None:
    distilled = texts(50, 3)
    folder = TextFolder(tmp_path, {"model": "demo", "seed": 1})
    assert not folder.done()
    folder.add(1, distilled[1:2])
    folder.add(0, distilled[:1])
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"tokens": [1, 2')
    again = TextFolder(tmp_path, {"model": "demo", "seed": 1})
    assert again.done() == {0, 1}
    again.add(2, distilled[2:])
    assert read_texts(tmp_path) == distilled, "in the order of their prompts"
    (tmp_path / "texts.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "texts.jsonl").read_bytes())
    )
    (tmp_path / "texts.jsonl").unlink()
    assert read_texts(tmp_path) == distilled


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
    tokens, distilled = text_batch(texts, 3)
    assert tokens.tolist() == [[5, 6, 7], [9, 4, 0]]
    assert distilled.tolist() == [[True, False, True], [False, True, False]]
