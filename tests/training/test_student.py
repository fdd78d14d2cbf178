"""A student learns its target's distribution, step by step as its formulas say."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.models.layers.model_slice import load_whole_model
from draftline.models.load.model_info import read_model_info
from draftline.training.heads import student as student_module
from draftline.training.heads import trainer
from draftline.training.heads.distilled_texts import DistilledText, text_batch
from draftline.training.heads.export import export_student
from draftline.training.heads.learning_rate import LearningRate
from draftline.training.heads.student import (
    Divergence,
    Student,
    StudentConfig,
    chain_acceptance,
    divergences,
    train_student,
)
from draftline.training.heads.target import Target, TextBatch
from draftline.training.heads.trainer import HeadRun, read_log, read_losses, train_head
from support.inputs.quantized_checkpoints import FORMATS, save_pair
from support.inputs.tiny_heads import PLAN, student, texts, uneven_texts
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

TEXTS = texts(VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def without_layers(model: Any, layers: tuple[int, ...]) -> Any:
    """A transformers model with these of its layers alone."""
    kept = deepcopy(model)
    kept.model.layers = nn.ModuleList(kept.model.layers[layer] for layer in layers)
    kept.config.num_hidden_layers = len(layers)
    return kept


def batch_of(distilled: list[DistilledText], window: int = 12) -> TextBatch:
    """Texts without a target."""
    tokens, answers = text_batch(distilled, window)
    return TextBatch(tokens, torch.zeros(()), answers, torch.zeros(()))


@pytest.mark.parametrize("kind", ["llama", "qwen2_windowed", "gemma3"])
def test_a_student_of_layers_begins_with_their_weights(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_model(kind, tmp_path)
    begun = Student(StudentConfig(folder=str(folder), layers=(0, 3), vocab_size=VOCAB_SIZE))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in begun.model.named_parameters():
        stored = name.replace("layers.1.", "layers.3.")
        assert torch.equal(parameter, model.get_parameter(stored)), name
    tied = begun.model.lm_head.weight is begun.model.model.embed_tokens.weight
    assert tied is model.config.tie_word_embeddings
    ids = torch.tensor([TEXTS[0].tokens])
    if kind == "llama":
        expected = without_layers(model, (0, 3))(ids, use_cache=False).logits
        torch.testing.assert_close(begun.logits(begun(ids)), expected)
    else:
        # One layer of each kind of attention.
        types = model.config.layer_types
        assert begun.model.config.layer_types == [types[0], types[3]]
        assert types[0] != types[3]


@pytest.mark.parametrize("kind", ["forward", "reverse", "both"])
def test_one_step_is_that_of_its_formulas(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Divergence
) -> None:
    """The divergence over whole vocabularies of rows before answers, then AdamW."""
    # Of nine rows, four at a time.
    monkeypatch.setattr(student_module, "MAX_LOGITS", 4 * VOCAB_SIZE)
    plan = replace(
        PLAN, num_steps=1, texts_per_step=1, rate=LearningRate(peak=1e-3, warmup=0.5), noise=0.0,
        eps=1e-2, clip=100.0, divergence=kind,
    )  # fmt: skip
    stepped = train_head(student(checkpoint), checkpoint, TEXTS, plan, tmp_path)
    [text] = [TEXTS[index] for index in np.random.default_rng((0, 0)).permutation(8)[:1]]
    ids = torch.tensor([text.tokens[:12]])
    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    begun = without_layers(target, (0, 2))
    # Row t predicts token t + 1; the target said those from 3 on.
    with torch.no_grad():
        p = target(ids, use_cache=False).logits[0, 2:11].softmax(-1)
    q = begun(ids, use_cache=False).logits[0, 2:11].softmax(-1)
    forward, reverse = (p * (p / q).log()).sum(-1).mean(), (q * (q / p).log()).sum(-1).mean()
    loss = {"forward": forward, "reverse": reverse, "both": (forward + reverse) / 2}[kind]
    loss.backward()
    assert read_losses(tmp_path) == pytest.approx([loss.item()], rel=1e-5)
    for name, parameter in begun.named_parameters():
        # The first step of AdamW, whose weight decay is 0.01.
        moved = parameter.grad / (parameter.grad.abs() + 1e-2)
        expected = parameter * (1 - 1e-3 * 0.01) - 1e-3 * moved
        found = stepped.get_parameter(f"model.{name}")
        torch.testing.assert_close(found, expected, atol=5e-7, rtol=0)


def test_divergences_of_two_tokens() -> None:
    p, q = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log()
    forward = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    reverse = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert divergences(q, p, "forward").tolist() == pytest.approx([forward])
    assert divergences(q, p, "reverse").tolist() == pytest.approx([reverse])
    assert divergences(q, p, "both").tolist() == pytest.approx([(forward + reverse) / 2])


def test_a_text_without_answers_has_no_loss(checkpoint: Path) -> None:
    target = Target(checkpoint, torch.device("cpu"))
    begun = Student(student(checkpoint))
    batch = target.batch([DistilledText((5, 6, 7), ((0, 1),))], 12)
    assert train_student(begun, target.lm_head, batch, "forward") == 0.0
    # Other processes of the run have gradients, which are averaged with these.
    assert all(not one.grad.any() for one in begun.parameters() if one.grad is not None)
    assert begun.model.lm_head.weight.grad is not None
    assert begun.model.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("rows", [VOCAB_SIZE + 7, VOCAB_SIZE - 7])
def test_a_student_with_more_or_fewer_rows_than_its_target(tmp_path: Path, rows: int) -> None:
    """More are cut off; of a target with more the distribution over the student's is learned."""
    folder = save_tiny_model("llama", tmp_path / "target")
    other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other.resize_token_embeddings(rows)
    other.save_pretrained(tmp_path / "student")
    kept = min(rows, VOCAB_SIZE)
    begun = Student(StudentConfig(folder=str(tmp_path / "student"), vocab_size=kept))
    weight = begun.model.lm_head.weight
    assert torch.equal(weight, other.lm_head.weight[:kept])
    assert weight is begun.model.model.embed_tokens.weight
    assert begun.model.config.vocab_size == kept
    target = Target(folder, torch.device("cpu"))
    batch = target.batch([DistilledText(tuple(range(12)), ((3, 12),))], 12)
    loss = train_student(begun, target.lm_head, batch, "forward")
    # Their weights are the same, and so are their distributions over the rows that both have.
    assert loss == pytest.approx(0.0, abs=1e-6)


def test_acceptance_is_that_of_greedy_chains(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains that the student says token by token, each from a prefix of a text."""
    monkeypatch.setattr(student_module, "MAX_LOGITS", 4 * VOCAB_SIZE)
    begun, rng = Student(student(checkpoint)), np.random.default_rng(0)
    distilled: list[DistilledText] = []
    for text in uneven_texts(VOCAB_SIZE)[:8]:
        # The student's own tokens, and sometimes another one, in one answer or in two.
        tokens = list(text.tokens[:3])
        while len(tokens) < 12:
            tokens.append(int(rng.integers(VOCAB_SIZE)))
            tokens += chain(begun, tokens, int(rng.integers(5)))
        answers = ((3, 12),) if len(distilled) % 2 else ((3, 6), (8, 11))
        distilled.append(DistilledText(tuple(tokens[:12]), answers))
    distilled.append(DistilledText((4, 5), ((1, 2),)))
    wanted = np.zeros((6, 2), dtype=int)
    for text in distilled:
        own = [*text.answer_mask(), *[False] * 6]
        for row in range(len(text.tokens) - 1):
            drafts = chain(begun, text.tokens[: row + 1], 6)
            for depth, draft in enumerate(drafts):
                if not own[row + 1 + depth]:
                    break
                wanted[depth, 0] += 1
                if draft != text.tokens[row + 1 + depth]:
                    break
                wanted[depth, 1] += 1
    assert chain_acceptance(begun, batch_of(distilled), 6) == [
        tuple(row) for row in wanted.tolist()
    ]
    assert wanted[2, 1] > 0, "some chains are three tokens long"


@torch.no_grad()
def chain(begun: Student, tokens: Any, count: int) -> list[int]:
    ids = list(tokens)
    for _ in range(count):
        ids.append(int(begun.logits(begun(torch.tensor([ids])))[0, -1].argmax()))
    return ids[len(tokens) :]


class Killed(Exception):
    """What ends a run in the middle."""


def test_a_killed_run_goes_on_as_if_it_had_not_been(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = student(checkpoint)
    whole = train_head(config, checkpoint, TEXTS, PLAN, tmp_path / "whole")
    texts_of = trainer._texts_of

    def until_killed(all_texts, plan, step, accelerator):
        if step == 4:
            raise Killed
        return texts_of(all_texts, plan, step, accelerator)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_texts_of", until_killed)
        with pytest.raises(Killed):
            train_head(config, checkpoint, TEXTS, PLAN, tmp_path / "killed")
    again = train_head(config, checkpoint, TEXTS, PLAN, tmp_path / "killed")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert [row[0] for row in read_log(tmp_path / "killed")] == [3, 6]
    assert list(read_log(tmp_path / "whole")) == list(read_log(tmp_path / "killed"))
    assert read_losses(tmp_path / "whole") == read_losses(tmp_path / "killed")
    with pytest.raises(ConfigError, match="run_dir"):
        train_head(replace(config, layers=(0, 1)), checkpoint, TEXTS, PLAN, tmp_path / "killed")


def test_states_on_disk_teach_the_same(checkpoint: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, num_steps=12)
    train_head(student(checkpoint), checkpoint, TEXTS, plan, tmp_path / "computed")
    kept = replace(plan, kept_bytes=2**20)
    train_head(student(checkpoint), checkpoint, TEXTS, kept, tmp_path / "kept")
    losses = [read_losses(tmp_path / name) for name in ("computed", "kept")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2), "but for 16 bits"


def test_a_step_in_bfloat16_has_float32_gradients(checkpoint: Path) -> None:
    target = Target(checkpoint, torch.device("cpu"))
    losses = []
    for is_mixed in (False, True):
        begun = Student(student(checkpoint))
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            batch = target.batch(TEXTS[:2], 12)
            losses.append(train_student(begun, target.lm_head, batch, "forward"))
        gradients = [one.grad for one in begun.parameters() if one.grad is not None]
        assert len(gradients) == len(list(begun.parameters()))
        assert {one.dtype for one in gradients} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)


def test_a_distilled_student_says_more_of_its_targets_tokens(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Texts that the target said greedily; those that are held out are the same."""
    target: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rng = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (8, 3), generator=rng)
    distilled = [
        DistilledText(tuple(row), ((3, 14),)) for row in greedy(target, prompts, 11).tolist()
    ] * 5
    plan = replace(
        PLAN, num_steps=30, texts_per_step=4, rate=LearningRate(peak=5e-3), noise=0.0,
        checkpoint_every=30,
    )  # fmt: skip
    before = HeadRun(student(checkpoint), checkpoint, distilled, plan).acceptance()
    train_head(student(checkpoint), checkpoint, distilled, plan, tmp_path)
    losses, [row] = read_losses(tmp_path), list(read_log(tmp_path))
    assert losses[-1] < losses[0] / 2
    assert row[2] > before[0] + 0.2
    assert len(row) == 2 + 6


@torch.no_grad()
def greedy(model: Any, ids: Tensor, count: int) -> Tensor:
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_student_is_written_as_a_models_folder(tmp_path: Path, kind: str) -> None:
    """In bfloat16, with the tokenizer and with what ends an answer; tied weights once."""
    folder = save_tiny_model(kind, tmp_path / "target")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    begun = Student(StudentConfig(folder=str(folder), layers=(1, 2), vocab_size=VOCAB_SIZE))
    output = tmp_path / "student"
    export_student(begun, output, single_bytes(), {"steps": 3})
    written = AutoModelForCausalLM.from_pretrained(output)
    assert (written.dtype, written.config.num_hidden_layers) == (torch.bfloat16, 2)
    assert written.config.tie_word_embeddings is (kind == "llama")
    assert read_model_info(output).eos_token_ids == (1, 7)
    assert (output / "tokenizer.json").is_file()
    assert json.loads((output / "training.json").read_text()) == {"steps": 3}
    source = load_whole_model(folder)
    for name, parameter in load_whole_model(output).named_parameters():
        stored = name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1.")
        assert torch.equal(parameter, source.get_parameter(stored).bfloat16().float()), name


def test_layers_of_a_quantised_target_are_written_as_plain_ones(tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS["gptq 4, act order"], tmp_path)
    begun = Student(StudentConfig(folder=str(pair.quantized), layers=(0, 2), vocab_size=VOCAB_SIZE))
    plain = load_whole_model(pair.plain)
    name = "model.layers.{}.mlp.up_proj.weight"
    expected = plain.get_parameter(name.format(2))
    assert torch.equal(begun.model.get_parameter(name.format(1)), expected)
    export_student(begun, tmp_path / "student", single_bytes(), {})
    assert "quantization_config" not in json.loads((tmp_path / "student/config.json").read_text())
    written = load_whole_model(tmp_path / "student")
    assert torch.equal(written.get_parameter(name.format(1)), expected.bfloat16().float())
