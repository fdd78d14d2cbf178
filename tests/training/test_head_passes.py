"""Training passes see what drafting sees, and train on the rows and for the ends they should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from draftline.models.heads.checkpoint_kind import CheckpointKind
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import feature_head_config
from draftline.training.heads.feature_passes import (
    ContextReplacement,
    LossWeights,
    PassPlan,
    begin_vocabulary,
    drafting_passes,
    head_loss,
    is_aligned,
    pass_mask,
    text_rows,
    train_passes,
)
from draftline.training.heads.target import TextBatch
from support.fakes.drafted_keys import DraftedKeys
from support.inputs import head_checkpoints as published
from torch import nn
from torch.nn import functional

ROWS = 6
SHAPES = {"eagle": published.eagle(), "griffin": published.griffin(), "fspad": published.fspad()}


def head(kind: str) -> FeatureHead:
    shapes = SHAPES[kind]
    made = FeatureHead(feature_head_config(CheckpointKind(kind), shapes, published.LLAMA))
    made.load_state_dict(published.tensors(shapes))
    return made


@pytest.mark.parametrize("kind", SHAPES)
def test_a_row_of_pass_n_is_the_nth_draft_behind_the_targets_features(kind: str) -> None:
    """Training shows a head the very context that it has in its n-th step of drafting."""
    drafter = head(kind)
    rng = torch.Generator().manual_seed(1)
    embeddings, features = torch.randn(2, ROWS, published.HIDDEN, generator=rng).unbind(0)
    rows = torch.arange(ROWS)
    streams, passes = [features], []
    for _ in range(3):
        context = ContextReplacement(
            [drafter.keys_values(embeddings, one, rows) for one in streams[:-1]]
        )
        passes.append(drafter(embeddings, streams[-1], rows, context))
        streams.append(torch.cat([features[:1], passes[-1].regress[:-1]]))
    for known in range(1, ROWS - 2):
        keys, state = DraftedKeys(), features[:known]
        for row in range(known):
            part = slice(row, row + 1)
            output = drafter(embeddings[part], features[part], rows[part], keys)
        for depth in (1, 2):
            row = known - 1 + depth
            part = slice(row, row + 1)
            output = drafter(embeddings[part], output.regress, rows[part], keys)
            torch.testing.assert_close(
                passes[depth].predict[part], output.predict, atol=1e-5, rtol=1e-4
            )
        assert len(state) == known


def test_context_that_does_not_exist_has_no_share() -> None:
    """With a factor of 0 before the softmax it would have one: values beyond must not matter."""
    rng = torch.Generator().manual_seed(2)
    queries, keys, values = torch.randn(3, ROWS, 2, 8, generator=rng).unbind(0)
    first = ContextReplacement([(keys, values)])(0, queries, keys, values)
    changed = values.clone()
    changed[3:] = 1e6
    second = ContextReplacement([(keys, changed)])(0, queries, keys, values)
    # Row r sees the first stream up to row r - 1.
    assert torch.equal(first[:4], second[:4])
    assert (first[4:] - second[4:]).abs().min() > 0


def test_rows_count_whose_drafted_context_was_right() -> None:
    answers = torch.tensor([True] * 5)
    first = torch.tensor([True, False, True, True, True])
    second = torch.tensor([True, True, False, True, True])
    assert pass_mask([], answers).tolist() == [True] * 5
    assert pass_mask([first], answers).tolist() == [False, True, False, True, True]
    # Row t needs pass 2 at row t - 1 and pass 1 at row t - 2.
    assert pass_mask([first, second], answers).tolist() == [False, False, True, False, True]
    assert pass_mask([first, second], ~answers).tolist() == [False] * 5


def test_the_released_codes_mask_is_a_row_later() -> None:
    """M_2 = B_1 and M_3[t] = M_2[t - 1] B_2[t], without its wrap to the first row."""
    answers = torch.ones(5, dtype=torch.bool)
    first, second = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    assert pass_mask([first], answers, "code").tolist() == first.tolist()
    expected = [False, *(first[:-1] & second[1:]).tolist()]
    assert pass_mask([first, second], answers, "code").tolist() == expected


def test_aligned_is_among_the_best() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.9, 0.5, 0.7, 0.1]])
    tokens = torch.tensor([2, 1])
    assert is_aligned(logits, tokens, 1).tolist() == [False, False]
    assert is_aligned(logits, tokens, 2).tolist() == [True, False]
    assert is_aligned(logits, tokens, 3).tolist() == [True, True]


def test_the_loss_has_three_parts() -> None:
    regress, features = torch.zeros(1, 3, 2), torch.full((1, 3, 2), 2.0)
    draft, tokens = torch.zeros(1, 3, 4), torch.tensor([[3, 0, 1]])
    draft[..., 3] = 1.0
    target = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(1, 3, 4)
    mask = torch.tensor([[True, False, True]])

    def loss(feature: float, token: float, best: float, count: int = 2, **forms: bool) -> float:
        weights = LossWeights(feature, token, best, count, **forms)
        return head_loss(
            regress, features, draft, target, tokens=tokens, mask=mask, weights=weights
        ).item()

    assert loss(1, 0, 0) == pytest.approx(1.5)
    assert loss(1, 0, 0, is_l1=True) == pytest.approx(2.0)
    all_of_it = math.log(3 + math.e)
    assert loss(0, 1, 0) == pytest.approx(all_of_it - 0.125)
    assert loss(0, 1, 0, is_one_hot=True) == pytest.approx(all_of_it - 0.5), "tokens 3 and 1"
    assert loss(0, 0, 1) == pytest.approx(0.75 * all_of_it)
    assert loss(0, 0, 1, count=9) == pytest.approx(loss(0, 1, 0)), "the vocabulary has four"
    assert loss(1, 1, 1) == pytest.approx(1.5 - 0.125 + 1.75 * all_of_it)
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    weights = LossWeights(num_best=2)
    none = head_loss(regress, features, draft, target, tokens=tokens, mask=nothing, weights=weights)
    assert none.item() == 0.0


def test_the_loss_on_best_tokens_begins_with_its_part_of_the_run() -> None:
    plan = PassPlan(best_from=1 / 3)
    assert plan.weights_at(0.3).best_tokens == 0.0
    assert plan.weights_at(0.34) == plan.weights


def target() -> tuple[nn.Embedding, nn.Linear, TextBatch]:
    """A target whose features are a map of the last two tokens, and the texts that it says."""
    rng = torch.Generator().manual_seed(4)
    embed, lm_head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
    embed.weight.data = torch.randn(40, 16, generator=rng)
    lm_head.weight.data = torch.randn(40, 16, generator=rng)
    mix = torch.randn(16, 16, generator=rng) / 4
    tokens = torch.randint(0, 40, (8, 24), generator=rng)
    features = torch.zeros(8, 24, 16)
    with torch.no_grad():
        for place in range(24):
            before = embed(tokens[:, max(place - 1, 0)])
            features[:, place] = torch.tanh(embed(tokens[:, place]) + 0.5 * before) @ mix
            if 3 <= place < 23:
                tokens[:, place + 1] = lm_head(features[:, place]).argmax(-1)
    answers = torch.ones_like(tokens, dtype=torch.bool)
    answers[:, :4] = False
    return embed, lm_head, TextBatch(tokens, features, answers, features)


@pytest.mark.parametrize(
    ("kind", "num_aligned"), [pytest.param("eagle", 0, marks=pytest.mark.full), ("griffin", 3)]
)
def test_heads_learn_all_passes(kind: str, num_aligned: int) -> None:
    embed, lm_head, batch = target()
    drafter = head(kind)
    plan = PassPlan(num_passes=3, num_aligned=num_aligned)
    own = [param for name, param in drafter.named_parameters() if "embed" not in name]
    optimizer = torch.optim.AdamW(own, lr=3e-3)
    reports = []
    for _ in range(150):
        optimizer.zero_grad()
        reports.append(train_passes(drafter, embed, lm_head, batch, plan))
        optimizer.step()
    for first, last in zip(reports[0], reports[-1], strict=True):
        assert last.loss < 0.6 * first.loss or first.trained == 0
        assert first.accuracy < 0.2
        assert last.accuracy > 0.75
    if num_aligned:
        assert reports[-1][0].trained == 1.0
        # More rows count once the head is mostly right.
        assert reports[0][1].trained < reports[-1][1].trained
    else:
        assert all(report.trained == 1.0 for report in reports[-1])
    assert embed.weight.grad is None


def test_a_small_vocabulary_learns_as_if_the_target_had_no_other_tokens() -> None:
    embed, lm_head, batch = target()
    kept = torch.arange(0, 40, 3)
    small_config = replace(
        head("griffin").config, draft_vocab_size=len(kept), has_target_rows=True, has_token_map=True
    )
    small, whole = FeatureHead(small_config), head("griffin")
    small.load_state_dict(whole.state_dict(), strict=False)
    begin_vocabulary(small, kept, lm_head.weight)
    plan = PassPlan(num_passes=3, num_aligned=10)
    found = train_passes(small, embed, lm_head, batch, plan)

    only = nn.Linear(16, 40)
    only.weight.data, only.bias.data = lm_head.weight.data, torch.full((40,), -1e4)
    only.bias.data[kept] = 0.0
    answers = batch.answers & torch.isin(batch.tokens, kept)
    assert 0 < answers.sum() < batch.answers.sum()
    expected = train_passes(whole, embed, only, batch._replace(answers=answers), plan)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=1e-4)
    assert [one.accuracy for one in found] == [one.accuracy for one in expected]
    gradients = dict(whole.named_parameters())
    for name, parameter in small.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-5, rtol=1e-3)


def test_noise_is_read_and_not_learned() -> None:
    """Features that are moved a little stand for the target's own, and so do their logits."""
    embed, lm_head, batch = target()
    noisy = batch._replace(features=batch.features + torch.randn_like(batch.features))
    plan = PassPlan(num_passes=1, num_aligned=0, weights=LossWeights(1.0, 0.0, 0.0))
    drafter = head("eagle")
    [report] = train_passes(drafter, embed, lm_head, noisy, plan)
    rows = text_rows(embed, noisy)
    [output] = drafting_passes(drafter, rows, 1)
    mask = rows.answers
    expected = functional.smooth_l1_loss(output.regress[mask], batch.features[:, 1:-1][mask])
    assert report.loss == pytest.approx(expected.item())
    wanted = lm_head(batch.features[:, 1:-1]).argmax(-1)
    is_right = lm_head(output.predict).argmax(-1) == wanted
    assert report.accuracy == pytest.approx(is_right[mask].float().mean().item())


def test_a_staged_run_begins_with_one_pass() -> None:
    plan = PassPlan(num_passes=3, is_staged=True)
    assert [plan.passes_at(step / 9) for step in range(10)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert PassPlan(num_passes=3).passes_at(0.0) == 3
    embed, lm_head, batch = target()
    assert len(train_passes(head("griffin"), embed, lm_head, batch, plan, done=0.5)) == 2
