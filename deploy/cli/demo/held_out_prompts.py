"""The bundled prompts, cut from files that no bundled model was trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """`name`: file and line that the prompt was cut from."""

    name: str
    text: str


def held_out_prompts(count: int | None = None) -> list[HeldOutPrompt]:
    """`count` prompts spread evenly over all of them; all by default."""
    path = Path(__file__).parents[2] / "assets" / "prompts" / "held_out.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [HeldOutPrompt(row["name"], row["prompt"]) for row in rows]
    count = len(prompts) if count is None else min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
