"""Prompts of a measurement: files in Spec-Bench's, HumanEval's or our own form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

FIELD = "prompts"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """`name` is unique in its file; `category` groups prompts, empty where the file has none."""

    name: str
    text: str
    category: str = ""


def read_prompts(path: Path) -> list[BenchPrompt]:
    """The prompts of a JSON-lines file, whose form is told by the keys of each line.

    Spec-Bench: `question_id`, `category`, `turns`; the first turn is taken, since the others ask
    about an answer. HumanEval: `task_id`, `prompt`. Ours: `name`, `prompt`. Raises `ConfigError`
    naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    prompts = [
        _parse(f"{path} line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(FIELD, f"{path} holds no prompt")
    return prompts


def spread(prompts: Sequence[BenchPrompt], count: int | None) -> list[BenchPrompt]:
    """`count` prompts spread evenly over all of them, so over all categories of a sorted file.

    More than there are repeats them; None takes each once.
    """
    total = len(prompts)
    if count is None:
        return list(prompts)
    if count <= total:
        return [prompts[index * total // count] for index in range(count)]
    return [prompts[index % total] for index in range(count)]


def _parse(where: str, line: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(FIELD, f"{where} is not JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise ConfigError(FIELD, f"{where} is not a JSON object")
    name = next((str(row[key]) for key in ("question_id", "task_id", "name") if key in row), where)
    text = _text(row)
    if not text:
        raise ConfigError(
            FIELD, f"{where} has no text: expected `turns` (Spec-Bench) or `prompt` (HumanEval)"
        )
    return BenchPrompt(name, text, str(row.get("category", "")))


def _text(row: dict[str, Any]) -> str:
    turns = row.get("turns")
    value = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
    return value if isinstance(value, str) else ""
