"""P-EAGLE trains on what its drafter sees, as deep as rollouts are kept, and loads again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.models.heads.load_head import load_head
from draftline.models.heads.p_eagle import PEagle, PEagleConfig
from draftline.training.heads.export import export_head
from draftline.training.heads.feature_passes import begin_vocabulary, vocabulary_of
from draftline.training.heads.mask_rows import (
    MaskPlan,
    Rollouts,
    every_rollout,
    mask_acceptance,
    random_rollouts,
    seen_rows,
    train_masks,
)
from draftline.training.heads.target import TextBatch
from support.inputs.head_attention import causal
from torch import Tensor, nn

TEXTS, LENGTH, HIDDEN, VOCAB, DRAFTS = 3, 14, 16, 40, 4
# Tokens that the small vocabulary has.
KEPT = torch.tensor([0, 3, 4, 8, 9, 17, 20, 26, 31, 39])
CONFIG = PEagleConfig(
    fusion="pair", hidden_size=HIDDEN, intermediate_size=24, num_heads=2, num_kv_heads=1,
    head_dim=8, vocab_size=VOCAB, num_layers=2, num_features=3, feature_size=HIDDEN,
    feature_layers=(-1, 1, 3), draft_vocab_size=len(KEPT), has_token_map=True, has_embedding=True,
    mask_token=VOCAB - 2, draft_length=DRAFTS,
)  # fmt: skip
# With the target's embedding, and all of its tokens.
SHARED = replace(CONFIG, has_embedding=False, draft_vocab_size=VOCAB, has_token_map=False)
# The first two texts' answers begin at their third token; the second one's end at its tenth.
SAID = [(3, LENGTH), (3, 10), (6, LENGTH)]


def parts(config: PEagleConfig) -> tuple[PEagle, nn.Embedding, nn.Linear, TextBatch]:
    torch.manual_seed(5)
    head = PEagle(config)
    embed = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    begin_vocabulary(head, KEPT if config.has_token_map else torch.arange(VOCAB), lm_head.weight)
    answers = torch.zeros(TEXTS, LENGTH, dtype=torch.bool)
    for text, (first, end) in enumerate(SAID):
        answers[text, first:end] = True
    states = 4 * torch.randn(TEXTS, LENGTH, HIDDEN)
    features = torch.randn(TEXTS, LENGTH, 3 * HIDDEN)
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    return head, embed, lm_head, TextBatch(tokens, features, answers, states)


def drafted(
    head: PEagle, embed: nn.Module, batch: TextBatch, text: int, row: int, masks: int
) -> Tensor:
    """[hidden_size]: what predicts a draft behind a row, as a drafter that knows the text up to it
    computes it: the row's own, or that of the last of so many masks."""
    own = head.embed_tokens if head.config.has_embedding else embed
    tokens = torch.cat(
        [batch.tokens[text, 1 : row + 2], torch.full((masks,), head.config.mask_token)]
    )
    features = torch.cat([batch.features[text, : row + 1], head.mask_hidden[0].expand(masks, -1)])
    places = torch.arange(len(tokens))
    return head(own(tokens), head.project(features), places, causal).predict[-1]


def said_there(batch: TextBatch, text: int, row: int, draft: int) -> bool:
    """Whether the target said the token of a row's draft, and of all before it."""
    tokens = [row + 2 + before for before in range(draft + 1)]
    return tokens[-1] < LENGTH and all(batch.answers[text, token] for token in tokens)


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["own", "shared"])
def test_gradients_are_those_of_drafts_made_one_by_one(config: PEagleConfig) -> None:
    head, embed, lm_head, batch = parts(config)
    rollouts = Rollouts(
        torch.tensor([[5, 1, 8, 2], [3, 6, 4, 0], [4, 7, 10, 9]]),
        torch.tensor([[3, 3, 2, 1], [3, 1, 1, 0], [3, 2, 1, 0]]),
    )
    losses = train_masks(head, embed, lm_head, batch, rollouts)
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    vocabulary = vocabulary_of(head)
    wanted = [(text, row, 0) for text in range(TEXTS) for row in range(LENGTH - 2)]
    wanted += [
        (text, row, draft)
        for text in range(TEXTS)
        for row, count in zip(rollouts.anchors[text], rollouts.num_masks[text], strict=True)
        for draft in range(1, int(count) + 1)
    ]
    terms: list[list[Tensor]] = [[] for _ in range(DRAFTS)]
    for text, row, draft in wanted:
        target_logits = lm_head(batch.states[text, row + draft + 1])
        is_said = bool(batch.answers[text, row + draft + 2])
        if not is_said or batch.tokens[text, row + draft + 2] not in vocabulary:
            continue
        predict = drafted(head, embed, batch, text, int(row), draft)
        target_probs = target_logits[vocabulary].softmax(-1)
        terms[draft].append(-(target_probs * head.lm_head(predict).log_softmax(-1)).sum())
    means = [torch.stack(own).mean().item() for own in terms]
    assert losses == pytest.approx(means, abs=1e-5)
    torch.stack([term for own in terms for term in own]).mean().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert embed.weight.grad is None
    assert lm_head.weight.grad is None


def test_rows_see_the_text_up_to_theirs_and_their_own_masks() -> None:
    anchors = torch.tensor([[0, 1, 2, 1, 0, 1]])
    depths = torch.tensor([0, 0, 0, 1, 1, 2])
    assert seen_rows(anchors, depths)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_rollouts_are_kept_by_the_share_of_their_depth() -> None:
    """Ten rows that count: seven have a mask, five two, four three; nested, and at random rows."""
    *_, batch = parts(CONFIG)
    answers = torch.ones(1, 16, dtype=torch.bool)
    answers[:, :2] = False
    answers[:, 12:] = False
    one = batch._replace(answers=answers, tokens=torch.zeros(1, 16, dtype=torch.int64))
    plan, seen, deepest = MaskPlan(keep_rate=0.7, least_kept=0.35), set(), set()
    torch.manual_seed(1)
    for _ in range(60):
        rollouts = random_rollouts(one, DRAFTS, plan, torch.rand(1, 16))
        anchors, num_masks = (part[0].tolist() for part in rollouts)
        assert len(set(anchors)) == len(anchors) <= 7
        assert num_masks == sorted(num_masks, reverse=True)
        # The text ends: a rollout stops before what nobody said.
        assert all(masks <= 9 - row for row, masks in zip(anchors, num_masks, strict=True))
        assert sum(masks >= 2 for masks in num_masks) <= 5
        assert sum(masks >= 3 for masks in num_masks) <= 4
        seen |= set(anchors)
        deepest |= {row for row, masks in zip(anchors, num_masks, strict=True) if masks == 3}
    assert seen == set(range(9))
    assert deepest == set(range(7))


def test_every_rollout_goes_on_while_the_target_said_what_follows() -> None:
    *_, batch = parts(CONFIG)
    for stride in (1, 3):
        anchors, num_masks = every_rollout(batch, DRAFTS, stride)
        for text in range(TEXTS):
            found = {
                int(row): int(masks)
                for row, masks in zip(anchors[text], num_masks[text], strict=True)
                if masks
            }
            assert found == {
                row: count
                for row in range(0, LENGTH - 2, stride)
                if (count := sum(said_there(batch, text, row, draft) for draft in range(1, DRAFTS)))
            }


@pytest.mark.parametrize("stride", [1, 4])
def test_drafts_count_behind_accepted_ones(stride: int) -> None:
    head, embed, lm_head, batch = parts(CONFIG)
    with torch.no_grad():
        # The first text goes on behind its fifth row as it is drafted there, for three tokens.
        for draft in range(3):
            said = head.lm_head(drafted(head, embed, batch, 0, 4, draft)).argmax()
            batch.tokens[0, 6 + draft] = KEPT[said]
        expected = [[0, 0] for _ in range(DRAFTS)]
        for text in range(TEXTS):
            for row in range(LENGTH - 2):
                for draft in range(DRAFTS):
                    if not said_there(batch, text, row, draft) or (draft and row % stride):
                        break
                    expected[draft][0] += 1
                    best = KEPT[
                        head.lm_head(drafted(head, embed, batch, text, row, draft)).argmax()
                    ]
                    if best != batch.tokens[text, row + 2 + draft]:
                        break
                    expected[draft][1] += 1
    counts = mask_acceptance(head, embed, lm_head, batch, stride)
    assert [list(count) for count in counts] == expected
    assert counts[2][1] >= 1


@pytest.mark.parametrize("layers", [1, 2])
def test_an_exported_head_is_what_the_reader_of_published_ones_expects(
    tmp_path: Path, layers: int
) -> None:
    head, *_ = parts(replace(CONFIG, num_layers=layers))
    export_head(head, tmp_path, {"architectures": ["LlamaForCausalLMEagle3"]}, {})
    loaded = load_head(tmp_path)
    assert isinstance(loaded, PEagle)
    assert loaded.config == replace(head.config, rope=loaded.config.rope)
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name
