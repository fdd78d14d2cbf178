"""What published heads' codes are known to get wrong, at the drafter; training's are beside it.

Masks off by one, and masks that are multiplied before the softmax, are those of training:
`tests/training/test_head_passes.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.proposals import DraftRequest, FeatureRows, Proposal, Query
from draftline.drafters.heads.drafter import HeadDrafter, load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.model.expansion import DynamicExpansion
from draftline.models.heads.feature_head import FeatureHead, HeadOutput
from draftline.models.heads.load_head import load_head, misfits
from draftline.models.load.model_info import ModelInfo, read_model_info
from hypothesis import given
from hypothesis import strategies as st
from support.inputs import head_checkpoints as published
from transformers import AutoModelForCausalLM, LlamaConfig

LONG = 5000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """Of a long context, with other heads and another MLP than any draft here."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=published.VOCAB, hidden_size=published.HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=4, intermediate_size=40,
        max_position_embeddings=32_768, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return read_model_info(folder)


def drafted(folder: Path, target: ModelInfo, length: int, known: int, **options: Any) -> Proposal:
    """Behind a text of which the newest `known` tokens have states, the same for any length."""
    settings = HeadOptions(tree="chain", num_tokens=4, **options)
    drafter = load_head_drafter(folder, target, options=settings)
    assert isinstance(drafter, HeadDrafter)
    newest = (7 * np.arange(known + 1)) % published.VOCAB
    text = np.concatenate([np.zeros(length - len(newest)), newest]).astype(np.int32)
    drafter.open(DraftRequest("r", text, length, 0.0, 3))
    states = np.random.default_rng(1).normal(size=(known, published.HIDDEN)).astype(np.float32)
    drafter.observe_features([FeatureRows("r", length - 1 - known, states)])
    [proposal] = drafter.propose([Query("r", length, 8)])
    return proposal


@pytest.mark.parametrize("kind", ["griffin", "fspad"])
def test_drafts_go_on_from_what_regresses(
    target: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Fed with what predicts, a head of two features drafts its first token and loses the thread:
    so which one a drafter feeds shows, and it is not that one."""
    folder = published.save(tmp_path, getattr(published, kind)(), published.LLAMA)
    right = drafted(folder, target, 12, 11)
    forward = FeatureHead.forward

    def swapped(self: FeatureHead, *inputs: Any) -> HeadOutput:
        output = forward(self, *inputs)
        return HeadOutput(output.predict, output.predict)

    monkeypatch.setattr(FeatureHead, "forward", swapped)
    wrong = drafted(folder, target, 12, 11)
    assert right.log_probs[0] == wrong.log_probs[0]
    assert np.abs(right.log_probs[1:] - wrong.log_probs[1:]).min() > 1e-3


def test_a_draft_has_the_shapes_of_its_own_tensors(target: ModelInfo, tmp_path: Path) -> None:
    """Whatever heads, widths of keys and of MLPs its target has, or its config repeats of it."""
    repeated = {
        "num_key_value_heads": target.num_kv_heads, "intermediate_size": 40,
        "num_hidden_layers": target.num_layers, "head_dim": published.HEAD,
    }  # fmt: skip
    folder = published.save(tmp_path, published.griffin(), published.LLAMA | repeated)
    config = load_head(folder).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, published.HEAD)
    assert (config.num_layers, config.intermediate_size) == (1, published.INNER)
    assert misfits(config, target) == []
    assert len(drafted(folder, target, 12, 11).tokens) == 4


@pytest.mark.parametrize("kind", ["eagle", "griffin"])
def test_a_config_of_2048_positions_drafts_behind_longer_texts(
    target: ModelInfo, tmp_path: Path, kind: str
) -> None:
    """The target goes on beyond them; attention sees how far apart tokens are, not where."""
    shapes = getattr(published, kind)()
    folder = published.save(tmp_path / "short", shapes, published.LLAMA)
    assert published.LLAMA["max_position_embeddings"] == 2048
    longer = published.LLAMA | {"max_position_embeddings": target.max_context_len}
    other = published.save(tmp_path / "long", shapes, longer)
    near, far = (drafted(folder, target, length, 30) for length in (31, LONG))
    assert far.tokens.tolist() == near.tokens.tolist()
    np.testing.assert_allclose(far.log_probs, near.log_probs, atol=5e-3)
    same = drafted(other, target, LONG, 30)
    assert same.tokens.tolist() == far.tokens.tolist()
    assert np.array_equal(same.log_probs, far.log_probs)


SCORES = st.sampled_from([0.0, -0.5, -1.0])


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 24))
def test_tied_scores_orphan_no_child(
    data: st.DataObject, top_k: int, depth: int, max_nodes: int
) -> None:
    """A child of probability 1 ties with its parent; whatever is cut, parents stay."""
    expansion = DynamicExpansion(top_k, depth, max_nodes)
    while expansion.frontier:
        scores = [
            sorted(data.draw(st.lists(SCORES, min_size=top_k, max_size=top_k)), reverse=True)
            for _ in expansion.frontier
        ]
        expansion.grow([list(range(top_k))] * len(scores), scores)
    tokens, parents, log_probs = expansion.best(max_nodes)
    Proposal("head", tokens, parents, log_probs).check(published.VOCAB)
    assert len(tokens) == min(max_nodes, len(expansion.tokens))
    # Best first by the whole path, so each cut of these is a tree as well.
    paths: list[float] = []
    for parent, own in zip(parents.tolist(), log_probs.tolist(), strict=True):
        paths.append(own + (paths[parent] if parent >= 0 else 0.0))
    assert all(before >= after for before, after in pairwise(paths))
