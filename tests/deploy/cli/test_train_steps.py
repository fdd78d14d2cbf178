"""A step of each recipe is that of its formulas: the gradients of all passes, then AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.deploy.cli.train.job import head_job
from draftline.deploy.cli.train.recipes import head_plan, head_recipe
from draftline.models.heads.checkpoint_kind import CheckpointKind
from draftline.models.heads.feature_head import FeatureHead, HeadOutput
from draftline.models.heads.feature_head_config import FeatureHeadConfig, feature_head_config
from draftline.models.heads.spec_former import SpecFormerConfig
from draftline.models.load.model_info import read_model_info
from draftline.training.heads.feature_passes import LossWeights, PassPlan, train_passes
from draftline.training.heads.target import TextBatch
from draftline.training.heads.trainer import HeadPlan, HeadRun
from support.fakes.drafted_keys import DraftedKeys
from support.inputs import head_checkpoints as published
from support.inputs.tiny_heads import griffin, spec_former, texts
from torch import Tensor, nn

HIDDEN, VOCAB, ROWS = published.HIDDEN, 40, 10
SHAPES = {
    "griffin": published.griffin(), "hass": published.eagle(), "eagle2": published.eagle(),
    "fspad": published.fspad(),
}  # fmt: skip
GRIFFIN_RECIPES = [("griffin", recipe) for recipe in (None, "paper", "released")]
FEATURE_RECIPES = [*GRIFFIN_RECIPES, ("hass", None), ("eagle2", None), ("fspad", None)]


def plan_of(kind: str, recipe: str | None, width: int) -> HeadPlan:
    given = {"texts": Path(), "output": Path()} | ({"recipe": recipe} if recipe else {})
    job = head_job(kind, given)
    return head_plan(job, head_recipe(kind, job), width)


def drafted(
    head: FeatureHead, embeddings: Tensor, streams: Sequence[Tensor], row: int
) -> HeadOutput:
    """What a head says for a row after as many drafts as there are streams beside the first: they
    stand behind the target's features, each with what the pass before it said."""
    depth, seen, head_output = len(streams) - 1, DraftedKeys(), None
    for place in range(row + 1):
        part = slice(place, place + 1)
        stream = streams[max(place - (row - depth), 0)]
        head_output = head(embeddings[part], stream[part], torch.arange(place, place + 1), seen)
    assert head_output is not None
    return head_output


def row_loss(
    head_output: HeadOutput, state: Tensor, output: Tensor, token: int, weights: LossWeights
) -> Tensor:
    """Distance from the target's feature, cross-entropy, and that of the best tokens."""
    distance = (head_output.regress[0] - state).abs()
    if not weights.is_l1:
        distance = torch.where(distance < 1, distance**2 / 2, distance - 0.5)
    log_probs = (output @ head_output.predict[0]).log_softmax(-1)
    wanted = (output @ state).softmax(-1)
    entropy = -log_probs[token] if weights.is_one_hot else -(wanted * log_probs).sum()
    best = wanted.argsort(descending=True)[: weights.num_best]
    return (
        weights.feature * distance.mean()
        + weights.token * entropy
        - weights.best_tokens * (wanted[best] * log_probs[best]).sum()
    )


def counts(fits: Sequence[Sequence[bool]], row: int, plan: PassPlan) -> bool:
    """Whether the drafts that a row stands behind were right; in the released code each is looked
    up a row later."""
    for back, earlier in enumerate(reversed(fits), start=1):
        place = row - back + (plan.mask_form == "code")
        if place < 0 or not earlier[place]:
            return False
    return True


@pytest.mark.parametrize(("kind", "recipe"), FEATURE_RECIPES)
def test_gradients_are_those_of_drafts_made_one_by_one(kind: str, recipe: str | None) -> None:
    torch.manual_seed(3)
    shapes = SHAPES[kind]
    checkpoint_kind = CheckpointKind(kind if kind in {"griffin", "fspad"} else "eagle")
    head = FeatureHead(feature_head_config(checkpoint_kind, shapes, published.LLAMA))
    head.load_state_dict(published.tensors(shapes))
    plan = plan_of(kind, recipe, HIDDEN).passes
    # An untrained head is seldom right among three of so many.
    plan = replace(plan, num_aligned=VOCAB // 2 if plan.num_aligned else 0)
    weights = plan.weights
    embed, lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    tokens, answers = torch.randint(0, VOCAB, (1, ROWS + 2)), torch.ones(1, ROWS + 2) > 0
    answers[0, :4] = False
    features = torch.randn(1, ROWS + 2, HIDDEN)
    batch = TextBatch(tokens, features, answers, features)
    trained = train_passes(head, embed, lm_head, batch, plan)
    assert len(trained) == (3 if kind in {"griffin", "hass"} else 1)
    found = {name: parameter.grad for name, parameter in head.named_parameters()}
    head.zero_grad()

    embeddings, output = embed(tokens[0, 1:-1]).detach(), lm_head.weight.detach()
    states, labels = features[0, 1:-1], tokens[0, 2:].tolist()
    streams, fits = [features[0, :-2]], []
    for report in trained:
        outputs = [drafted(head, embeddings, streams, row) for row in range(ROWS)]
        losses = [
            row_loss(outputs[row], states[row], output, labels[row], weights)
            for row in range(ROWS)
            if answers[0, row + 2] and counts(fits, row, plan)
        ]
        assert losses
        mean = torch.stack(losses).mean()
        mean.backward()
        assert report.loss == pytest.approx(mean.item(), rel=1e-4)
        if plan.num_aligned:
            ranks = [(output @ one.predict[0]).argsort(descending=True).tolist() for one in outputs]
            best = [order[: plan.num_aligned] for order in ranks]
            fits.append([label in few for label, few in zip(labels, best, strict=True)])
        regress = torch.cat([one.regress for one in outputs]).detach()
        streams.append(torch.cat([features[0, :1], regress[:-1]]))
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def networks(checkpoint: Path) -> dict[str, FeatureHeadConfig | SpecFormerConfig]:
    return {"griffin": griffin(checkpoint), "specformer": spec_former(checkpoint)}


# The highest rate, the share of the run in which it rises, and what AdamW divides by at least.
STEPS = {
    ("griffin", None): (1e-3, 0.02, 1e-8),
    ("griffin", "paper"): (3e-5, 0.1, 1e-8),
    ("griffin", "released"): (5e-5, 0.1, 1e-8),
    ("specformer", "paper"): (5e-4, 0.05, 1e-2),
    ("specformer", "released"): (5e-4, 0.05, 1e-2),
}


@pytest.mark.parametrize(("kind", "recipe"), STEPS)
def test_a_step_is_adamws(
    kind: str,
    recipe: str | None,
    checkpoint: Path,
    networks: dict[str, FeatureHeadConfig | SpecFormerConfig],
) -> None:
    peak, rising, eps = STEPS[kind, recipe]
    num_steps, info = 100, read_model_info(checkpoint)
    plan = plan_of(kind, recipe, info.hidden_size)
    plan = replace(plan, num_steps=num_steps, texts_per_step=2, window=12, clip=0.01)
    run = HeadRun(networks[kind], checkpoint, texts(info.vocab_size), plan)
    run.learn(*next(run.inputs(0)))
    begun = {name: (one.clone(), one.grad) for name, one in run.network.named_parameters()}
    gradients = {name: grad.clone() for name, (_, grad) in begun.items() if grad is not None}
    assert gradients
    assert any((gradient.abs() > plan.clip).any() for gradient in gradients.values())
    run.update(0)
    # Half a step of the rise; the first means are the gradient's and its square's.
    rate = peak * 0.5 / (rising * num_steps)
    for name, parameter in run.network.named_parameters():
        before, _ = begun[name]
        if name not in gradients:
            assert torch.equal(parameter, before)
            continue
        gradient = gradients[name].clamp(-plan.clip, plan.clip)
        moved = gradient / (gradient.abs() + eps)
        expected = before * (1 - rate * 0.01) - rate * moved
        torch.testing.assert_close(parameter, expected, atol=1e-7, rtol=1e-6)
