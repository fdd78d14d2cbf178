"""A head for a target, from its texts to its folder."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ....core.errors import ConfigError
from ....models.heads.feature_head_config import FeatureHeadConfig
from ....models.heads.load_head import HeadConfig
from ....models.heads.parallel_heads import BlockwiseConfig, MedusaConfig
from ....models.heads.spec_former import SpecFormerConfig
from ....models.load.checkpoint import read_config, resolve_model_path
from ....models.load.model_info import head_dim, num_kv_heads
from ....training.heads.distilled_texts import read_texts
from ....training.heads.export import export_head
from ....training.heads.trainer import HELD_OUT_TEXTS, read_log, train_head
from .job import HeadJob, HeadRecipe, head_plan, head_recipe


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
    recipe, folder = head_recipe(kind, job), resolve_model_path(job.model)
    run_dir = job.run_dir or job.output.with_name(job.output.name + ".run")
    draft_length = job.draft_length or recipe.draft_length
    config = head_config(folder, kind, recipe, draft_length)
    plan = head_plan(job, recipe)
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


def head_config(target: Path, kind: str, recipe: HeadRecipe, draft_length: int) -> HeadConfig:
    """A head with the widths and rotations of its target."""
    config = read_config(target)
    hidden = config.hidden_size
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
