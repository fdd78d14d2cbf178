"""A head for a target, from its texts to its folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ....core.errors import ConfigError
from ....measure.report.plots import require_matplotlib
from ....models.heads.load_head import Head
from ....models.load.checkpoint import resolve_model_path
from ....models.text.tokenizer import load_tokenizer
from ....training.corpus import training_files
from ....training.heads.corpus_texts import corpus_texts
from ....training.heads.curves import CURVES, draw_curves
from ....training.heads.distilled_texts import DistilledText, read_texts
from ....training.heads.export import export_head
from ....training.heads.trainer import HELD_OUT_TEXTS, HeadPlan, read_log, read_losses, train_head
from ..progress import progress
from .data import PROMPTS_PER_FILE
from .head_config import head_config
from .job import HeadJob, head_plan, head_recipe


def fit_head(kind: str, job: HeadJob, console: Console) -> None:
    """Train a head of a kind, or go on with it, and write it to the job's folder.

    Of several processes (torchrun, `accelerate launch`) the first writes.

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
    config, plan = head_config(folder, kind, job, texts), head_plan(job, recipe)
    if not job.self_distillation:
        texts = [*_as_written(texts[:-HELD_OUT_TEXTS], job.model), *texts[-HELD_OUT_TEXTS:]]
    head = train_head(config, folder, texts, plan, run_dir, progress=progress)
    state = PartialState()
    if state.is_main_process:
        record = {
            "kind": kind,
            "target": job.model,
            "texts": len(texts),
            "self_distillation": job.self_distillation,
            **_record(head, plan, run_dir),
        }
        export_head(head, job.output, {"architectures": [recipe.architecture]}, record)
        _draw(run_dir, job.output, f"{kind} head of {job.model}", console)
        depths = ", ".join(f"{share:.2f}" for share in record["acceptance_by_depth"])
        console.print(f"accepted at each depth of a greedy chain: {depths}")
        console.print(f"{kind} head in {job.output}")
    state.destroy_process_group()


def _record(head: Head, plan: HeadPlan, run_dir: Path) -> dict[str, Any]:
    """How it was trained and how far, for training.json."""
    step, loss, *shares = list(read_log(run_dir))[-1]
    return {
        "steps": int(step),
        "loss": round(loss, 4),
        "acceptance_by_depth": shares,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
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
    """Curves beside the head. A run is not lost for want of them."""
    try:
        require_matplotlib("curves")
    except ConfigError as error:
        console.print(f"no {CURVES}: {error}")
        return
    draw_curves(read_losses(run_dir), list(read_log(run_dir)), output / CURVES, title)
