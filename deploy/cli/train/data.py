"""Texts of a target: its answers to prompts, generated with drafts."""

from __future__ import annotations

from pathlib import Path
from random import Random

from rich.console import Console

from ....cluster.config import DrafterConfig, EngineConfig
from ....core.errors import ConfigError
from ....core.request.sampling_params import SamplingParams
from ....training.corpus import training_files
from ....training.heads.distilled_texts import DistilledText, TextFolder
from ....training.prompts import cut_prompts
from ...engine.engine import Engine
from ...settings.settings import DEFAULT_DRAFTERS
from ..bench.prompts import bench_prompts
from ..progress import progress
from .job import DataJob

# Prompts of each file that the demo models were trained on.
PROMPTS_PER_FILE = 8


def make_texts(job: DataJob, console: Console) -> None:
    """Answer prompts until the folder has `num_texts`; those that it has already are kept.

    Raises `ConfigError`.
    """
    prompts = _prompts(job.prompts)
    if not prompts:
        raise ConfigError("prompts", f"{job.prompts} has none; give a file with prompts")
    manifest: dict[str, object] = {
        "model": job.model, "seed": job.seed, "temperature": job.temperature,
        "max_tokens": job.max_tokens, "prompts": str(job.prompts or "training files"),
    }  # fmt: skip
    folder = TextFolder(job.output, manifest)
    done = len(folder)
    if done < job.num_texts:
        with progress("starting", total=1, unit="engines"):
            engine = Engine(_engine_config(job))
        with engine:
            _answer(engine, job, prompts, folder, done)
    console.print(f"{max(done, job.num_texts)} texts in {job.output}")


def _prompts(path: Path | None) -> list[str]:
    if path is not None:
        return [prompt.text for prompt in bench_prompts(path)]
    found = [
        prompt.prompt
        for file in training_files(more=True)
        for prompt in cut_prompts(file, PROMPTS_PER_FILE)
    ]
    # Neighbours in a file are alike.
    Random(0).shuffle(found)
    return found


def _engine_config(job: DataJob) -> EngineConfig:
    drafters = [DrafterConfig.model_validate(fields) for fields in DEFAULT_DRAFTERS]
    return EngineConfig(model=job.model, drafters=drafters, max_num_seqs=job.max_num_seqs)


def _answer(
    engine: Engine, job: DataJob, prompts: list[str], folder: TextFolder, done: int
) -> None:
    with progress("answering", total=job.num_texts, unit="texts", done=done) as work:
        while done < job.num_texts:
            count = min(job.max_num_seqs, job.num_texts - done)
            chosen = [prompts[(done + place) % len(prompts)] for place in range(count)]
            # A seed for each group: a repeated prompt gets another answer.
            params = SamplingParams(
                max_tokens=job.max_tokens, temperature=job.temperature, seed=job.seed + done
            )
            folder.add(
                DistilledText(
                    (*answer.prompt_token_ids, *answer.token_ids), len(answer.prompt_token_ids)
                )
                for answer in engine.generate(chosen, params)
            )
            done += count
            work.advance(count)
