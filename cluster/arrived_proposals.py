"""Proposals of one drafter that arrived and wait to be used."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.reroot import reroot
from ..core.types import Proposal, Query
from .committed_text import CommittedText


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    text: CommittedText
    base_len: int
    proposal: Proposal


class ArrivedProposals:
    """The newest proposal for each open request. Late ones are re-rooted where they still fit."""

    __slots__ = ("_arrivals", "num_dropped", "num_late", "num_used")

    def __init__(self) -> None:
        self._arrivals: dict[str, _Arrival] = {}
        self.num_used = 0
        self.num_late = 0
        self.num_dropped = 0

    def put(self, query: Query, text: CommittedText, proposal: Proposal) -> None:
        """Keep the answer to a query; it replaces an older one that was not used."""
        if query.request_id in self._arrivals:
            self.num_dropped += 1
        self._arrivals[query.request_id] = _Arrival(text, query.committed_len, proposal)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._arrivals.pop(request_id, None)

    def take(self, query: Query) -> Proposal | None:
        """The proposal for exactly the query's text, at most `max_nodes` long; None if none fits.

        The text must reach to the query's committed length.
        """
        arrival = self._arrivals.pop(query.request_id, None)
        if arrival is None:
            return None
        proposal: Proposal | None = arrival.proposal
        if arrival.base_len != query.committed_len:
            self.num_late += 1
            since = arrival.text.tokens(arrival.base_len, query.committed_len)
            proposal = reroot(arrival.proposal, since)
            self.num_dropped += proposal is None
        if proposal is None or not (len(proposal.tokens) or proposal.probe):
            return None
        self.num_used += 1
        return proposal if len(proposal.tokens) <= query.max_nodes else _cut(proposal, query)


def _cut(proposal: Proposal, query: Query) -> Proposal:
    end = query.max_nodes
    return Proposal(
        proposal.source,
        proposal.tokens[:end],
        proposal.parents[:end],
        proposal.log_probs[:end],
        proposal.probe,
    )
