"""EAGLE-3 trains on what its drafter sees, on tokens that it can draft, and loads again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftline.models.heads.checkpoint_kind import CheckpointKind, checkpoint_kind
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.head_tensors import HeadTensors
from draftline.models.heads.load_head import load_head
from draftline.training.heads.distilled_texts import DistilledText
from draftline.training.heads.export import export_head
from draftline.training.heads.feature_passes import (
    PASS_DECAY,
    begin_vocabulary,
    depth_acceptance,
    frequent_tokens,
    train_as_tested,
    vocabulary_of,
)
from draftline.training.heads.target import TextBatch
from support.inputs.head_drafts import drafted_behind
from torch import Tensor, nn

TEXTS, LENGTH, HIDDEN, VOCAB, PASSES = 3, 12, 16, 40, 3
# Tokens that the small vocabulary has.
KEPT = torch.tensor([0, 3, 4, 8, 9, 17, 20, 26, 31, 39])


def parts(*, is_small: bool = True, norm_output: bool = False) -> tuple[
    FeatureHead, nn.Embedding, nn.Linear, TextBatch
]:  # fmt: skip
    torch.manual_seed(5)
    head = FeatureHead(
        FeatureHeadConfig(
            fusion="pair",
            hidden_size=HIDDEN,
            intermediate_size=24,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=VOCAB,
            num_features=3,
            feature_size=HIDDEN,
            feature_layers=(-1, 1, 3),
            norm_output=norm_output,
            draft_vocab_size=len(KEPT) if is_small else VOCAB,
            has_token_map=is_small,
        )
    )
    embed = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    begin_vocabulary(head, KEPT if is_small else torch.arange(VOCAB), lm_head.weight)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    states = 4 * torch.randn(TEXTS, LENGTH, HIDDEN)
    features = torch.randn(TEXTS, LENGTH, 3 * HIDDEN)
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    return head, embed, lm_head, TextBatch(tokens, features, answers, states)


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("is_small", [True, False])
def test_gradients_are_those_of_drafts_made_one_by_one(
    *, is_small: bool, norm_output: bool
) -> None:
    """Rows that have a past of PASSES - 1 rows; the loss goes back through all earlier drafts."""
    head, embed, lm_head, batch = parts(is_small=is_small, norm_output=norm_output)
    reports = train_as_tested(head, embed, lm_head, batch, PASSES)
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    kept = vocabulary_of(head)
    terms: list[list[Tensor]] = [[] for _ in range(PASSES)]
    for text in range(TEXTS):
        for row in range(LENGTH - 2):
            count = min(PASSES, LENGTH - 2 - row)
            drafts = drafted_behind(head, embed, batch, text=text, row=row, count=count)
            for index, predict in enumerate(drafts):
                place = row + index
                logits = lm_head(batch.states[text, place + 1])
                if not batch.answers[text, place + 2] or batch.tokens[text, place + 2] not in kept:
                    continue
                target_probs = logits[kept].softmax(-1)
                terms[index].append(-(target_probs * head.lm_head(predict).log_softmax(-1)).sum())
    losses = [torch.stack(own).mean() for own in terms]
    sum(PASS_DECAY**index * loss for index, loss in enumerate(losses)).backward()
    assert [report.loss for report in reports] == pytest.approx([one.item() for one in losses])
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert (reports[0].trained == 1.0) is not is_small


def test_a_small_vocabulary_has_the_tokens_that_are_said_most() -> None:
    texts = [
        DistilledText((9, 9, 9, 5, 2, 2, 7), ((3, 7),)),
        DistilledText((1, 7, 7, 5, 3), ((1, 5),)),
    ]
    # Behind the prompts: 7 three times, 2 and 5 twice, 3 once.
    assert frequent_tokens(texts, 12, 3).tolist() == [2, 5, 7]
    assert frequent_tokens(texts, 12, 4).tolist() == [2, 3, 5, 7]
    assert frequent_tokens(texts, 12, 6).tolist() == [0, 1, 2, 3, 5, 7]


def test_drafts_are_counted_as_tokens_of_the_target() -> None:
    """A head whose vocabulary lacks the right token is wrong there, whatever it says."""
    head, embed, lm_head, batch = parts()
    with torch.no_grad():
        for text in range(TEXTS):
            for row in range(LENGTH - 2):
                [draft] = drafted_behind(head, embed, batch, text=text, row=row, count=1)
                batch.tokens[text, row + 2] = KEPT[head.lm_head(draft).argmax()]
        batch.tokens[0, 6] = 1
    first, *_ = depth_acceptance(head, embed, lm_head, batch, 2)
    assert first[0] == int(batch.answers[:, 2:].sum())
    # Another token changes what is read with the next state, and so the draft behind it.
    assert first[0] - 2 <= first[1] <= first[0] - 1


@pytest.mark.parametrize("is_small", [True, False])
def test_an_exported_head_has_the_published_names(tmp_path: Path, *, is_small: bool) -> None:
    head, *_ = parts(is_small=is_small)
    export_head(head, tmp_path, {"architectures": ["LlamaForCausalLMEagle3"]}, {})
    tensors = HeadTensors(tmp_path)
    assert checkpoint_kind(tensors.shapes, {}) is CheckpointKind.EAGLE3
    loaded = load_head(tmp_path)
    assert isinstance(loaded, FeatureHead)
    config = loaded.config
    assert (config.feature_layers, config.num_features) == ((-1, 1, 3), 3)
    assert (config.draft_vocab_size, config.has_token_map) == (head.lm_head.out_features, is_small)
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name
    if is_small:
        assert vocabulary_of(loaded).tolist() == KEPT.tolist()
        is_drafted = dict(tensors.read())["t2d"]
        assert is_drafted.nonzero().flatten().tolist() == KEPT.tolist()
