"""In-batch gradient accumulation gives the gradients of the whole, and drafts are counted right."""

from __future__ import annotations

import pytest
import torch
from draftline.models.heads.spec_former import SpecFormer, SpecFormerConfig
from draftline.training.heads.draft_positions import (
    counted_rows,
    position_acceptance,
    random_rows,
    train_positions,
)
from draftline.training.heads.target import TextBatch
from torch import Tensor, nn
from torch.nn import functional

TEXTS, LENGTH, HIDDEN, VOCAB, DRAFTS = 3, 12, 16, 40, 4


def parts() -> tuple[SpecFormer, nn.Module, nn.Module, TextBatch]:
    torch.manual_seed(6)
    drafter = SpecFormer(SpecFormerConfig(HIDDEN, 24, 2, 1, 8, DRAFTS))
    norm, lm_head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    norm.requires_grad_(False)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    features = torch.randn(TEXTS, LENGTH, 4 * HIDDEN)
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    batch = TextBatch(tokens, features, answers, features[..., -HIDDEN:])
    return drafter, norm, lm_head, batch


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    heads = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        *heads, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)


@pytest.mark.parametrize("most_rows", [LENGTH, 4])
def test_gradients_are_those_of_all_logits_at_once(most_rows: int) -> None:
    """Of all rows, or of random ones as if the others did not count."""
    drafter, norm, lm_head, batch = parts()
    counted = counted_rows(batch, DRAFTS)
    rows = random_rows(counted, most_rows, torch.rand(TEXTS, LENGTH))
    assert rows.sum(dim=1).tolist() == counted.sum(dim=1).clamp(max=most_rows).tolist()
    assert not (rows & ~counted).any()
    losses = train_positions(drafter, norm, lm_head, batch, rows)
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    positions = torch.arange(LENGTH).expand(TEXTS, LENGTH)
    context = drafter.context(drafter.project(batch.features), positions, causal)
    logits = lm_head(norm(drafter.drafts(context)))
    expected = []
    for draft in range(DRAFTS):
        # Row t's draft i is token t + 2 + i.
        known = LENGTH - 2 - draft
        mask = batch.answers[:, 2 + draft :] & rows[:, :known]
        said, tokens = logits[:, :known, draft][mask], batch.tokens[:, 2 + draft :][mask]
        expected.append(functional.cross_entropy(said, tokens))
    torch.stack(expected).mean().backward()
    assert torch.allclose(torch.tensor(losses), torch.stack(expected).detach(), atol=1e-6)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-5)
    assert lm_head.weight.grad is None


def test_drafts_count_behind_accepted_ones() -> None:
    drafter, norm, lm_head, batch = parts()
    positions = torch.arange(LENGTH).expand(TEXTS, LENGTH)
    context = drafter.context(drafter.project(batch.features), positions, causal)
    said = lm_head(norm(drafter.drafts(context)))
    best = said.argmax(-1)
    # The first text is what row 4 drafts, but for its last draft.
    batch.tokens[0, 6:9] = best[0, 4, :3]
    batch.tokens[0, 9] = (best[0, 4, 3] + 1) % VOCAB
    expected = [[0, 0] for _ in range(DRAFTS)]
    for text in range(TEXTS):
        for row in range(LENGTH - 1):
            for draft in range(DRAFTS):
                place = row + 2 + draft
                if place >= LENGTH or not batch.answers[text, place]:
                    break
                expected[draft][0] += 1
                if best[text, row, draft] != batch.tokens[text, place]:
                    break
                expected[draft][1] += 1
    counts = position_acceptance(drafter, norm, lm_head, batch)
    assert [list(count) for count in counts] == expected
    assert counts[2][1] >= 1


def test_texts_shorter_than_the_drafts_are_no_error() -> None:
    drafter, norm, lm_head, batch = parts()
    short = TextBatch(*(part[:, :4] for part in batch))
    losses = train_positions(drafter, norm, lm_head, short, counted_rows(short, DRAFTS))
    assert len(losses) == DRAFTS
    assert losses[-1] == 0.0
