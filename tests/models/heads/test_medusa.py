"""Medusa's heads load from every published layout; formulas are written out once more here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.heads.load_head import load_head, misfits, read_head_checkpoint
from draftline.models.heads.medusa import Medusa
from draftline.models.load.model_info import ModelInfo
from support.inputs import head_checkpoints as published
from support.inputs import medusa_checkpoints as medusa
from torch import Tensor

TARGET = ModelInfo(
    path=Path(), model_type="llama", vocab_size=published.VOCAB, hidden_size=published.HIDDEN,
    num_layers=8, num_kv_heads=1, head_dim=8, max_context_len=4096, eos_token_ids=(),
    bos_token_id=None,
)  # fmt: skip
# What FasterDecoding's files say, whose tensors say otherwise.
CONFIG: dict[str, object] = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}
LAYOUTS = {
    "medusa_lm_head.pt": dict,
    "medusa_lm_head.safetensors": dict,
    "pytorch_model.bin": medusa.in_model_optimizer,
    "model.safetensors": medusa.in_tensorrt,
}


def medusa_of(folder: Path, held: dict[str, Tensor], **config: object) -> Medusa:
    head = load_head(medusa.save_tensors(folder, held, CONFIG | config, "model.safetensors"))
    assert isinstance(head, Medusa)
    return head


def check_same(head: Medusa, expected: dict[str, Tensor]) -> None:
    assert head.state_dict().keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(head.state_dict()[name], tensor), name


@pytest.mark.parametrize("file", LAYOUTS)
def test_each_layout_gives_the_same_heads(tmp_path: Path, file: str) -> None:
    own = medusa.medusa_tensors()
    folder = medusa.save_tensors(tmp_path, LAYOUTS[file](own), CONFIG, file)
    head = load_head(folder)
    assert isinstance(head, Medusa)
    check_same(head, own)
    # Tensors tell, not the config.
    assert (head.config.draft_length, head.config.num_layers) == (3, 2)
    assert (head.config.output, head.config.vocab_size) == ("each", published.VOCAB)
    assert head.config.layers_of(8) == ()
    assert misfits(head.config, TARGET) == []


def test_vllms_layout_gives_the_same_heads(tmp_path: Path) -> None:
    own = medusa.medusa_tensors()
    check_same(medusa_of(tmp_path, medusa.in_vllm(own)), own)


def test_the_heads_own_file_comes_before_the_models(tmp_path: Path) -> None:
    """Medusa-2's folders hold both."""
    own = medusa.medusa_tensors()
    medusa.save_tensors(tmp_path, own, CONFIG, "medusa_lm_head.pt")
    whole = {"model.embed_tokens.weight": torch.ones(4, 2)}
    medusa.save_tensors(tmp_path, whole, CONFIG, "model.safetensors")
    head = load_head(tmp_path)
    assert isinstance(head, Medusa)
    check_same(head, own)


@pytest.mark.parametrize("is_told", [True, False])
def test_outputs_may_be_shared(tmp_path: Path, *, is_told: bool) -> None:
    """One that all share, as vLLM saves it, or the target's."""
    own = medusa.medusa_tensors()
    blocks = {name: one for name, one in own.items() if ".linear." in name}
    shared = {"lm_heads.0.weight": own["0.2.weight"]} if is_told else {}
    saved = {k: v for k, v in medusa.in_vllm(own).items() if k.startswith("blocks.")} | shared
    head = medusa_of(tmp_path, saved, original_lm_head=is_told)
    assert head.config.output == ("one" if is_told else "target")
    expected = blocks | ({"lm_head.weight": own["0.2.weight"]} if is_told else {})
    check_same(head, expected)
    states, other = torch.randn(5, published.HIDDEN), torch.nn.Linear(published.HIDDEN, 7)
    matrix = own["0.2.weight"] if is_told else other.weight
    bias = 0.0 if is_told else other.bias
    torch.testing.assert_close(head.logits(1, states, other), states @ matrix.T + bias)
    assert misfits(head.config, TARGET) == []


def test_heads_are_blocks_and_an_output(tmp_path: Path) -> None:
    own = medusa.medusa_tensors()
    head = medusa_of(tmp_path, own)
    states = torch.randn(5, published.HIDDEN)
    drafts = head.drafts(states)
    assert drafts.shape == (5, 3, published.HIDDEN)
    for index in range(3):
        expected = states
        for layer in range(2):
            weight, bias = (own[f"{index}.{layer}.linear.{part}"] for part in ("weight", "bias"))
            inner = expected @ weight.T + bias
            expected = expected + inner * torch.sigmoid(inner)
        torch.testing.assert_close(drafts[:, index], expected)
        logits = head.logits(index, drafts[:, index], torch.nn.Identity())
        torch.testing.assert_close(logits, expected @ own[f"{index}.2.weight"].T)


def test_biases_are_optional(tmp_path: Path) -> None:
    """As vLLM's files have none (`medusa_fc_bias`)."""
    own = {k: v for k, v in medusa.medusa_tensors().items() if not k.endswith("bias")}
    check_same(medusa_of(tmp_path, medusa.in_vllm(own)), own)


def few(own: dict[str, Tensor], token_map: Tensor) -> dict[str, Tensor]:
    """Outputs of ten tokens."""
    saved = medusa.in_vllm(own) | {"token_map": token_map}
    return {k: v[: medusa.KNOWN] if "lm_heads" in k else v for k, v in saved.items()}


def test_a_smaller_vocabulary_is_told_in_the_targets_ids(tmp_path: Path) -> None:
    ids = torch.arange(3, 33, 3)
    head = medusa_of(
        tmp_path, few(medusa.medusa_tensors(), ids), vocab_size=40, truncated_vocab_size=10
    )
    states = torch.randn(2, published.HIDDEN)
    logits = head.logits(0, states, torch.nn.Identity())
    own = states @ medusa.medusa_tensors()["0.2.weight"][:10].T
    torch.testing.assert_close(logits[:, ids], own)
    assert (logits > -torch.inf).sum() == own.numel()
    assert misfits(head.config, TARGET) == []


@pytest.mark.parametrize(
    ("ids", "config"),
    [(torch.arange(10) * 4 + 4, {"vocab_size": 40}), (torch.zeros(10).long(), {"vocab_size": 40}),
     (torch.arange(10), {})],
)  # fmt: skip
def test_a_wrong_token_map_is_refused(tmp_path: Path, ids: Tensor, config: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="token_map"):
        medusa_of(tmp_path, few(medusa.medusa_tensors(), ids), **config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"1.0.extra.weight": torch.ones(4)}, r"1\.0\.extra\.weight is unknown"),
        ({"0.0.linear.input_scale": torch.ones(1)}, r"0\.0\.linear\.input_scale is unknown"),
        ({"2.2.weight": torch.ones(5, 16)}, r"2\.2\.weight has shape \(5, 16\)"),
        ({"1.1.linear.bias": None}, r"1\.1\.linear\.bias is missing"),
        ({"0.0.linear.weight": None}, r"no matrix 0\.0\.linear\.weight"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_tensors_that_do_not_belong_are_listed(
    tmp_path: Path, change: dict[str, Tensor | None], named: str, prefix: str
) -> None:
    made = {**medusa.medusa_tensors(), **change}
    held = {prefix + name: tensor for name, tensor in made.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=named):
        medusa_of(tmp_path, held)


def test_what_does_not_fit_a_target_is_said(tmp_path: Path) -> None:
    folder = medusa.save_tensors(tmp_path, medusa.medusa_tensors(), CONFIG, "medusa_lm_head.pt")
    config = read_head_checkpoint(folder).config
    assert config is not None
    [width] = misfits(config, replace(TARGET, hidden_size=32))
    assert "features of 16" in width
    [vocabulary] = misfits(config, replace(TARGET, vocab_size=99))
    assert "40 tokens" in vocabulary
