"""Proposals that arrived and wait to be used, and what is left of those that come late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import ProtocolError
from ...core.proposals import Probe, Proposal, Query
from ...core.tree.merge import cut, reroot
from ...core.tree.proposal_batch import ProposalBatch
from .backlog import CommittedText


class ArrivedProposals:
    """The newest proposal for each open request. Late ones are re-rooted where they still fit.

    An answer stands behind the text and the path that its query assumed. It fits what is asked
    about if that is where it stands, or a place below it, whichever of the tokens up to there are
    committed by now. One that stands below what is asked about waits: the path to it is not the
    drafter's own.
    """

    __slots__ = ("_arrivals", "num_dropped", "num_late", "num_late_used", "num_used")

    def __init__(self) -> None:
        # By request id: the query that was answered, the text it was about, the answers to all
        # queries and the place of its own: of a batch, only what is taken is made an object of.
        self._arrivals: dict[str, tuple[Query, CommittedText, Sequence[Proposal], int]] = {}
        self.num_used = 0
        self.num_late = 0
        self.num_late_used = 0
        self.num_dropped = 0

    def counts(self) -> dict[str, Any]:
        """Totals so far, by their names in `DrafterStats`."""
        return {
            "proposals": self.num_used,
            "late": self.num_late,
            "late_used": self.num_late_used,
            "dropped": self.num_dropped,
        }

    def put(
        self, query: Query, text: CommittedText, proposals: Sequence[Proposal], place: int
    ) -> None:
        """Keep the answer at `place` to a query; it replaces an older one that was not used."""
        if query.request_id in self._arrivals:
            self.num_dropped += 1
        self._arrivals[query.request_id] = (query, text, proposals, place)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._arrivals.pop(request_id, None)

    def take(self, query: Query) -> Proposal | None:
        """The proposal for exactly the query's text and path, at most `max_nodes` long; None if
        none fits.

        The text must reach to the query's committed length.
        """
        arrival = self._arrivals.get(query.request_id)
        if arrival is None:
            return None
        answered, text, proposals, place = arrival
        is_late = not _is_answer(answered, query)
        path = _path_between(answered, text, query) if is_late else []
        if is_late and _is_above(path, answered):
            return None
        del self._arrivals[query.request_id]
        proposal: Proposal | None = proposals[place]
        if is_late:
            self.num_late += 1
            proposal = _below(path, answered, proposal)
            self.num_dropped += proposal is None
        if proposal is None or proposal.is_empty:
            return None
        self.num_used += 1
        self.num_late_used += is_late
        return cut(proposal, query.max_nodes)


def _is_answer(answered: Query, query: Query) -> bool:
    """Whether exactly this was asked."""
    is_same_text = answered.committed_len == query.committed_len
    return is_same_text and (answered.assumed or ()) == (query.assumed or ())


def _path_between(answered: Query, text: CommittedText, query: Query) -> list[int]:
    """Tokens from the text that an earlier query was about to the end of this one's path."""
    path = list(query.assumed or ())
    if answered.committed_len == query.committed_len:
        return path
    return [*text.tokens(answered.committed_len, query.committed_len).tolist(), *path]


def _is_above(path: list[int], answered: Query) -> bool:
    """Whether an answer stands below the end of this path."""
    assumed = answered.assumed or ()
    return len(path) < len(assumed) and assumed[: len(path)] == tuple(path)


def _below(path: list[int], answered: Query, proposal: Proposal) -> Proposal | None:
    """What is left of an answer behind this path, which began where its query's text ended."""
    assumed = answered.assumed or ()
    if tuple(path[: len(assumed)]) != assumed:
        # It stands elsewhere; what it wishes to know may be told of any tree.
        return cut(proposal, 0) if proposal.num_top_next_tokens else None
    return reroot(proposal, np.array(path[len(assumed) :], dtype=np.int32))


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
