"""A prompt or a conversation of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The messages of a user.

    name           unique in its file
    text           the first turn
    category       groups prompts, empty where the file has none
    further_turns  each sent after the answer to the previous one; the answers stay in the
                   conversation
    reference      the dataset's answer; empty if it has none
    answer_tokens  most tokens of each answer, besides the measurement's limit; None: no other limit
    arrives_s      seconds after the dataset's first request; None: the dataset has no times
    """

    name: str
    text: str
    category: str = ""
    further_turns: tuple[str, ...] = ()
    reference: str = ""
    answer_tokens: int | None = None
    arrives_s: float | None = None


def spread(prompts: Sequence[BenchPrompt], count: int | None) -> list[BenchPrompt]:
    """`count` prompts spread evenly over all of them, so over all categories of a sorted file.

    A larger count repeats prompts; None takes each once.
    """
    total = len(prompts)
    if count is None:
        return list(prompts)
    if count <= total:
        return [prompts[index * total // count] for index in range(count)]
    return [prompts[index % total] for index in range(count)]
