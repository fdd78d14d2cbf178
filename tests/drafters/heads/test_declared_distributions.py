"""What heads draw, they declare: under every rule the text is the target's, all draws and all
decisions enumerated over a vocabulary of three tokens.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.arrays import Float32, Float64
from draftline.core.proposals import DraftRequest, FeatureRows, Proposal, Query
from draftline.drafters.heads import tree_growth
from draftline.drafters.heads.drafter import load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.model import text_distribution
from draftline.drafters.model.text_distribution import draw_index
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import build_head
from draftline.models.load.model_info import ModelInfo, read_model_info
from draftline.training.heads.export import export_head
from support.inputs import tiny_heads
from support.inputs.enumerated_steps import Propose, committed
from support.inputs.enumeration import Branch, deviation, outcomes, random_distributions
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB = 3
EXACT = 1e-12
TEXT = np.array([0, 2, 1, 1, 0, 2], dtype=np.int32)

TREES = {"chain": [1, 1], "siblings": [2, 1]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return read_model_info(folder)


@pytest.fixture(scope="module", params=tiny_heads.EVERY_CONFIG)
def folder(
    request: pytest.FixtureRequest, target: ModelInfo, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of a head whose weights are so large that its distributions differ."""
    torch.manual_seed(5)
    config = tiny_heads.EVERY_CONFIG[request.param](target.path)
    if isinstance(config, FeatureHeadConfig) and config.draft_vocab_size:
        # Of tokens 0 and 2 alone.
        config = replace(config, draft_vocab_size=2)
    head = build_head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.4)
    if isinstance(head, FeatureHead) and config.has_token_map:
        head.d2t.copy_(torch.tensor([0, 1]))
    made = tmp_path_factory.mktemp(request.param)
    export_head(head, made, {}, {})
    return made


class Scripted:
    """Stands for a draft's random numbers; which token is drawn is a branch's choice."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch


def drawn(weights: Float64, source: Scripted) -> tuple[int, Float32]:
    """As `draw_index`, among what that would draw from."""
    _, probs = draw_index(weights, np.random.default_rng(0))
    exact = probs.astype(np.float64)
    return source.branch.draw(exact / exact.sum()), probs


def every_proposal(
    folder: Path, target: ModelInfo, monkeypatch: pytest.MonkeyPatch, options: HeadOptions
) -> list[tuple[float, Proposal]]:
    """All that a head may draft behind a text, each with its probability."""
    monkeypatch.setattr(text_distribution, "draw_index", drawn)
    drafter = load_head_drafter(folder, target, options=options)
    drafter.open(DraftRequest("r", TEXT, len(TEXT), 1.0, 7))
    states = np.random.default_rng(1).normal(size=(len(TEXT) - 1, drafter.feature_layers.row_len))
    drafter.observe_features([FeatureRows("r", 0, states.astype(np.float32))])

    def propose(branch: Branch) -> Proposal:
        monkeypatch.setattr(tree_growth, "draft_rng", lambda *_: Scripted(branch))
        [proposal] = drafter.propose([Query("r", len(TEXT), 8)])
        return proposal

    return list(outcomes(propose))


def one_of(proposals: list[tuple[float, Proposal]]) -> Propose:
    weights = np.array([weight for weight, _ in proposals])
    assert weights.sum() == pytest.approx(1.0)
    return lambda rng: proposals[rng.draw(weights / weights.sum())][1]


@pytest.mark.parametrize("name", TREES)
def test_texts_with_a_heads_draws_are_the_targets(
    folder: Path, target: ModelInfo, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    widths = TREES[name]
    shape = tmp_path / "tree.json"
    shape.write_text(json.dumps({"widths": widths}))
    chosen = HeadOptions(tree=str(shape), distribution_size=VOCAB)
    proposals = every_proposal(folder, target, monkeypatch, chosen)
    assert len(proposals) > 3
    rng = np.random.default_rng(len(widths))
    wanted = random_distributions(rng, VOCAB, 3)
    run = committed(wanted, [one_of(proposals)], 8, "rejection")
    assert deviation(run, wanted, 3) < EXACT


def test_a_head_that_declares_another_distribution_is_seen(
    folder: Path, target: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = HeadOptions(tree="chain", num_tokens=1, distribution_size=VOCAB)
    wrong = []
    for weight, proposal in every_proposal(folder, target, monkeypatch, options):
        assert proposal.distributions is not None
        declared = proposal.distributions
        even = (declared.probs > 0) / (declared.probs > 0).sum()
        told = replace(declared, probs=even.astype(np.float32))
        wrong.append((weight, replace(proposal, distributions=told)))
    wanted = random_distributions(np.random.default_rng(4), VOCAB, 2)
    assert deviation(committed(wanted, [one_of(wrong)], 8, "rejection"), wanted, 2) > 1e-3
