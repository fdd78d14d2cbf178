"""Stands among the drafters for a head of the last stage: what that drafted is proposed here."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.proposals import Commit, DraftRequest, Proposal, Query, empty_proposal


class StageDrafts:
    """Keeps the newest draft of each request until it is asked for, or the text went on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drafts: dict[str, tuple[int, Proposal]] = {}

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes of what is kept here; the head's own are the stage's."""
        return sum(proposal.tokens.nbytes * 3 for _, proposal in list(self._drafts.values()))

    def open(self, request: DraftRequest) -> None:
        """Begin a request. What was drafted behind its prompt is kept."""

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._drafts.pop(request_id, None)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Drafts that do not fit the text any more are noticed when they are asked for."""

    def take(self, request_id: str, committed_len: int, proposal: Proposal) -> None:
        """Keep what was drafted behind a request's first `committed_len` tokens."""
        self._drafts[request_id] = committed_len, proposal

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """What was drafted for the text of each query; empty where nothing was."""
        del deadline
        return [self._proposal(query) for query in queries]

    def _proposal(self, query: Query) -> Proposal:
        length, proposal = self._drafts.get(query.request_id, (0, None))
        fits = proposal is not None and length == query.committed_len and not query.assumed
        return proposal if proposal is not None and fits else empty_proposal(self._name)
