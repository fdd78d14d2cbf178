"""Rounds of all servers, kept after every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ...core.errors import DraftlineError
from .measure import measure_server, measure_transformers
from .plan import Start, estimated_seconds
from .report.runs import Comparison, PeerRun, family
from .running import running
from .servers import DRAFTER, TARGET, ServerSpec
from .transformers_peer import TransformersPeer

TRANSFORMERS = "transformers, plain"
# It has no server of its own to take more at once.
TRANSFORMERS_BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Turn:
    """One start of one server in one round; a start's number tells servers' logs apart."""

    round: int
    server: str
    start: Start
    spec: ServerSpec | None

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Prompts and streams of what it measures."""
        return [(cell.label, cell.streams) for cell in self.start.cells]


def make_turns(
    rounds: Sequence[Sequence[Start]], specs: Sequence[ServerSpec], *, transformers: bool
) -> list[Turn]:
    """All servers take turns behind each start, and each round begins with another one.

    So what is compared is measured within minutes. transformers runs once, first of all: nothing
    but the versions of two libraries can change it.
    """
    turns = []
    if transformers:
        turns += [Turn(0, TRANSFORMERS, start, None) for start in _in_process(rounds[0])]
    for number, starts in enumerate(rounds if specs else ()):
        first = number % len(specs)
        for start in starts:
            turns += [
                Turn(number, spec.name, start, spec) for spec in [*specs[first:], *specs[:first]]
            ]
    return turns


def _in_process(starts: Sequence[Start]) -> list[Start]:
    found = []
    for start in starts:
        cells = tuple(cell for cell in start.cells if cell.streams in TRANSFORMERS_BATCHES)
        if cells:
            found.append(Start((), cells))
    return found


def estimate(turns: Sequence[Turn], tokens: int) -> float:
    """Seconds that the turns take, or about so many."""
    return sum(estimated_seconds(turn.start, family(turn.server), tokens) for turn in turns)


def run_turns(
    comparison: Comparison,
    turns: Sequence[Turn],
    keep: Callable[[], None],
    logs: Path,
    console: Console,
) -> list[str]:
    """Measure what `comparison` does not hold yet, and `keep` it after every turn.

    Returns what was left out because its server failed.
    """
    tokens = comparison.about["max_tokens"]
    left = [turn for turn in turns if not comparison.has(turn.round, turn.server, turn.cells)]
    failed, begin, expected = [], time.monotonic(), estimate(left, tokens)
    for place, turn in enumerate(left):
        rest = estimate(left[place:], tokens)
        spent = time.monotonic() - begin
        # What is done tells how far off the estimate is here.
        scale = spent / (expected - rest) if place else 1.0
        console.print(
            f"round {turn.round + 1}: {turn.server} ({place + 1} of {len(left)}; about "
            f"{scale * rest / 60:.0f} minutes left)"
        )
        try:
            found = _measure(turn, tokens, logs)
        except DraftlineError as error:
            console.print(f"LEFT OUT in this round: {error}", style="bold red")
            failed.append(f"round {turn.round + 1}: {turn.server}: {error}")
            continue
        comparison.runs += found
        keep()
    return failed


def _measure(turn: Turn, tokens: int, logs: Path) -> list[PeerRun]:
    if turn.spec is None:
        peer = TransformersPeer(TARGET, DRAFTER)
        return [
            measure_transformers(peer, cell, tokens, turn.round, turn.server)
            for cell in turn.start.cells
        ]
    with running(turn.spec, logs) as server:
        return measure_server(server, turn.server, turn.start, tokens, turn.round)
