"""What a head that is trained is like: widths and rotations of its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....models.heads.formats.dflash_config import DFlashConfig
from ....models.heads.formats.feature_head_config import FeatureHeadConfig
from ....models.heads.load_head import HeadConfig
from ....models.heads.parallel_heads import BlockwiseConfig, MedusaConfig
from ....models.heads.spec_former import SpecFormerConfig
from ....models.load.checkpoint import read_config
from ....models.load.model_info import head_dim, num_kv_heads
from ....training.heads.distilled_texts import DistilledText
from .job import HeadJob, head_recipe

# Targets with fewer layers than this are read up to their last state.
FEW_LAYERS = 12


def head_config(
    target: Path, kind: str, job: HeadJob, texts: Sequence[DistilledText]
) -> HeadConfig:
    """A head with the widths and rotations of its target."""
    config = read_config(target)
    hidden = config.hidden_size
    recipe = head_recipe(kind, job)
    draft_length = job.draft_length or recipe.draft_length
    if kind == "medusa":
        rows = config.vocab_size
        return MedusaConfig(hidden, draft_length, rows, draft_vocab_size=rows)
    if kind == "blockwise":
        # The paper's layer has the target's inner width for each head.
        inner = draft_length * config.intermediate_size
        return BlockwiseConfig(hidden, draft_length, inner_size=inner)
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "rms_norm_eps": config.rms_norm_eps,
        "max_positions": config.max_position_embeddings,
        "rope": dict(config.rope_parameters),
    }
    if kind == "dflash":
        layers = tapped_layers(config.num_hidden_layers)
        return DFlashConfig(
            block_size=draft_length + 1, num_layers=job.num_layers, num_features=len(layers),
            feature_size=hidden, feature_layers=layers, vocab_size=config.vocab_size,
            mask_token=mask_token(texts, config.vocab_size, config.eos_token_id), **common,
        )  # fmt: skip
    if recipe.fusion is None:
        return SpecFormerConfig(draft_length=draft_length, **common)
    return FeatureHeadConfig(
        fusion=recipe.fusion,
        vocab_size=config.vocab_size,
        fusion_size=0 if recipe.fusion == "linear" else config.intermediate_size,
        splits_output=recipe.splits_output,
        has_fusion_bias=True,
        feature_size=hidden,
        **common,
    )


def tapped_layers(num_target_layers: int) -> tuple[int, ...]:
    """Layers of a target whose outputs a DFlash drafter that is trained here reads.

    The published spacing leaves out the last two, which of few layers know the most.
    """
    if num_target_layers >= FEW_LAYERS:
        step = (num_target_layers - 4) / 4
        return tuple(round(1 + index * step) for index in range(5))
    count = max(1, num_target_layers // 2)
    spread = np.linspace(num_target_layers - 1, min(1, num_target_layers - 1), count)
    return tuple(int(layer) for layer in spread.round()[::-1])


def mask_token(texts: Sequence[DistilledText], vocab_size: int, end: int | None) -> int:
    """The last of the tokens that the texts have least; never the one that ends them."""
    said = np.concatenate([text.tokens for text in texts])
    counts = np.bincount(said, minlength=vocab_size)[::-1].copy()
    if end is not None:
        counts[vocab_size - 1 - end] = np.iinfo(counts.dtype).max
    return vocab_size - 1 - int(counts.argmin())
