"""Heads of every way to train for tiny targets, and texts to train them on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from draftline.models.heads.dflash_config import DFlashConfig
from draftline.models.heads.dspark import DSparkConfig
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.medusa import MedusaConfig
from draftline.models.heads.p_eagle import PEagleConfig
from draftline.models.heads.spec_former import SpecFormerConfig
from draftline.models.load.model_info import read_model_info
from draftline.training.heads.distilled_texts import DistilledText
from draftline.training.heads.feature_passes import PassPlan
from draftline.training.heads.learning_rate import LearningRate
from draftline.training.heads.student import StudentConfig
from draftline.training.heads.trainer import HeadPlan

PLAN = HeadPlan(
    num_steps=6, texts_per_step=2, window=12, rate=LearningRate(peak=1e-3), checkpoint_every=3,
    passes=PassPlan(num_passes=2),
)  # fmt: skip


def griffin(checkpoint: Path) -> FeatureHeadConfig:
    info = read_model_info(checkpoint)
    return FeatureHeadConfig(
        fusion="guided", hidden_size=info.hidden_size, intermediate_size=24, num_heads=2,
        num_kv_heads=1, head_dim=8, vocab_size=info.vocab_size, fusion_size=20, splits_output=True,
        has_fusion_bias=True, feature_size=info.hidden_size,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def dflash(checkpoint: Path) -> DFlashConfig:
    info = read_model_info(checkpoint)
    return DFlashConfig(
        hidden_size=info.hidden_size, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8,
        block_size=4, mask_token=info.vocab_size - 1, num_layers=2, num_features=2,
        feature_size=info.hidden_size, feature_layers=(0, info.num_layers - 1),
        vocab_size=info.vocab_size, rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def dspark(checkpoint: Path) -> DSparkConfig:
    sizes = dflash(checkpoint)
    own = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    width = sizes.hidden_size + 4
    return DSparkConfig(
        **own | {"is_shifted": True}, markov_kind="rnn", markov_rank=4, confidence_size=width
    )


def eagle3(checkpoint: Path) -> FeatureHeadConfig:
    info = read_model_info(checkpoint)
    return FeatureHeadConfig(
        fusion="pair", hidden_size=info.hidden_size, intermediate_size=24, num_heads=2,
        num_kv_heads=1, head_dim=8, vocab_size=info.vocab_size, num_features=3,
        feature_size=info.hidden_size, feature_layers=(0, 1, 3), draft_vocab_size=50,
        has_token_map=True, rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def p_eagle(checkpoint: Path) -> PEagleConfig:
    sizes = eagle3(checkpoint)
    own = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    return PEagleConfig(
        **own | {"num_layers": 2, "has_embedding": True}, mask_token=sizes.vocab_size - 1,
        draft_length=3,
    )  # fmt: skip


CONFIGS = {
    "griffin": griffin, "dflash": dflash, "dspark": dspark, "eagle3": eagle3, "p_eagle": p_eagle,
}  # fmt: skip


def medusa(checkpoint: Path) -> MedusaConfig:
    info = read_model_info(checkpoint)
    return MedusaConfig(info.hidden_size, 3, info.vocab_size, draft_vocab_size=info.vocab_size)


def spec_former(checkpoint: Path) -> SpecFormerConfig:
    return SpecFormerConfig(
        hidden_size=read_model_info(checkpoint).hidden_size, intermediate_size=24, num_heads=2,
        num_kv_heads=1, head_dim=8, draft_length=3,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def student(checkpoint: Path) -> StudentConfig:
    """Of two layers of the target."""
    vocab_size = read_model_info(checkpoint).vocab_size
    return StudentConfig(folder=str(checkpoint), layers=(0, 2), vocab_size=vocab_size)


# Of each way to train a head, then of each way to train.
EVERY_CONFIG = CONFIGS | {"medusa": medusa, "spec_former": spec_former}
EVERY_NETWORK = EVERY_CONFIG | {"student": student}


def texts(vocab_size: int, count: int = 40) -> list[DistilledText]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (count, 14), generator=rng)
    return [DistilledText(tuple(row), ((3, 14),)) for row in ids.tolist()]


def uneven_texts(vocab_size: int) -> list[DistilledText]:
    """Of other lengths, some with nothing that a deep draft could be trained on."""
    return [
        DistilledText(text.tokens[: 14 - index % 5 * 2], ((3 + index % 2, 14 - index % 5 * 2),))
        for index, text in enumerate(texts(vocab_size))
    ]
