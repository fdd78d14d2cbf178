"""The tokens that a head drafts with its target's output head, where that is cut down to them.

The output head over a whole vocabulary is the larger part of a small drafter's pass, and most of
its tokens are hardly ever said: FR-Spec (Zhao et al., ACL 2025, arXiv 2502.14856) computes the most
frequent ones alone. What is drafted then is seldom another token, and costs less.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....core.arrays import Int64
from ....core.errors import ConfigError
from ....models.heads.formats.feature_head_config import FeatureHeadConfig
from ....models.heads.load_head import HeadConfig
from ....models.heads.parallel_heads import BlockwiseConfig, MedusaConfig
from ....models.heads.shared_parts import SharedParts
from ....models.heads.spec_former import SpecFormerConfig
from ....models.layers.model_slice import Projection
from ....models.load.bundled import DEMO_TOKEN_MAP
from ....models.stage.output_vocabulary import LogitsMap, OutputVocabulary

FIELD = "token_map"
# Stands for the bundled file.
DEMO = "demo"


def read_token_map(name: str, vocab_size: int) -> Int64:
    """int64 [n]: the target's token ids of a file, by rising id.

    name  of a file: a list of ids in JSON, or such a list or tensor in PyTorch's form, as FR-Spec
          publishes them; or `demo`
    Raises `ConfigError` (`token_map`).
    """
    path = DEMO_TOKEN_MAP if name == DEMO else Path(name).expanduser()
    try:
        tokens = np.asarray(_read(path))
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise ConfigError(FIELD, f"{path} must hold a list of token ids")
    found = np.unique(tokens).astype(np.int64)
    if len(found) != len(tokens):
        raise ConfigError(FIELD, f"{path} names {len(tokens) - len(found)} tokens twice")
    if found[0] < 0 or found[-1] >= vocab_size:
        raise ConfigError(
            FIELD,
            f"{path} has ids from {found[0]} to {found[-1]}, the served model's are below "
            f"{vocab_size}: it is of another tokenizer",
        )
    return found


def draft_tokens(name: str, config: HeadConfig, vocab_size: int) -> Int64 | None:
    """Of `read_token_map`, for a head; None where `name` is empty: it drafts all tokens.

    Raises `ConfigError` (`token_map`), also where the head has an output head of its own.
    """
    if not name:
        return None
    if not drafts_by_target(config):
        raise ConfigError(
            FIELD,
            "is of heads that draft with the served model's output head, and this one has its own; "
            "leave it out",
        )
    return read_token_map(name, vocab_size)


def drafts_by_target(config: HeadConfig) -> bool:
    """Whether a head's logits are what the target's output head says of its states."""
    if isinstance(config, FeatureHeadConfig):
        return not config.draft_vocab_size
    if isinstance(config, MedusaConfig):
        return config.output == "target"
    return isinstance(config, SpecFormerConfig | BlockwiseConfig)


def with_tokens(
    shared: SharedParts,
    tokens: Int64 | None,
    vocab_size: int,
    prune: Callable[[Int64], Projection],
    device: torch.device,
) -> SharedParts:
    """What a head shares with its target, with logits of these tokens alone, if any are named;
    those of others are minus infinity.

    prune  these rows of the output head
    """
    if tokens is None:
        return shared
    output = OutputVocabulary(tokens, tokens, vocab_size)
    return replace(shared, head=prune(tokens), place=LogitsMap(output, device))


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return torch.load(path, weights_only=True, map_location="cpu")
