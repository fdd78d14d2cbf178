"""Medusa's heads are trained on the tokens that they draft, by the paper's loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from draftline.models.heads.load_head import build_head, load_head
from draftline.models.heads.medusa import Medusa, MedusaConfig
from draftline.models.load.model_info import read_model_info
from draftline.training.heads import trainer
from draftline.training.heads.anchored_blocks import BlockPlan
from draftline.training.heads.distilled_texts import DistilledText
from draftline.training.heads.draft_positions import counted_rows, head_acceptance, train_heads
from draftline.training.heads.export import export_head
from draftline.training.heads.learning_rate import LearningRate
from draftline.training.heads.objectives import MedusaObjective
from draftline.training.heads.target import TextBatch
from draftline.training.heads.trainer import HeadPlan, train_head
from support.tools.tiny_models import save_tiny_model
from torch import Tensor, nn
from torch.nn import functional

TEXTS, LENGTH, HIDDEN, VOCAB, DRAFTS = 3, 12, 16, 40, 4
CONFIG = MedusaConfig(HIDDEN, DRAFTS, VOCAB, draft_vocab_size=VOCAB, num_layers=2)


@pytest.fixture
def heads() -> Medusa:
    torch.manual_seed(6)
    made = build_head(CONFIG)
    assert isinstance(made, Medusa)
    return made


@pytest.fixture
def lm_head() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)


@pytest.fixture
def batch() -> TextBatch:
    torch.manual_seed(8)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    features = torch.randn(TEXTS, LENGTH, HIDDEN)
    return TextBatch(tokens, features, answers, features)


def logits_of(heads: Medusa, lm_head: nn.Module, features: Tensor) -> list[Tensor]:
    drafts = heads.drafts(features)
    return [heads.logits(place, drafts[..., place, :], lm_head) for place in range(DRAFTS)]


def test_head_k_learns_the_token_k_plus_two_ahead(
    heads: Medusa, lm_head: nn.Linear, batch: TextBatch
) -> None:
    weights = [0.5, 1.0, 2.0, 0.25]
    losses = train_heads(
        heads, lm_head, batch, weights, counted_rows(batch, heads.config.draft_length)
    )
    found = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    expected = []
    for place, logits in enumerate(logits_of(heads, lm_head, batch.features)):
        rows = [
            (text, row)
            for text in range(TEXTS)
            for row in range(LENGTH - 2 - place)
            if batch.answers[text, row + 2 + place]
        ]
        one = [
            functional.cross_entropy(logits[t, r], batch.tokens[t, r + 2 + place]) for t, r in rows
        ]
        expected.append(torch.stack(one).mean())
    torch.stack([w * e for w, e in zip(weights, expected, strict=True)]).sum().backward()
    assert torch.allclose(torch.tensor(losses), torch.stack(expected).detach(), atol=1e-5)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-5)
    assert lm_head.weight.grad is None


def test_drafts_count_behind_accepted_ones(
    heads: Medusa, lm_head: nn.Linear, batch: TextBatch
) -> None:
    best = [logits.argmax(-1) for logits in logits_of(heads, lm_head, batch.features)]
    # The first text is what row 4 drafts, but for its last draft.
    for place in range(3):
        batch.tokens[0, 6 + place] = best[place][0, 4]
    batch.tokens[0, 9] = (best[3][0, 4] + 1) % VOCAB
    expected = [[0, 0] for _ in range(DRAFTS)]
    for text in range(TEXTS):
        for row in range(LENGTH - 1):
            for place in range(DRAFTS):
                where = row + 2 + place
                if where >= LENGTH or not batch.answers[text, where]:
                    break
                expected[place][0] += 1
                if best[place][text, row] != batch.tokens[text, where]:
                    break
                expected[place][1] += 1
    assert [list(count) for count in head_acceptance(heads, lm_head, batch)] == expected
    assert expected[2][1] >= 1


def test_weights_fall_as_the_paper_has_them(heads: Medusa) -> None:
    found = MedusaObjective(heads, BlockPlan())._weights
    assert found == pytest.approx([0.8, 0.8**2, 0.8**3, 0.8**4])


def test_heads_begin_as_the_target(heads: Medusa, lm_head: nn.Linear) -> None:
    heads.begin_as(lm_head.weight)
    features = torch.randn(5, HIDDEN)
    for logits in logits_of(heads, lm_head, features):
        torch.testing.assert_close(logits, lm_head(features))


class Killed(Exception):
    """What ends a run in the middle."""


def test_a_run_learns_goes_on_after_a_kill_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_tiny_model("llama", tmp_path / "target")
    size, vocab = (info := read_model_info(checkpoint)).hidden_size, info.vocab_size
    config = MedusaConfig(size, 3, vocab, draft_vocab_size=vocab)
    # Counting texts: what comes next is plain.
    counted = [tuple((first + k) % vocab for k in range(14)) for first in range(60)]
    texts = [DistilledText(tokens, ((3, 14),)) for tokens in counted]
    plan = HeadPlan(
        num_steps=60, texts_per_step=4, window=14, rate=LearningRate(peak=1e-2), noise=0.0,
        checkpoint_every=20,
    )  # fmt: skip
    whole = train_head(config, checkpoint, texts, plan, tmp_path / "whole")
    texts_of = trainer._texts_of

    def until_killed(all_texts, plan, step, accelerator):
        if step == 50:
            raise Killed
        return texts_of(all_texts, plan, step, accelerator)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "_texts_of", until_killed)
        with pytest.raises(Killed):
            train_head(config, checkpoint, texts, plan, tmp_path / "killed")
    again = train_head(config, checkpoint, texts, plan, tmp_path / "killed")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    *_, (_, loss, *_) = trainer.read_log(tmp_path / "whole")
    assert loss < 0.6 * math.log(vocab), "much less than knowing nothing"
    export_head(whole, tmp_path / "head", {"architectures": ["MedusaModel"]}, {})
    loaded = load_head(tmp_path / "head")
    assert loaded.config == whole.config
    for name, tensor in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
