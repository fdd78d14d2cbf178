"""The figures of prompts that were completed twice: with drafting off and on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .client import DemoRun


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with drafting off and on."""

    name: str
    plain: DemoRun
    drafted: DemoRun

    @property
    def is_equal(self) -> bool:
        """Whether both texts are the same."""
        return self.plain.text == self.drafted.text

    @property
    def speedup(self) -> float:
        """Time without drafting over time with it, per token."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


def total(results: Sequence[Comparison]) -> Comparison:
    """All prompts as one."""
    return Comparison(
        "all",
        _sum([result.plain for result in results]),
        _sum([result.drafted for result in results]),
    )


def _sum(runs: Sequence[DemoRun]) -> DemoRun:
    """Several runs as one; its tau is weighted by verification steps (tokens / tau)."""
    tokens = sum(run.num_tokens for run in runs)
    steps = sum(run.num_tokens / run.tau for run in runs)
    accepted: Counter[str] = Counter()
    for run in runs:
        accepted.update(run.accepted)
    return DemoRun(
        text="\n".join(run.text for run in runs),
        num_tokens=tokens,
        seconds=sum(run.seconds for run in runs),
        tau=tokens / steps if steps else 1.0,
        accepted=accepted,
    )
