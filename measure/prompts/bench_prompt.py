"""A prompt of a measurement, or a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What a user says.

    name           unique in its file
    text           the first turn
    category       groups prompts, empty where the file has none
    further_turns  each said once the one before is answered; the answers stay in the conversation
    reference      an answer that the dataset has, empty where it has none
    answer_tokens  most tokens of each answer, beside the measurement's own bound; None: no other
    arrives_s      seconds after the dataset's first request; None: it tells no times
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

    More than there are repeats them; None takes each once.
    """
    total = len(prompts)
    if count is None:
        return list(prompts)
    if count <= total:
        return [prompts[index * total // count] for index in range(count)]
    return [prompts[index % total] for index in range(count)]
