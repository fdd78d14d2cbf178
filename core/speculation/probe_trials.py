"""Which drafters' probes go into a step.

Probes are rows that the target computes for a drafter beside the tree (SPECTRA's pools, lookahead).
What they find is proposed in later steps, so a probe is tried for some steps of one request in a
row, paid from saved time. It goes into all requests of its drafter while the tokens that it brings
save more than its rows take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Steps that probes are taken to bring nothing for, before any was tried; what a step leaves of the
# weight of those before it.
PRIOR_STEPS, DECAY = 16.0, 0.99
# Steps of one request in a row that a trial lasts.
TRIAL_STEPS = 24
# Weight of the newest probe in the mean number of its rows.
ROWS_WEIGHT = 0.1


@dataclass(slots=True)
class _Probe:
    """A drafter's probes: rows of one, steps that had one and the tokens that it brought them,
    seconds that may be spent on trying it, and the request of the trial with its steps left."""

    rows: float
    steps: float = 0.0
    tokens: float = 0.0
    credit_s: float = 0.0
    request_id: str = ""
    steps_left: int = 0


class ProbeTrials:
    """Learns what the probes of each drafter bring."""

    __slots__ = ("_probes",)

    def __init__(self) -> None:
        self._probes: dict[str, _Probe] = {}

    def note_rows(self, drafter: str, num_rows: int) -> None:
        """A drafter wants to probe with so many rows for a request."""
        probe = self._probes.get(drafter)
        if probe is None:
            self._probes[drafter] = _Probe(float(num_rows))
        else:
            probe.rows += ROWS_WEIGHT * (num_rows - probe.rows)

    def save_up(self, seconds: float) -> None:
        """So many seconds more may be spent on trying them."""
        for probe in self._probes.values():
            probe.credit_s += seconds / len(self._probes)

    def choose(
        self,
        by_drafter: Mapping[str, tuple[str, ...]],
        token_s: float,
        rows_s: Callable[[float], float],
    ) -> dict[str, frozenset[str]]:
        """The requests, of those that each drafter is asked for, whose probes go into the step.

        token_s  seconds that a token saves
        rows_s   seconds that so many rows more take
        """
        probing: dict[str, frozenset[str]] = {}
        for name, probe in self._probes.items():
            if not (ids := by_drafter.get(name, ())):
                continue
            gain_s = token_s * probe.tokens / (probe.steps + PRIOR_STEPS)
            loss_s = rows_s(probe.rows) - gain_s
            if loss_s < 0:
                probing[name] = frozenset(ids)
                continue
            trial_s = TRIAL_STEPS * loss_s
            if not probe.steps_left and trial_s <= probe.credit_s:
                probe.credit_s -= trial_s
                probe.request_id, probe.steps_left = ids[-1], TRIAL_STEPS
            if probe.steps_left and probe.request_id in ids:
                probe.steps_left -= 1
                probing[name] = frozenset({probe.request_id})
        return probing

    def learn(self, drafter: str, num_tokens: float) -> None:
        """A step with a drafter's probe brought so many tokens more than its steps usually do."""
        probe = self._probes[drafter]
        probe.steps = DECAY * probe.steps + 1.0
        probe.tokens = DECAY * probe.tokens + num_tokens

    def forget(self, request_id: str) -> None:
        """A request has ended, and a trial with it."""
        for probe in self._probes.values():
            if probe.request_id == request_id:
                probe.request_id, probe.steps_left = "", 0
