"""The prompts of a measurement: those of a file, or the bundled ones."""

from __future__ import annotations

from pathlib import Path

from ....core.errors import ConfigError
from ....measure.prompts.bench_prompt import BenchPrompt
from ....measure.prompts.files import read_prompts
from ..demo.prompts import held_out_prompts


def bench_prompts(path: Path | None, dataset: str | None = None) -> list[BenchPrompt]:
    """The prompts of `path`, see `read_prompts`; None: the bundled ones. Raises `ConfigError`."""
    if path is not None:
        return read_prompts(path, dataset)
    if dataset is not None:
        raise ConfigError("dataset", "needs the dataset's file: --prompts")
    return [BenchPrompt(prompt.name, prompt.text) for prompt in held_out_prompts()]
