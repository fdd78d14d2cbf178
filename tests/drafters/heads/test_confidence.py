"""A DSpark drafter's confidence head values its drafts, and may end them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.core.proposals import DraftRequest, FeatureRows, Proposal, Query
from draftline.drafters.heads.drafter import HeadDrafter, load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.models.heads.dspark import DSpark
from draftline.models.heads.load_head import load_head
from draftline.models.load.model_info import read_model_info
from support.inputs import head_checkpoints as published
from support.inputs.block_logits import block_logits, block_states
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

TEXT = [(7 * k) % published.VOCAB for k in range(11)]
WIDTHS = {"state": published.HIDDEN, "state and token": published.HIDDEN + published.RANK}


class Pair:
    """A random target and a drafter with a confidence head."""

    def __init__(self, folder: Path, width: int) -> None:
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=published.VOCAB, hidden_size=published.HIDDEN, num_hidden_layers=6,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24,
            max_position_embeddings=128, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = AutoModelForCausalLM.from_config(config).eval()
        self.model.save_pretrained(folder / "target")
        shapes = published.dspark("vanilla") | {
            "confidence_head.proj.weight": (1, width),
            "confidence_head.proj.bias": (1,),
        }
        self.folder = published.save(folder / "head", shapes, published.DSPARK)
        self.target = read_model_info(folder / "target")
        head = load_head(self.folder)
        assert isinstance(head, DSpark)
        self.head = head

    def features(self) -> Tensor:
        with torch.inference_mode():
            states = self.model.base_model(torch.tensor([TEXT[:-1]]), output_hidden_states=True)
        layers = self.head.config.feature_layers
        return torch.cat([states.hidden_states[layer + 1][0] for layer in layers], dim=-1)

    def propose(self, temperature: float = 0.0, **options: Any) -> Proposal:
        drafter: HeadDrafter = load_head_drafter(
            self.folder, self.target, options=HeadOptions(**options)
        )
        text = np.array(TEXT, dtype=np.int32)
        drafter.open(DraftRequest("r", text, len(TEXT), temperature, 5))
        drafter.observe_features([FeatureRows("r", 0, self.features().numpy())])
        [proposal] = drafter.propose([Query("r", len(TEXT), 40)])
        return proposal

    @torch.inference_mode()
    def told(self, path: list[int]) -> tuple[float, float]:
        """By the formulas: how sure the head is of what stands behind all of a path but its last,
        and the logarithm of that times the last one's probability.
        """
        before = [TEXT[-1], *path[:-1]]
        states = block_states(self.model, self.head, self.features(), TEXT[-1])
        log_probs = block_logits(self.model, self.head, self.features(), before)[-1].log_softmax(-1)
        proj, embedding = self.head.confidence_head.proj, self.head.markov_head.markov_w1
        read = torch.cat([states[len(path) - 1], embedding.weight[before[-1]]])
        logit = proj.weight[0] @ read[: proj.in_features] + proj.bias[0]
        sure = logit.sigmoid()
        return float(sure), float(sure.log() + log_probs[path[-1]])


@pytest.fixture(scope="module", params=WIDTHS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), WIDTHS[request.param])


def paths_of(proposal: Proposal) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@pytest.mark.parametrize(
    ("tree", "temperature"), [("dynamic", 0.0), ("chain", 0.0), ("chain", 0.9)]
)
def test_nothing_is_drafted_where_it_is_less_sure_than_asked(
    pair: Pair, tree: str, temperature: float
) -> None:
    """What is drafted is the same, cut before the first row of less confidence."""
    whole = paths_of(pair.propose(temperature, tree=tree, top_k=3, num_tokens=3))
    sure = {tuple(path): pair.told(path)[0] for path in whole}
    bounds = sorted(set(sure.values()))
    for bound in (0.0, *bounds[:: max(1, len(bounds) // 3)], 1.0):
        least = min(bound + 1e-4, 1.0) if bound else 0.0
        kept = [
            path
            for path in whole
            if all(sure[tuple(path[: end + 1])] >= least for end in range(len(path)))
        ]
        found = paths_of(
            pair.propose(temperature, tree=tree, top_k=3, num_tokens=3, min_confidence=least)
        )
        if tree == "chain":
            assert found == kept
        else:
            # With fewer branches others are among the best of their level.
            assert {tuple(path) for path in kept if len(path) < 3} <= {tuple(p) for p in found}
            assert all(pair.told(path)[0] >= least for path in found)
    assert not paths_of(pair.propose(tree=tree, min_confidence=1.0))


def test_drawn_drafts_end_there_too(pair: Pair) -> None:
    """Their distributions are declared for those that are left."""
    options = {"tree": "chain", "num_tokens": 3, "distribution_size": 8}
    whole = pair.propose(0.9, **options)
    second = pair.told(paths_of(whole)[1])[0]
    cut = pair.propose(0.9, **options, min_confidence=min(second + 1e-4, 1.0))
    count = 0 if pair.told(paths_of(whole)[0])[0] < second + 1e-4 else 1
    assert cut.tokens.tolist() == whole.tokens.tolist()[:count]
    # What was drawn is declared as it was drawn, whatever it is worth.
    assert whole.distributions is not None
    assert all(value <= 0 for value in whole.log_probs.tolist())


@pytest.mark.parametrize("value", [-0.1, 1.1, "most"])
def test_it_is_a_share(value: object) -> None:
    with pytest.raises(ConfigError, match="min_confidence"):
        HeadOptions(min_confidence=value)  # type: ignore[arg-type]
