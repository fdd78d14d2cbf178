"""Proposals of one drafter that arrived and wait to be used."""

from __future__ import annotations

from dataclasses import replace

from ...core.proposals import Proposal, Query
from ...core.tree.reroot import reroot
from .committed_text import CommittedText


class ArrivedProposals:
    """The newest proposal for each open request. Late ones are re-rooted where they still fit."""

    __slots__ = ("_arrivals", "num_dropped", "num_late", "num_late_used", "num_used")

    def __init__(self) -> None:
        # By request id: the query that was answered, the text it was about, the answer.
        self._arrivals: dict[str, tuple[Query, CommittedText, Proposal]] = {}
        self.num_used = 0
        self.num_late = 0
        self.num_late_used = 0
        self.num_dropped = 0

    def put(self, query: Query, text: CommittedText, proposal: Proposal) -> None:
        """Keep the answer to a query; it replaces an older one that was not used."""
        if query.request_id in self._arrivals:
            self.num_dropped += 1
        self._arrivals[query.request_id] = (query, text, proposal)

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
        answered, text, proposal = arrival
        is_late = answered.committed_len != query.committed_len
        if is_late:
            self.num_late += 1
            proposal = reroot(proposal, text.tokens(answered.committed_len, query.committed_len))
            self.num_dropped += proposal is None
        if proposal is None or proposal.is_empty:
            return None
        self.num_used += 1
        self.num_late_used += is_late
        return proposal if len(proposal.tokens) <= query.max_nodes else _cut(proposal, query)


def _cut(proposal: Proposal, query: Query) -> Proposal:
    end = query.max_nodes
    return replace(
        proposal,
        tokens=proposal.tokens[:end],
        parents=proposal.parents[:end],
        log_probs=proposal.log_probs[:end],
        distributions=None
        if proposal.distributions is None
        else proposal.distributions.rows(slice(end)),
    )
