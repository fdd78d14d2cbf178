"""The prompts of a measurement: those of a file, or the bundled ones."""

from __future__ import annotations

from pathlib import Path

from ....measure.clients.prompts import BenchPrompt, read_prompts
from ..demo.held_out_prompts import held_out_prompts


def bench_prompts(path: Path | None) -> list[BenchPrompt]:
    """The prompts of `path`; None: the bundled ones. Raises `ConfigError`."""
    if path is not None:
        return read_prompts(path)
    return [BenchPrompt(prompt.name, prompt.text) for prompt in held_out_prompts()]
