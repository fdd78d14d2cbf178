"""A head for a target, from its texts to its folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ....core.errors import ConfigError
from ....models.heads.dflash_config import DFlashConfig
from ....models.heads.feature_head_config import FeatureHeadConfig
from ....models.heads.load_head import HeadConfig
from ....models.heads.spec_former import SpecFormerConfig
from ....models.load.checkpoint import read_config, resolve_model_path
from ....models.load.model_info import head_dim, num_kv_heads
from ....training.heads.distilled_texts import DistilledText, read_texts
from ....training.heads.export import export_head
from ....training.heads.trainer import HELD_OUT_TEXTS, read_log, train_head
from .job import RECIPES, HeadJob, HeadRecipe, head_plan

# Targets with fewer layers than this are read up to their last state.
FEW_LAYERS = 12


def fit_head(kind: str, job: HeadJob, console: Console) -> None:
    """Train a head of a kind, or go on with it, and write it to the job's folder.

    Raises `ConfigError`, `CheckpointError`.
    """
    torch.set_num_threads(job.threads)
    texts = read_texts(job.texts)
    if len(texts) <= HELD_OUT_TEXTS:
        raise ConfigError(
            "texts",
            f"{job.texts} has {len(texts)} texts, of which {HELD_OUT_TEXTS} are held out; make "
            "more with `draftline train data --num-texts`",
        )
    recipe, folder = RECIPES[kind], resolve_model_path(job.model)
    run_dir = job.run_dir or job.output.with_name(job.output.name + ".run")
    config, plan = head_config(folder, recipe, job, texts), head_plan(job, recipe)
    head = train_head(config, folder, texts, plan, run_dir)
    step, loss, *shares = list(read_log(run_dir))[-1]
    record = {
        "kind": kind,
        "target": job.model,
        "texts": len(texts),
        "steps": int(step),
        "loss": round(loss, 4),
        "acceptance_by_depth": shares,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "plan": asdict(plan),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    export_head(head, job.output, {"architectures": [recipe.architecture]}, record)
    depths = ", ".join(f"{share:.2f}" for share in shares)
    console.print(f"accepted at each depth of a greedy chain: {depths}")
    console.print(f"{kind} head in {job.output}")


def head_config(
    target: Path, recipe: HeadRecipe, job: HeadJob, texts: Sequence[DistilledText]
) -> HeadConfig:
    """A head with the widths and rotations of its target."""
    config = read_config(target)
    common: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "rms_norm_eps": config.rms_norm_eps,
        "max_positions": config.max_position_embeddings,
        "rope": dict(config.rope_parameters),
    }
    if recipe is RECIPES["dflash"]:
        layers = tapped_layers(config.num_hidden_layers)
        return DFlashConfig(
            block_size=job.draft_length + 1, num_layers=job.num_layers, num_features=len(layers),
            feature_size=config.hidden_size, feature_layers=layers, vocab_size=config.vocab_size,
            mask_token=mask_token(texts, config.vocab_size, config.eos_token_id), **common,
        )  # fmt: skip
    if recipe.fusion is None:
        return SpecFormerConfig(draft_length=job.draft_length, **common)
    return FeatureHeadConfig(
        fusion=recipe.fusion,
        vocab_size=config.vocab_size,
        fusion_size=0 if recipe.fusion == "linear" else config.intermediate_size,
        splits_output=recipe.splits_output,
        has_fusion_bias=True,
        feature_size=config.hidden_size,
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
