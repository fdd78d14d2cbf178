"""DSpark trains on the distance to the target's distribution, with the text's own tokens before."""

from __future__ import annotations

import pytest
import torch
from draftline.models.heads.dspark import DSpark, DSparkConfig
from draftline.training.heads.anchored_blocks import Blocks, block_states, every_block
from draftline.training.heads.markov_blocks import markov_acceptance, train_markov_blocks
from draftline.training.heads.target import TextBatch
from torch import Tensor, nn
from torch.nn import functional

TEXTS, LENGTH, HIDDEN, VOCAB, RANK, DRAFTS = 3, 14, 16, 40, 6, 4
KINDS = ("vanilla", "gated", "rnn")


def parts(kind: str, confidence_size: int = HIDDEN + RANK) -> tuple[
    DSpark, Tensor, nn.Module, TextBatch
]:  # fmt: skip
    torch.manual_seed(6)
    config = DSparkConfig(
        HIDDEN, 24, 2, 1, 8, DRAFTS, VOCAB - 1, num_layers=2, num_features=2, feature_size=HIDDEN,
        is_shifted=True, vocab_size=VOCAB, markov_kind=kind, markov_rank=RANK,
        confidence_size=confidence_size,
    )  # fmt: skip
    embedding = torch.randn(VOCAB, HIDDEN)
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    answers[1, 9:] = False
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    features = torch.randn(TEXTS, LENGTH, 2 * HIDDEN)
    states = 3 * torch.randn(TEXTS, LENGTH, HIDDEN)
    return DSpark(config), embedding, lm_head, TextBatch(tokens, features, answers, states)


def block_logits(
    drafter: DSpark, lm_head: nn.Module, states: Tensor, tokens: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and confidences of a block's drafts, of its states and the tokens before each."""
    assert drafter.markov_head is not None
    memory, logits, confidences = torch.zeros(RANK), [], []
    weight, bias = drafter.confidence_head.proj.parameters()
    for state, token in zip(states, tokens, strict=True):
        added, memory = drafter.markov_head(state, token, memory)
        logits.append(lm_head(state) + added)
        read = torch.cat([state, drafter.markov_head.markov_w1.weight[token]])
        confidences.append((weight[0] @ read[: weight.shape[1]] + bias[0]).sigmoid())
    return logits, confidences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("confidence_size", [HIDDEN, HIDDEN + RANK])
def test_gradients_are_those_of_the_formulas(kind: str, confidence_size: int) -> None:
    drafter, embedding, lm_head, batch = parts(kind, confidence_size)
    blocks = Blocks(torch.tensor([[4, 9], [5, 7], [3, 12]]), torch.tensor([[True, True]] * 3))
    blocks.is_real[2, 0] = False
    losses = train_markov_blocks(drafter, embedding, lm_head, batch, blocks)
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    states = block_states(drafter, embedding, batch, blocks)
    terms: list[list[Tensor]] = [[] for _ in range(DRAFTS)]
    for text, places in enumerate(blocks.anchors.tolist()):
        for block, place in enumerate(places):
            if not blocks.is_real[text, block]:
                continue
            before = functional.pad(batch.tokens[text], (0, DRAFTS))[place : place + DRAFTS]
            said = block_logits(drafter, lm_head, states[text, block], before)
            for draft, (logits, confidence) in enumerate(zip(*said, strict=True)):
                at = place + 1 + draft
                if at >= LENGTH or not batch.answers[text, at]:
                    break
                wanted = lm_head(batch.states[text, at - 1]).softmax(-1)
                distance = (logits.softmax(-1) - wanted).abs().sum()
                rate = 1 - distance.detach() / 2
                entropy = -(rate * confidence.log() + (1 - rate) * (1 - confidence).log())
                token = -logits.log_softmax(-1)[batch.tokens[text, at]]
                terms[draft].append(0.1 * token + 0.9 * distance + entropy)
    weights = [float(torch.tensor(-draft / 4).exp()) for draft in range(DRAFTS)]
    total = sum(weight * torch.stack(own).sum() for weight, own in zip(weights, terms, strict=True))
    count = sum(weight * len(own) for weight, own in zip(weights, terms, strict=True))
    (total / count).backward()
    expected = [torch.stack(own).mean().item() for own in terms]
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_behind_accepted_ones_are_counted(kind: str) -> None:
    """Each block is drafted left to right with its own tokens, until one is wrong."""
    drafter, embedding, lm_head, batch = parts(kind)
    drafter.requires_grad_(False)
    with torch.no_grad():
        # The first text goes on behind its sixth token as it is drafted there, for two tokens.
        for place in (6, 7):
            states = block_states(drafter, embedding, batch, every_block(batch))[0, 5]
            logits, _ = block_logits(drafter, lm_head, states, batch.tokens[0, 5 : 5 + DRAFTS])
            batch.tokens[0, place] = logits[place - 6].argmax()
        states = block_states(drafter, embedding, batch, every_block(batch))
    expected = [[0, 0] for _ in range(DRAFTS)]
    for text in range(TEXTS):
        for place in range(3, LENGTH - 1):
            if not (batch.answers[text, place] and batch.answers[text, place + 1]):
                continue
            before = functional.pad(batch.tokens[text], (0, DRAFTS))[place : place + DRAFTS]
            logits, _ = block_logits(drafter, lm_head, states[text, place], before)
            for draft, own in enumerate(logits):
                at = place + 1 + draft
                if at >= LENGTH or not batch.answers[text, at]:
                    break
                expected[draft][0] += 1
                if own.argmax() != batch.tokens[text, at]:
                    break
                expected[draft][1] += 1
    counts = markov_acceptance(drafter, embedding, lm_head, batch, stride=1)
    assert [list(count) for count in counts] == expected
    assert counts[1][1] >= 1
