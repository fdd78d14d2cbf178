"""What the demo asks: the bundled prompts, cut from files that no bundled model was trained on, and
questions to chat models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """`name`: file and line that the prompt was cut from, or what a question is about."""

    name: str
    text: str
    is_question: bool = False


QUESTIONS = [
    DemoPrompt(
        "a recipe",
        "Write a recipe for pancakes: first the ingredients, then the steps.",
        is_question=True,
    ),
    DemoPrompt(
        "a correction",
        "Correct the spelling of this text, and repeat it: The quik brown fox jumps over the lazi "
        "dog. The dog sleeps on, and the fox runs back into the forrest.",
        is_question=True,
    ),
    DemoPrompt("an explanation", "Explain to a child why the sky is blue.", is_question=True),
]


def held_out_prompts(count: int | None = None) -> list[DemoPrompt]:
    """`count` prompts spread evenly over all of them; all by default."""
    path = Path(__file__).parents[2] / "assets" / "prompts" / "held_out.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [DemoPrompt(row["name"], row["prompt"]) for row in rows]
    count = len(prompts) if count is None else min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
