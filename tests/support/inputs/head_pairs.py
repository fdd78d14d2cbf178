"""Random targets with a random head of each kind, and what the network over all text says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draftline.core.proposals import Commit, DraftRequest, FeatureRows
from draftline.core.sampling import gumbel
from draftline.drafters.heads.drafter import HeadDrafter, feature_layers, load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.models.heads.dflash import DFlash
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.load_head import load_head
from draftline.models.heads.medusa import Medusa
from draftline.models.heads.p_eagle import PEagle
from draftline.models.heads.spec_former import SpecFormer
from draftline.models.load.model_info import ModelInfo, read_model_info
from support.inputs import head_checkpoints as published
from support.inputs import medusa_checkpoints
from support.inputs.block_logits import block_logits
from support.inputs.head_attention import causal
from support.inputs.masked_logits import masked_logits
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

NUM_LAYERS, SEED = 6, 5
KINDS: dict[str, Callable[[], published.Shapes]] = {
    "eagle": published.eagle,
    "fspad": published.fspad,
    "griffin": published.griffin,
    "eagle3": published.eagle3,
    "deep_eagle3": published.deep_eagle3,
    "p_eagle": published.p_eagle,
    "own_p_eagle": published.p_eagle_of_speculators,
    "specformer": published.spec_former,
    "medusa": medusa_checkpoints.medusa,
    "dflash": published.dflash,
    "mixed_dflash": published.dflash,
    "own_dflash": published.dflash_of_speculators,
    "dspark": published.dspark,
    "gated_dspark": lambda: published.dspark("gated"),
    "rnn_dspark": lambda: published.dspark("rnn"),
}
CONFIGS = {
    "deep_eagle3": published.DEEP,
    "p_eagle": published.P_EAGLE,
    "own_p_eagle": published.SPECULATORS_P_EAGLE,
    "dflash": published.DFLASH,
    "mixed_dflash": published.MIXED_DFLASH,
    "own_dflash": published.SPECULATORS_DFLASH,
    "dspark": published.DSPARK,
    "gated_dspark": published.DSPARK,
    "rnn_dspark": published.DSPARK,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A random target, and a head's folder."""

    name: str
    target: ModelInfo
    model: Any
    folder: Path

    def features(self, tokens: list[int]) -> np.ndarray:
        """[tokens, width] of the layers that the head reads."""
        layers = feature_layers(self.folder, self.target)
        with torch.inference_mode():
            states = self.model.base_model(torch.tensor([tokens]), output_hidden_states=True)
        parts = [states.hidden_states[layer + 1][0] for layer in layers]
        return torch.cat(parts, dim=-1).numpy()

    def drafter(self, **options: Any) -> HeadDrafter:
        return load_head_drafter(self.folder, self.target, options=HeadOptions(**options))

    def logits(self, tokens: list[int], drafted: list[int]) -> Tensor:
        """Of the token behind `drafted`, all of which the network reads at once."""
        head = load_head(self.folder)
        features = torch.from_numpy(self.features(tokens[:-1]))
        if isinstance(head, SpecFormer):
            context = head.context(head.project(features), torch.arange(len(features)), causal)
            draft = head.drafts(context[-1:])[0, len(drafted)]
            return self.model.lm_head(self.model.base_model.norm(draft))
        if isinstance(head, Medusa):
            place = len(drafted)
            return head.logits(place, head.drafts(features[-1])[place], self.model.lm_head)
        if isinstance(head, DFlash):
            output = block_logits(self.model, head, features, [tokens[-1], *drafted])
            return output[len(drafted)]
        if isinstance(head, PEagle):
            return masked_logits(self.model, head, features, tokens[1:], len(drafted))
        return self._feature_logits(head, tokens, drafted, head.project(features))

    def _feature_logits(
        self, head: FeatureHead, tokens: list[int], drafted: list[int], rows: Tensor
    ) -> Tensor:
        embed = (
            head.embed_tokens if head.config.has_embedding else self.model.base_model.embed_tokens
        )
        behind = tokens[1:]
        output = head(embed(torch.tensor(behind)), rows, torch.arange(len(rows)), causal)
        for token in drafted:
            rows = torch.cat([rows, output.regress[-1:]])
            behind = [*behind, token]
            output = head(embed(torch.tensor(behind)), rows, torch.arange(len(rows)), causal)
        predict = output.predict[-1]
        if not head.config.draft_vocab_size:
            return self.model.lm_head(predict)
        own = head.lm_head(predict)
        logits = torch.full((head.config.vocab_size,), -torch.inf)
        logits[head.target_tokens(torch.arange(len(own)))] = own
        return logits


def pair_of(kind: str, folder: Path) -> Pair:
    """A target and a head of one of `KINDS`, saved in a folder."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=published.VOCAB, hidden_size=published.HIDDEN, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24,
        max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "target")
    options = CONFIGS.get(kind, published.LLAMA)
    head = published.save(folder / "head", KINDS[kind](), options)
    return Pair(kind, read_model_info(folder / "target"), model, head)


def tell(drafter: HeadDrafter, pair: Pair, tokens: list[int], new: list[int]) -> list[int]:
    """Features and commit of a step that appended `new`."""
    known = len(tokens) - 1
    rows = pair.features([*tokens, *new])[known : known + len(new)]
    drafter.observe_features([FeatureRows("r", known, rows)])
    drafter.observe([Commit("r", len(tokens), np.array(new, dtype=np.int32))])
    return [*tokens, *new]


def opened(pair: Pair, tokens: list[int], temperature: float = 0.0, **options: Any) -> HeadDrafter:
    """All but the last token have features, in two pieces."""
    drafter = pair.drafter(**options)
    text = np.array(tokens, dtype=np.int32)
    drafter.open(DraftRequest("r", text, len(tokens), temperature, SEED))
    rows = pair.features(tokens)[:-1]
    drafter.observe_features([FeatureRows("r", 0, rows[:4]), FeatureRows("r", 4, rows[4:])])
    return drafter


def chosen(pair: Pair, tokens: list[int], drafted: list[int], temperature: float) -> int:
    with torch.inference_mode():
        scores = pair.logits(tokens, drafted).numpy().astype(np.float64)
    if temperature:
        position = np.full(1, len(tokens) + len(drafted))
        noise = gumbel(np.full(1, SEED), position, np.arange(published.VOCAB))
        scores = scores / temperature + noise
    return int(scores.argmax())


TEXT = [(7 * k) % published.VOCAB for k in range(11)]
