"""Blocks of a training step see what they would see while drafting, and nothing of the future."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draftline.drafters.heads.networks.block_network import BlockAttention
from draftline.drafters.heads.networks.kept_keys import KeptKeys
from draftline.models.heads.dflash import DFlash
from draftline.models.heads.dflash_config import DFlashConfig
from draftline.training.heads.anchored_blocks import (
    Blocks,
    block_acceptance,
    block_states,
    every_block,
    random_blocks,
    train_blocks,
)
from draftline.training.heads.target import TextBatch
from torch import Tensor, nn
from torch.nn import functional

TEXTS, LENGTH, HIDDEN, VOCAB = 3, 14, 16, 40
PLAIN = DFlashConfig(HIDDEN, 24, 2, 1, 8, 4, VOCAB - 1, num_layers=2, num_features=2,
                     feature_size=HIDDEN)  # fmt: skip
CONFIGS = {
    "plain": PLAIN,
    "shifted": replace(PLAIN, is_shifted=True, embedding_scale=2.0, output_multiplier=0.5),
    "causal": replace(PLAIN, causal_layers=(True, True)),
    "sliding": replace(PLAIN, causal_layers=(True, False), windows=(5, 0)),
}


def parts(config: DFlashConfig = PLAIN) -> tuple[DFlash, Tensor, nn.Module, TextBatch]:
    torch.manual_seed(6)
    drafter, embedding = DFlash(config), torch.randn(VOCAB, HIDDEN)
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    answers[1, 9:] = False
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    features = torch.randn(TEXTS, LENGTH, 2 * HIDDEN)
    batch = TextBatch(tokens, features, answers, features[..., HIDDEN:])
    return drafter, embedding, lm_head, batch


def drafted(drafter: DFlash, embedding: Tensor, batch: TextBatch, text: int, place: int) -> Tensor:
    """[block_size, hidden_size]: of the block at a place, as a drafter computes it."""
    kept = KeptKeys(drafter.config.num_layers)
    context = drafter.context(batch.features[text, :place])
    for index, pair in enumerate(drafter.context_keys(context, torch.arange(place))):
        kept.append(index, torch.stack(pair))
    kept.num_rows = place
    tokens = drafter.block(batch.tokens[text, place : place + 1])
    positions = place + torch.arange(drafter.config.block_size)[None]
    embeddings = embedding[tokens] * drafter.config.embedding_scale
    return drafter(embeddings, positions, BlockAttention([kept], drafter.config))[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_block_is_what_a_drafter_computes_there(kind: str) -> None:
    drafter, embedding, _, batch = parts(CONFIGS[kind])
    with torch.no_grad():
        blocks = every_block(batch)
        states = block_states(drafter, embedding, batch, blocks)
        for text in range(TEXTS):
            for place in range(1, LENGTH):
                expected = drafted(drafter, embedding, batch, text, place)
                torch.testing.assert_close(states[text, place], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_see_nothing_from_their_first_token_on(kind: str) -> None:
    """Of the texts behind a place only its token changes the block there, and no other block."""
    drafter, embedding, _, batch = parts(CONFIGS[kind])
    place = 6
    with torch.no_grad():
        before = block_states(drafter, embedding, batch, every_block(batch))
        later = batch._replace(tokens=batch.tokens.clone(), features=batch.features.clone())
        later.tokens[:, place + 1 :] = (later.tokens[:, place + 1 :] + 1) % VOCAB
        later.features[:, place:] += 1.0
        after = block_states(drafter, embedding, later, every_block(batch))
        assert torch.equal(before[:, 1 : place + 1], after[:, 1 : place + 1])
        assert (before[:, place + 1 :] - after[:, place + 1 :]).abs().amin(dim=(-1, 0)).min() > 0
        later.tokens[:, place] = (later.tokens[:, place] + 1) % VOCAB
        assert (block_states(drafter, embedding, later, every_block(batch))[:, place]
                != before[:, place]).any()  # fmt: skip


def test_anchors_are_tokens_that_were_said_before_others() -> None:
    *_, batch = parts()
    torch.manual_seed(1)
    seen = set()
    for _ in range(40):
        blocks = random_blocks(batch, 4, torch.rand(TEXTS, LENGTH))
        assert blocks.is_real.all()
        for text, places in enumerate(blocks.anchors.tolist()):
            assert len(set(places)) == 4
            seen |= {(text, place) for place in places}
    last = [LENGTH - 2, 7, LENGTH - 2]
    assert seen == {(text, place) for text in range(TEXTS) for place in range(3, last[text] + 1)}
    more = random_blocks(batch, 99, torch.rand(TEXTS, LENGTH))
    assert more.is_real.sum(1).tolist() == [place - 2 for place in last]


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_those_of_all_logits_at_once(kind: str) -> None:
    config = CONFIGS[kind]
    drafter, embedding, lm_head, batch = parts(config)
    blocks = Blocks(torch.tensor([[4, 9], [5, 7], [3, 12]]), torch.tensor([[True, True]] * 3))
    blocks.is_real[2, 0] = False
    losses = train_blocks(drafter, embedding, lm_head, batch, blocks)
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    said = drafter.logits(lm_head(block_states(drafter, embedding, batch, blocks)))
    total, weights = torch.zeros(()), 0.0
    for draft in range(config.draft_length):
        weight = float(torch.tensor(-draft / (7 / 16 * config.block_size)).exp())
        terms = [
            functional.cross_entropy(
                said[text, block, draft + config.first_row], batch.tokens[text, place + 1 + draft]
            )
            for text, places in enumerate(blocks.anchors.tolist())
            for block, place in enumerate(places)
            if blocks.is_real[text, block]
            and place + 1 + draft < LENGTH
            and batch.answers[text, place + 1 + draft]
        ]
        total, weights = total + weight * torch.stack(terms).sum(), weights + weight * len(terms)
        assert losses[draft] == pytest.approx(torch.stack(terms).mean().item(), abs=1e-5)
    (total / weights).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert lm_head.weight.grad is None


@pytest.mark.parametrize("stride", [1, 5])
def test_drafts_count_behind_accepted_ones(stride: int) -> None:
    drafter, embedding, lm_head, batch = parts()
    with torch.no_grad():
        # The first text goes on behind its sixth token as it is drafted there, for two tokens.
        said = lm_head(drafted(drafter, embedding, batch, 0, 5)).argmax(-1)
        batch.tokens[0, 6:8] = said[1:3]
        batch.tokens[0, 8] = (said[3] + 1) % VOCAB
        expected = [[0, 0] for _ in range(PLAIN.draft_length)]
        for text in range(TEXTS):
            for place in range(3, LENGTH - 1):
                if place % stride or not (
                    batch.answers[text, place] and batch.answers[text, place + 1]
                ):
                    continue
                best = lm_head(drafted(drafter, embedding, batch, text, place)).argmax(-1)
                for draft in range(PLAIN.draft_length):
                    at = place + 1 + draft
                    if at >= LENGTH or not batch.answers[text, at]:
                        break
                    expected[draft][0] += 1
                    if best[1 + draft] != batch.tokens[text, at]:
                        break
                    expected[draft][1] += 1
    counts = block_acceptance(drafter, embedding, lm_head, batch, stride)
    assert [list(count) for count in counts] == expected
    assert counts[1][1] >= 1
