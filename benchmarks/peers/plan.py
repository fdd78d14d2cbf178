"""Which prompts are asked at which number of streams, behind which start of a server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from ...core.errors import ConfigError
from ...deploy.cli.bench.endpoints import bench_prompts
from ...measure.prompts import BenchPrompt
from .target import Target

BUNDLED = "bundled"
FIELD = "prompts"


def read_sets(target: Target, options: Sequence[str], room: int) -> dict[str, list[BenchPrompt]]:
    """The sets of `bundled` and of LABEL=FILE: their prompts of at most `room` tokens.

    Texts that stand twice are taken once. Raises `ConfigError`.
    """
    sets: dict[str, list[BenchPrompt]] = {}
    for option in options:
        label, path = read_option(option)
        if label in sets:
            raise ConfigError(FIELD, f"{label} is given twice")
        found = bench_prompts(path, is_chat=target.is_chat)
        sets[label] = fitting(found, lambda text: len(target.prompt_ids(text)), room)
    return sets


def read_option(option: str) -> tuple[str, Path | None]:
    """A label and its file; None for the bundled ones. Raises `ConfigError`."""
    label, equals, path = option.partition("=")
    if option == BUNDLED:
        return BUNDLED, None
    if not equals or not label or not path:
        raise ConfigError(FIELD, f"{option!r} is neither {BUNDLED} nor LABEL=FILE")
    return label, Path(path)


def fitting(
    prompts: Sequence[BenchPrompt], count: Callable[[str], int], room: int
) -> list[BenchPrompt]:
    """Prompts of at most `room` tokens, each text once, in their order."""
    once: dict[str, BenchPrompt] = {}
    for prompt in prompts:
        once.setdefault(prompt.text, prompt)
    return [prompt for prompt in once.values() if count(prompt.text) <= room]


# Prompts of the warm-up.
WARM_UP = 2

PromptSets = Mapping[str, Sequence[BenchPrompt]]


@dataclass(frozen=True, slots=True)
class PeerCell:
    """Prompts of the set `label`, asked so many at once."""

    label: str
    streams: int
    prompts: tuple[BenchPrompt, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of a server is asked, `warm_up` first: no prompt twice."""

    warm_up: tuple[BenchPrompt, ...]
    cells: tuple[PeerCell, ...]


def make_starts(sets: PromptSets, streams: Sequence[int], least: int, seed: int) -> list[Start]:
    """Deal prompts out: one for every stream and at least `least` to each number of streams.

    Servers remember what they answered (suffix decoding drafts from it), so where a set has too
    few prompts, the next number of streams waits for another start. One start asks all sets. A
    `seed`, that of a round, has its own order: neighbours in a file are alike, and rounds should
    not measure the same few prompts. Raises `ConfigError` for a set that is too small at all.
    """
    starts: list[list[PeerCell]] = []
    warm_ups: dict[int, tuple[BenchPrompt, ...]] = {}
    for label, prompts in sets.items():
        order = list(prompts)
        Random(seed).shuffle(order)
        for number, group in enumerate(_groups(label, len(order), streams, least)):
            if number == len(starts):
                starts.append([])
                warm_ups[number] = tuple(order[:WARM_UP])
            sizes = [max(least, count) for count in group]
            ends = list(accumulate(sizes, initial=WARM_UP))
            starts[number] += [
                PeerCell(label, count, tuple(order[begin:end]))
                for count, begin, end in zip(group, ends[:-1], ends[1:], strict=True)
            ]
    return [Start(warm_ups[number], tuple(cells)) for number, cells in enumerate(starts)]


def _groups(label: str, total: int, streams: Sequence[int], least: int) -> list[list[int]]:
    """Numbers of streams by start: each joins the first start that has prompts left for it."""
    groups: list[list[int]] = []
    left: list[int] = []
    for count in streams:
        size = max(least, count)
        place = next((at for at, free in enumerate(left) if free >= size), len(groups))
        if place == len(groups):
            groups.append([])
            left.append(total - WARM_UP)
        if left[place] < size:
            raise ConfigError(
                "prompts",
                f"{label} has {total}, and {size + WARM_UP} different ones are needed for {count} "
                "streams; give a longer file, fewer streams or a lower --num-prompts",
            )
        groups[place].append(count)
        left[place] -= size
    return groups


def digest(prompts: Sequence[BenchPrompt]) -> str:
    """Tells sets of prompts apart."""
    return hashlib.sha256(repr([prompt.text for prompt in prompts]).encode()).hexdigest()[:16]


# Several streams share what a pass costs: tokens a second rise with streams ** SCALING.
SCALING = 0.6
START_S = {"vLLM": 40.0, "draftline": 12.0, "llama.cpp": 2.0}


def estimated_seconds(start: Start, family: str, tokens: int, seconds_a_pass: float) -> float:
    """About how long one start of a server takes, with answers of so many tokens."""
    of_one = tokens * seconds_a_pass
    seconds = START_S.get(family, 0.0) + WARM_UP ** (1 - SCALING) * of_one
    return seconds + sum(len(cell.prompts) * of_one / cell.streams**SCALING for cell in start.cells)
