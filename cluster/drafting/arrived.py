"""Proposals that arrived and wait to be used, and what is left of those that come late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...core.errors import ProtocolError
from ...core.proposals import AheadQuery, Probe, Proposal, Query
from ...core.tree.merge import reroot
from ...core.tree.proposal_batch import ProposalBatch
from .backlog import CommittedText

AnyQuery = TypeVar("AnyQuery", Query, AheadQuery)


class ArrivedProposals:
    """The newest proposal for each open request. Late ones are re-rooted where they still fit."""

    __slots__ = (
        "_arrivals", "num_ahead", "num_ahead_used", "num_dropped", "num_late", "num_late_used",
        "num_used",
    )  # fmt: skip

    def __init__(self) -> None:
        # By request id: the query that was answered, the text it was about, the answers to all
        # queries and the place of its own: of a batch, only what is taken is made an object of.
        self._arrivals: dict[
            str, tuple[Query | AheadQuery, CommittedText, Sequence[Proposal], int]
        ] = {}
        self.num_used = 0
        self.num_late = 0
        self.num_late_used = 0
        self.num_ahead = 0
        self.num_ahead_used = 0
        self.num_dropped = 0

    def counts(self) -> dict[str, Any]:
        """Totals so far, by their names in `DrafterStats`."""
        return {
            "proposals": self.num_used,
            "late": self.num_late,
            "late_used": self.num_late_used,
            "dropped": self.num_dropped,
            "ahead": self.num_ahead,
            "ahead_used": self.num_ahead_used,
        }

    def put(
        self,
        query: Query | AheadQuery,
        text: CommittedText,
        proposals: Sequence[Proposal],
        place: int,
    ) -> None:
        """Keep the answer at `place` to a query; it replaces an older one that was not used."""
        if query.request_id in self._arrivals:
            self.num_dropped += 1
        self._arrivals[query.request_id] = (query, text, proposals, place)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._arrivals.pop(request_id, None)

    def settle(self, query: Query) -> bool:
        """Whether something drafted ahead waits that goes on from the query's text.

        It then waits as an answer to the query; what was guessed wrongly is dropped.
        """
        arrival = self._arrivals.get(query.request_id)
        if arrival is None or not isinstance(arrival[0], AheadQuery):
            return False
        answered, text, proposals, place = arrival
        if answered.committed_len == query.committed_len:
            return False
        self.num_ahead += 1
        left = left_of(answered, text, query.committed_len, proposals[place])
        if left is None or left.is_empty:
            self.num_dropped += 1
            del self._arrivals[query.request_id]
            return False
        self.num_ahead_used += 1
        self._arrivals[query.request_id] = (query, text, [left], 0)
        return True

    def take(self, query: Query) -> Proposal | None:
        """The proposal for exactly the query's text, at most `max_nodes` long; None if none fits.

        The text must reach to the query's committed length.
        """
        arrival = self._arrivals.pop(query.request_id, None)
        if arrival is None:
            return None
        answered, text, proposals, place = arrival
        proposal: Proposal | None = proposals[place]
        is_late = answered.committed_len != query.committed_len
        if isinstance(answered, AheadQuery) and not is_late:
            # It begins with what the target has not said yet.
            return None
        if is_late:
            self.num_late += 1
            proposal = left_of(answered, text, query.committed_len, proposal)
            self.num_dropped += proposal is None
        if proposal is None or proposal.is_empty:
            return None
        self.num_used += 1
        self.num_late_used += is_late
        return proposal if len(proposal.tokens) <= query.max_nodes else _cut(proposal, query)


def left_of(
    answered: Query | AheadQuery, text: CommittedText, committed_len: int, proposal: Proposal
) -> Proposal | None:
    """What is left of an answer to an earlier query, now that the text is so long."""
    return reroot(proposal, text.tokens(answered.committed_len, committed_len))


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


class AnswerCheck:
    """What a drafter's answer must be before anything looks at it.

    vocab_size      token ids stay below
    max_probe_rows  most rows, offset and top_k of a probe
    """

    __slots__ = ("_max_probe_rows", "_vocab_size")

    def __init__(self, vocab_size: int, max_probe_rows: int) -> None:
        self._vocab_size = vocab_size
        self._max_probe_rows = max_probe_rows

    def __call__(self, proposals: Sequence[Proposal], num_queries: int, source: str) -> None:
        """Raise `ProtocolError` unless these answer so many queries to `source`."""
        if len(proposals) != num_queries:
            raise ProtocolError(f"{len(proposals)} proposals for {num_queries} queries")
        if isinstance(proposals, ProposalBatch):
            self._check_batch(proposals, source)
            return
        for proposal in proposals:
            if proposal.source != source:
                raise ProtocolError(f"a proposal of {proposal.source!r}")
            proposal.check(self._vocab_size)
            self._check_probe(proposal.probe)

    def _check_batch(self, proposals: ProposalBatch, source: str) -> None:
        if proposals.source != source:
            raise ProtocolError(f"proposals of {proposals.source!r}")
        proposals.check(self._vocab_size)
        for probe in proposals.probes:
            self._check_probe(probe)

    def _check_probe(self, probe: Probe | None) -> None:
        if probe is not None:
            probe.check(self._vocab_size, self._max_probe_rows)
