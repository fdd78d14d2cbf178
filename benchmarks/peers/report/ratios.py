"""draftline beside the best of all peers, and plain beside plain, round by round."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .runs import OUR_DEFAULT, OUR_PLAIN, VLLM_PLAIN, Comparison, PeerRun


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens a second over another server's, one a round; `other` is the one met most often."""

    rounds: tuple[float, ...]
    other: str

    @property
    def median(self) -> float:
        """Over rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """Least and most."""
        return min(self.rounds), max(self.rounds)


def to_best_peer(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline as it serves by default, over the fastest peer of the same round."""
    cell = comparison.cell(prompts, streams)
    peers = {name: runs for name, runs in cell.items() if not next(iter(runs.values())).is_ours}
    return _ratio(cell.get(OUR_DEFAULT, {}), peers)


def plain_to_vllm(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline without drafters over vLLM without speculation."""
    cell = comparison.cell(prompts, streams)
    others = {VLLM_PLAIN: cell[VLLM_PLAIN]} if VLLM_PLAIN in cell else {}
    return _ratio(cell.get(OUR_PLAIN, {}), others)


def best_setting(comparison: Comparison, prompts: str, streams: int) -> Ratio | None:
    """draftline's fastest setting over the fastest peer of the same round."""
    cell = comparison.cell(prompts, streams)
    ours: dict[int, PeerRun] = {}
    peers = {}
    for name, runs in cell.items():
        if not next(iter(runs.values())).is_ours:
            peers[name] = runs
            continue
        for turn, run in runs.items():
            if turn not in ours or run.rate > ours[turn].rate:
                ours[turn] = run
    return _ratio(ours, peers)


def _ratio(
    ours: Mapping[int, PeerRun], others: Mapping[str, Mapping[int, PeerRun]]
) -> Ratio | None:
    """Over the best of `others`; rounds that one of them missed, but ran in another, are left out.

    A peer of a single round (transformers is one) counts in that round only.
    """
    steady = [runs for runs in others.values() if len(runs) > 1]
    ratios, best = [], []
    for turn, run in ours.items():
        rivals = {name: runs[turn] for name, runs in others.items() if turn in runs}
        if not rivals or any(turn not in runs for runs in steady):
            continue
        name = max(rivals, key=lambda one: rivals[one].rate)
        ratios.append(run.rate / rivals[name].rate)
        best.append(name)
    if not ratios:
        return None
    return Ratio(tuple(ratios), Counter(best).most_common(1)[0][0])


def least(ratios: Sequence[Ratio | None]) -> float | None:
    """The smallest median; None without any."""
    known = [ratio.median for ratio in ratios if ratio is not None]
    return min(known, default=None)
