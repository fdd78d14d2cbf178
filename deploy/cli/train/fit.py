"""`draftline train KIND`: texts and configuration of a drafter, its training and its folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedConfig

from ....core.errors import ConfigError, StageError, StageLost
from ....measure.report.plots import require_matplotlib
from ....models.heads.dflash_config import DFlashConfig
from ....models.heads.dspark import DSparkConfig
from ....models.heads.feature_head_config import FeatureHeadConfig, default_layers
from ....models.heads.load_head import Head, HeadConfig, load_head, misfits
from ....models.heads.medusa import MedusaConfig
from ....models.heads.p_eagle import PEagleConfig
from ....models.heads.spec_former import SpecFormerConfig
from ....models.load.checkpoint import read_config, resolve_head_path, resolve_model_path
from ....models.load.model_info import ModelInfo, head_dim, num_kv_heads, read_model_info
from ....models.text.tokenizer import load_tokenizer
from ....training.corpus import training_files
from ....training.heads.curves import CURVES, draw_curves
from ....training.heads.distilled_texts import DistilledText, corpus_texts, read_texts
from ....training.heads.export import export_head, export_student
from ....training.heads.objectives import Network
from ....training.heads.student import Student, StudentConfig
from ....training.heads.trainer import (
    HELD_OUT_TEXTS,
    HeadPlan,
    HeadRun,
    read_log,
    read_losses,
    train_head,
)
from ..progress import progress
from .dry_run import print_dry_run
from .job import HeadJob
from .recipes import HeadRecipe, head_plan, head_recipe
from .stages import target_stages
from .student import student_config
from .texts import PROMPTS_PER_FILE

# Targets with fewer layers than this are read up to their last state.
FEW_LAYERS = 12
# Width between a token and what it adds to logits, as DSpark publishes it; less for small targets.
MARKOV_RANK = 256


def head_config(
    target: Path, kind: str, job: HeadJob, texts: Sequence[DistilledText]
) -> HeadConfig:
    """A head with the widths and rotations of its target. Raises `ConfigError`."""
    config = read_config(target)
    recipe = head_recipe(kind, job)
    hidden, rows = config.hidden_size, config.vocab_size
    draft_length = recipe.draft_length
    if kind == "medusa":
        return MedusaConfig(hidden, draft_length, rows, draft_vocab_size=rows)
    if kind in {"dflash", "dspark"}:
        return _block_config(config, kind, job, recipe, texts)
    if kind == "specformer":
        return SpecFormerConfig(
            draft_length=draft_length,
            is_bidirectional=recipe.is_bidirectional,
            **_layer_sizes(config, job),
        )
    if kind in {"eagle3", "p_eagle"}:
        pair = _pair_config(config, job)
        mask = mask_token(texts, rows, config.eos_token_id)
        return pair if kind == "eagle3" else _masked_config(pair, recipe, mask)
    assert recipe.fusion is not None
    draft_rows, sizes = _draft_rows(config, job), _layer_sizes(config, job)
    has_own_tokens = draft_rows < rows
    return FeatureHeadConfig(
        fusion=recipe.fusion,
        vocab_size=rows,
        fusion_size=0 if recipe.fusion == "linear" else sizes["intermediate_size"],
        draft_vocab_size=draft_rows if has_own_tokens else 0,
        has_target_rows=has_own_tokens,
        has_token_map=has_own_tokens,
        splits_output=recipe.splits_output,
        has_fusion_bias=True,
        has_paper_fusion=recipe.has_paper_fusion,
        feature_size=hidden,
        **sizes,
    )


def _draft_rows(config: PreTrainedConfig, job: HeadJob) -> int:
    rows = config.vocab_size
    draft_rows = job.draft_vocab_size or rows
    if draft_rows > rows:
        raise ConfigError(
            "draft_vocab_size", f"is {draft_rows}, more than the target's {rows} tokens"
        )
    return draft_rows


def _layer_sizes(config: PreTrainedConfig, job: HeadJob) -> dict[str, Any]:
    """Of a layer of the target, where the job does not say otherwise."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": job.intermediate_size or config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": num_kv_heads(config),
        "head_dim": head_dim(config),
        "rms_norm_eps": config.rms_norm_eps,
        "max_positions": config.max_position_embeddings,
        "rope": dict(config.rope_parameters),
    }


def _pair_config(config: PreTrainedConfig, job: HeadJob) -> FeatureHeadConfig:
    layers = read_layers(job.feature_layers) or pair_layers(config.num_hidden_layers)
    rows, draft_rows = config.vocab_size, _draft_rows(config, job)
    if job.share_output_head and draft_rows == rows:
        raise ConfigError("share_output_head", "needs a smaller --draft-vocab-size")
    return FeatureHeadConfig(
        fusion="pair",
        vocab_size=rows,
        feature_size=config.hidden_size,
        num_features=len(layers),
        feature_layers=() if layers == default_layers(config.num_hidden_layers) else layers,
        draft_vocab_size=draft_rows,
        has_target_rows=job.share_output_head,
        has_token_map=draft_rows < rows,
        **_layer_sizes(config, job),
    )


def _masked_config(pair: FeatureHeadConfig, recipe: HeadRecipe, mask: int) -> PEagleConfig:
    """An EAGLE-3 head's with more layers and an embedding of its own, that of masks among it."""
    own = {field.name: getattr(pair, field.name) for field in fields(pair)}
    return PEagleConfig(
        **own | {"num_layers": recipe.num_layers, "has_embedding": True},
        mask_token=mask,
        draft_length=recipe.draft_length,
    )


def _block_config(
    config: PreTrainedConfig, kind: str, job: HeadJob, recipe: HeadRecipe,
    texts: Sequence[DistilledText],
) -> DFlashConfig:  # fmt: skip
    layers = read_layers(job.feature_layers) or tapped_layers(config.num_hidden_layers)
    hidden = config.hidden_size
    sizes: dict[str, Any] = {
        "num_layers": recipe.num_layers, "num_features": len(layers), "feature_size": hidden,
        "feature_layers": layers, "vocab_size": config.vocab_size,
        "mask_token": mask_token(texts, config.vocab_size, config.eos_token_id),
        **_layer_sizes(config, job),
    }  # fmt: skip
    if kind == "dflash":
        return DFlashConfig(block_size=recipe.draft_length + 1, **sizes)
    rank = job.markov_rank or min(MARKOV_RANK, max(1, hidden // 4))
    return DSparkConfig(
        block_size=recipe.draft_length,
        is_shifted=True,
        markov_kind=job.markov_kind,
        markov_rank=rank,
        confidence_size=hidden + rank,
        **sizes,
    )


def read_layers(text: str | None) -> tuple[int, ...]:
    """Layers of `--feature-layers`; empty where it is not given. Raises `ConfigError`."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            "feature_layers", f"are numbers separated by commas, such as 1,3,5; not {text!r}"
        ) from None


def pair_layers(num_target_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of a target, whose outputs an EAGLE-3 head reads.

    Those of its project; up to the last one of targets that have few, where all tell something.
    """
    if num_target_layers >= FEW_LAYERS:
        return default_layers(num_target_layers)
    low = max(-1, min(1, num_target_layers - 3))
    spread = np.linspace(low, num_target_layers - 1, 3).round()
    return tuple(sorted({int(layer) for layer in spread}))


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
    tokens = np.concatenate([text.tokens for text in texts])
    counts = np.bincount(tokens, minlength=vocab_size)[::-1].copy()
    if end is not None:
        counts[vocab_size - 1 - end] = np.iinfo(counts.dtype).max
    return vocab_size - 1 - int(counts.argmin())


def fit_head(kind: str, job: HeadJob, console: Console) -> None:
    """Train a head of a kind or a model, or go on with it, and write it to the job's folder; of a
    dry run print what it would take.

    Of several processes (torchrun, `accelerate launch`) the first writes.

    Raises `ConfigError`, `CheckpointError`; `StageLost` and `StageError` of the target's stages.
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
    initial = None
    if kind == "model":
        config = student_config(folder, job, texts)
    else:
        config = head_config(folder, kind, job, texts)
        if job.initial_head is not None:
            initial = read_initial_head(job.initial_head, kind, config, read_model_info(folder))
            config = initial.config
    trained = read_model_info(config.folder if isinstance(config, StudentConfig) else folder)
    plan = head_plan(job, recipe, trained.hidden_size)
    # A student may have room for less than the target.
    plan = replace(plan, window=min(plan.window, trained.max_context_len))
    if not job.self_distillation:
        texts = [*_as_written(texts[:-HELD_OUT_TEXTS], job.model), *texts[-HELD_OUT_TEXTS:]]
    with nullcontext() if job.stages is None else target_stages(job.stages, config) as states:
        if job.dry_run:
            run = HeadRun(config, folder, texts, plan, states, initial)
            print_dry_run(run, kind, job, console)
            return
        try:
            network = train_head(
                config, folder, texts, plan, run_dir, states=states, initial=initial,
                progress=progress,
            )  # fmt: skip
        except (StageError, StageLost) as error:
            raise type(error)(
                f"{error}. {run_dir} has the last checkpoint, if there was one: the same command "
                "goes on from there"
            ) from error
    state = PartialState()
    if state.is_main_process:
        record = {
            "kind": kind,
            "target": job.model,
            "stages": job.stages and job.stages.model_dump(exclude_unset=True, exclude={"model"}),
            "texts": len(texts),
            "initial_head": job.initial_head,
            "self_distillation": job.self_distillation,
            **_record(network, plan, run_dir),
        }
        if isinstance(network, Student):
            record["student"] = asdict(network.config)
            export_student(network, job.output, load_tokenizer(folder), record)
        else:
            export_head(network, job.output, {"architectures": [recipe.architecture]}, record)
        name = kind if kind == "model" else f"{kind} head"
        _draw(run_dir, job.output, f"{name} of {job.model}", console)
        depths = ", ".join(f"{share:.2f}" for share in record["acceptance_by_depth"])
        console.print(f"accepted at each depth of a greedy chain: {depths}")
        console.print(f"{name} in {job.output}")
    state.destroy_process_group()


def read_initial_head(name: str, kind: str, like: HeadConfig, target: ModelInfo) -> Head:
    """The head that a run goes on from.

    like  the config of a new head of the kind

    Raises `CheckpointError`, and `ConfigError` for one of another kind or that does not fit the
    target.
    """
    head = load_head(resolve_head_path(name))
    config = head.config
    is_alike = type(config) is type(like) and (
        getattr(config, "fusion", None) == getattr(like, "fusion", None)
    )
    if not is_alike:
        raise ConfigError("initial_head", f"{name} is no {kind} head")
    if problems := misfits(config, target):
        raise ConfigError("initial_head", f"{name} does not fit the target: {'; '.join(problems)}")
    return head


def _record(network: Network, plan: HeadPlan, run_dir: Path) -> dict[str, Any]:
    """How it was trained and how far, for training.json."""
    step, loss, *shares = list(read_log(run_dir))[-1]
    return {
        "steps": int(step),
        "loss": round(loss, 4),
        "acceptance_by_depth": shares,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "plan": asdict(plan),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _as_written(texts: Sequence[DistilledText], model: str) -> list[DistilledText]:
    """With what follows their prompts in the training files."""
    tokenizer = load_tokenizer(model)
    files = training_files(more=True)
    return corpus_texts(texts, files, PROMPTS_PER_FILE, tokenizer.encode)


def _draw(run_dir: Path, output: Path, title: str, console: Console) -> None:
    """Curves beside the head. A failure does not end the run."""
    try:
        require_matplotlib("curves")
    except ConfigError as error:
        console.print(f"no {CURVES}: {error}")
        return
    draw_curves(read_losses(run_dir), list(read_log(run_dir)), output / CURVES, title)
