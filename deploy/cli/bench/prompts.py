"""The prompts of a measurement: those of a file, or the bundled ones."""

from __future__ import annotations

from pathlib import Path

from ....core.errors import ConfigError
from ....measure.prompts import BenchPrompt, read_prompts
from ..demo.prompts import held_out_prompts

CHATS = Path(__file__).parents[2] / "assets" / "prompts" / "chats.jsonl"


def bench_prompts(
    path: Path | None, dataset: str | None = None, *, is_chat: bool = False
) -> list[BenchPrompt]:
    """The prompts of `path`, see `read_prompts`; None: the bundled ones, code to be continued or
    chats of two turns. Raises `ConfigError`."""
    if path is not None:
        return read_prompts(path, dataset)
    if dataset is not None:
        raise ConfigError("dataset", "needs the dataset's file: --prompts")
    if is_chat:
        return read_prompts(CHATS)
    return [BenchPrompt(prompt.name, prompt.text) for prompt in held_out_prompts()]
