"""P-EAGLE: EAGLE-3 with all drafts in one pass (arXiv 2602.01469; speculators).

Rows of the text are EAGLE-3's. After the last one come masks, one for each further draft. A mask
has a learnt token in place of the unknown one, and learnt features in place of the target's, the
same at every depth. It sees the text and the masks before it, so only its position identifies its
draft, and no draft sees another's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError
from .checkpoint_kind import CheckpointKind, Shapes
from .feature_head import FeatureHead
from .feature_head_config import FeatureHeadConfig, feature_head_config

MASK_FEATURES = "mask_hidden"
# The projects' names for the mask token.
MASK_TOKEN_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class PEagleConfig(FeatureHeadConfig):
    """Sizes and switches of a P-EAGLE drafter.

    mask_token    token whose embedding is the input of masks
    draft_length  number of drafts that it was trained for; 0: unknown
    """

    mask_token: int = 0
    draft_length: int = 0


def p_eagle_config(shapes: Shapes, config: Mapping[str, Any]) -> PEagleConfig:
    """The config of a checkpoint.

    Raises `CheckpointError` as `feature_head_config` does, and if the mask's input is missing: the
    head would draft from random numbers.
    """
    nested = config.get("transformer_layer_config") or {}
    settings = {**nested, **{name: value for name, value in config.items() if value is not None}}
    if MASK_FEATURES not in shapes:
        raise CheckpointError(
            f"the P-EAGLE drafter's checkpoint has no {MASK_FEATURES}, the learnt features of its "
            "masks; fetch it again"
        )
    if settings.get("embed_requires_grad") and "embed_tokens.weight" not in shapes:
        raise CheckpointError(
            "the P-EAGLE drafter's embedding was trained (embed_requires_grad), and its checkpoint "
            "has no embed_tokens.weight; fetch it again"
        )
    base = feature_head_config(CheckpointKind.EAGLE3, shapes, config)
    if base.num_features * base.feature_size != shapes[MASK_FEATURES][-1] or not base.has_fusion:
        raise CheckpointError(
            f"the P-EAGLE drafter's {MASK_FEATURES} has shape {shapes[MASK_FEATURES]}, and its fc "
            f"reads {base.num_features} features of {base.feature_size}"
        )
    return PEagleConfig(
        **{field.name: getattr(base, field.name) for field in fields(base)},
        mask_token=_mask_token(settings, base.vocab_size),
        draft_length=_draft_length(settings),
    )


def _mask_token(config: Mapping[str, Any], vocab_size: int) -> int:
    named = {name: int(config[name]) for name in MASK_TOKEN_FIELDS if config.get(name) is not None}
    if len(set(named.values())) != 1:
        raise CheckpointError(
            f"the P-EAGLE drafter's config names {named or 'no token'} for its masks; set "
            f"{MASK_TOKEN_FIELDS[0]} to the one that it was trained with"
        )
    [mask] = set(named.values())
    ends = config.get("eos_token_id")
    if mask in (ends if isinstance(ends, list) else [ends]) or not 0 <= mask < vocab_size:
        raise CheckpointError(
            f"the P-EAGLE drafter's mask token {mask} is no unused token of its vocabulary of "
            f"{vocab_size}"
        )
    return mask


def _draft_length(config: Mapping[str, Any]) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(config.get("para_depths") or methods[0].get("speculative_tokens") or 0)


def published_mask_fields(config: PEagleConfig) -> dict[str, object]:
    """The config.json fields of the masks, as vLLM reads them, and the trained number of drafts."""
    return {
        "parallel_drafting": True,
        MASK_TOKEN_FIELDS[0]: config.mask_token,
        "embed_requires_grad": config.has_embedding,
        "para_depths": config.draft_length,
    }


class PEagle(FeatureHead):
    """The drafter; its tensors have the published names."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        width = config.num_features * config.feature_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width))

    def masks(self, count: int) -> Tensor:
        """[count, hidden_size]: the input of `forward` for the features of this many masks."""
        return self.project(self.mask_hidden[0]).expand(count, -1)
