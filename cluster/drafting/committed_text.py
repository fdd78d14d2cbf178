"""The committed tokens of open requests, and those that one drafter has not received yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...core.arrays import Int32
from ...core.proposals import Commit, DraftRequest, FeatureRows, Query, StepCommit

# Tokens of a request whose features are kept for a drafter; older ones are dropped.
MAX_FEATURES = 4096


class CommittedText:
    """All committed tokens of an open request; grows by appending, never changes before its end.

    `append` only stores a reference. The tokens are joined when a drafter receives several commits
    at once, or when a late proposal is re-rooted; both are rare.
    """

    __slots__ = ("_chunks", "_request", "length")

    def __init__(self, request: DraftRequest) -> None:
        self._request = request
        self._chunks = [request.token_ids]
        self.length = len(request.token_ids)

    def append(self, tokens: Int32) -> None:
        """Add tokens int32 [n] at the end."""
        self._chunks.append(tokens)
        self.length += len(tokens)

    def tokens(self, start: int, stop: int) -> Int32:
        """Tokens int32 [stop - start]."""
        last = self._chunks[-1]
        # Of the last commit, which is what a drafter that is asked in every step has missed.
        if stop == self.length and stop - start == len(last):
            return last
        return self._joined()[start:stop]

    def request(self) -> DraftRequest:
        """The request with all tokens so far, for a drafter that does not know it."""
        return replace(self._request, token_ids=self._joined())

    def _joined(self) -> Int32:
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0]


def is_current(query: Query, texts: Mapping[str, CommittedText]) -> bool:
    """Whether a query is about all committed tokens of an open request."""
    text = texts.get(query.request_id)
    return text is not None and text.length == query.committed_len


def at_most(queries: Sequence[Query], max_nodes: int) -> Sequence[Query]:
    """The queries, none of which asks for more than `max_nodes` nodes."""
    if all(query.max_nodes <= max_nodes for query in queries):
        return queries
    return [query._replace(max_nodes=min(query.max_nodes, max_nodes)) for query in queries]


class UnsentCommits:
    """The commits that one drafter has not received, of the requests that it knows.

    A drafter receives commits when it is asked for their request again, all missed ones in one
    piece. Other requests cost nothing, and the texts already hold their tokens. Answers to probes,
    top next tokens and features are kept separately.
    """

    __slots__ = ("_answers", "_features", "_known", "_source")

    def __init__(self, source: str) -> None:
        self._source = source
        # Tokens of each request that it knows.
        self._known: dict[str, int] = {}
        # Commits that answer its probes or top-next-token queries, of requests that it knows.
        self._answers: dict[str, list[Commit]] = {}
        self._features: dict[str, _WaitingFeatures] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def clear(self) -> None:
        """The drafter has lost all requests."""
        self._known.clear()
        self._answers.clear()
        self._features.clear()

    def note_open(self, request: DraftRequest) -> None:
        """The drafter receives a request with its tokens so far."""
        self._known[request.request_id] = len(request.token_ids)

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        self._known.pop(request_id, None)
        self._answers.pop(request_id, None)
        self._features.pop(request_id, None)

    def note_commits(self, commits: Sequence[StepCommit]) -> None:
        """Keep the answers to the drafter's queries; the tokens are in the texts."""
        for commit in commits:
            probe_ids = commit.probe_ids.get(self._source)
            top_next_tokens = commit.top_next_tokens.get(self._source)
            if (probe_ids is None and top_next_tokens is None) or (
                commit.request_id not in self._known
            ):
                continue
            answer = Commit(
                commit.request_id, commit.base_len, commit.tokens, probe_ids, top_next_tokens
            )
            self._answers.setdefault(commit.request_id, []).append(answer)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features of open requests, also of those that the drafter does not know yet."""
        for own in rows:
            self._features.setdefault(own.request_id, _WaitingFeatures()).append(own)

    def take_commits(self, request_id: str, text: CommittedText) -> list[Commit]:
        """The fewest commits that bring the drafter's copy of a request up to date."""
        known, missed = self._known[request_id], []
        for answer in self._answers.pop(request_id, ()):
            if answer.base_len > known:
                missed.append(Commit(request_id, known, text.tokens(known, answer.base_len)))
            missed.append(answer)
            known = answer.base_len + len(answer.tokens)
        if known < text.length:
            missed.append(Commit(request_id, known, text.tokens(known, text.length)))
        self._known[request_id] = text.length
        return missed

    def take_features(self, asked: Collection[str]) -> tuple[FeatureRows, ...]:
        """Features of the requests that the drafter is asked for now."""
        if not self._features:
            return ()
        taken = [
            self._features.pop(request_id) for request_id in asked if request_id in self._features
        ]
        return tuple(rows for waiting in taken for rows in waiting)


class _WaitingFeatures:
    """Features of one request in order of arrival. The oldest are dropped beyond `MAX_FEATURES`."""

    __slots__ = ("_count", "_rows")

    def __init__(self) -> None:
        self._rows: deque[FeatureRows] = deque()
        self._count = 0

    def __iter__(self) -> Iterator[FeatureRows]:
        return iter(self._rows)

    def append(self, rows: FeatureRows) -> None:
        """Add rows, and drop the oldest beyond the limit."""
        self._rows.append(rows)
        self._count += len(rows.values)
        while len(self._rows) > 1 and self._count > MAX_FEATURES:
            self._count -= len(self._rows.popleft().values)
