"""A request's committed tokens, and what of them one drafter has not been told yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...core.arrays import Int32
from ...core.proposals import Commit, DraftRequest, FeatureRows, StepCommit

# Tokens of a request whose features are kept for a drafter; older ones are let go.
MAX_FEATURES = 4096


class CommittedText:
    """All committed tokens of an open request; grows by appending, never changes before its end.

    `append` only stores a reference; the tokens are joined when a drafter must be told several
    commits at once or a late proposal re-rooted, which is rare beside steps.
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
        """What a drafter that does not know the request must be told: all tokens so far."""
        return replace(self._request, token_ids=self._joined())

    def _joined(self) -> Int32:
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0]


class FeatureBacklog:
    """Features of one request that wait, in the order in which they came; the oldest are let go."""

    __slots__ = ("_count", "_rows")

    def __init__(self) -> None:
        self._rows: deque[FeatureRows] = deque()
        self._count = 0

    def __iter__(self) -> Iterator[FeatureRows]:
        return iter(self._rows)

    def append(self, rows: FeatureRows) -> None:
        """Add rows; those that they leave no room for go."""
        self._rows.append(rows)
        self._count += len(rows.values)
        while len(self._rows) > 1 and self._count > MAX_FEATURES:
            self._count -= len(self._rows.popleft().values)


class DrafterBacklog:
    """What waits for the next message to a drafter: openings, ends, and commits that it missed.

    A drafter hears of a request when it is asked for it first, and of its commits when it is asked
    again: of all that it missed in one piece. So what it is not asked for costs nothing, and what
    waits takes no memory beside the texts. Only what it had wished to know of a step (probes, top
    next tokens) is kept apart.

    keeps_answers  it learns from requests that end: it is told their last tokens, and those that it
                   was never asked for are opened at their end. At most `max_ended` wait, beyond
                   that they are left out
    """

    __slots__ = (
        "_answers", "_closes", "_ended", "_features", "_keeps_answers", "_last_commits",
        "_max_ended", "_opens", "_source", "_told",
    )  # fmt: skip

    def __init__(self, source: str, max_ended: int, *, keeps_answers: bool) -> None:
        self._source = source
        self._max_ended = max_ended
        self._keeps_answers = keeps_answers
        # Tokens of each request that it knows.
        self._told: dict[str, int] = {}
        # Commits that answer its wishes, of requests that it knows.
        self._answers: dict[str, list[Commit]] = {}
        # Those that it was not told yet.
        self._features: dict[str, FeatureBacklog] = {}
        self._opens: dict[str, None] = {}
        self._closes: list[str] = []
        self._last_commits: list[Commit] = []
        self._ended: list[DraftRequest] = []

    def __bool__(self) -> bool:
        return bool(self._opens or self._closes or self._ended)

    def reset(self) -> None:
        """The drafter knows nothing any more."""
        self._told.clear()
        self._answers.clear()
        self._features.clear()
        self._opens = {}
        self._closes = []
        self._last_commits = []
        self._ended = []

    def open(self, request_id: str) -> None:
        """Open a request with the next message, whether it is asked for it or not."""
        if request_id not in self._told:
            self._opens[request_id] = None

    def close(self, request_id: str, text: CommittedText) -> None:
        """End a request, whose text is whole now."""
        self._opens.pop(request_id, None)
        told = self._told.get(request_id)
        if told is None:
            if self._keeps_answers:
                self._ended.append(text.request())
        else:
            if self._keeps_answers:
                self._last_commits += self._missed(request_id, text)
            del self._told[request_id]
            self._closes.append(request_id)
        self._answers.pop(request_id, None)
        self._features.pop(request_id, None)
        if len(self._ended) + len(self._last_commits) > self._max_ended:
            self._ended = []
            self._last_commits = []

    def commit(self, commits: Sequence[StepCommit]) -> None:
        """Keep what the drafter wished to know of these; their tokens are in the texts."""
        for commit in commits:
            probe_ids = commit.probe_ids.get(self._source)
            top_next_tokens = commit.top_next_tokens.get(self._source)
            if (probe_ids is None and top_next_tokens is None) or (
                commit.request_id not in self._told
            ):
                continue
            told = Commit(
                commit.request_id, commit.base_len, commit.tokens, probe_ids, top_next_tokens
            )
            self._answers.setdefault(commit.request_id, []).append(told)

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features of open requests."""
        for own in rows:
            self._features.setdefault(own.request_id, FeatureBacklog()).append(own)

    def take_features(self, asked: Collection[str]) -> tuple[FeatureRows, ...]:
        """Those of the requests that a message asks for, which leaves now."""
        if not self._features:
            return ()
        taken = [
            self._features.pop(request_id) for request_id in asked if request_id in self._features
        ]
        return tuple(rows for backlog in taken for rows in backlog)

    def take(
        self, texts: Mapping[str, CommittedText], asked: Collection[str]
    ) -> tuple[tuple[str, ...], tuple[DraftRequest, ...], list[Commit], list[Commit]]:
        """Closes, opens, commits and last commits of a message that leaves now.

        asked: ids of the requests that it asks for; they must be in `texts`
        """
        commits: list[Commit] = []
        for request_id in asked:
            if request_id not in self._told:
                self._opens[request_id] = None
            else:
                commits += self._missed(request_id, texts[request_id])
                self._told[request_id] = texts[request_id].length
        if not self:
            return (), (), commits, []
        closes, last = tuple(self._closes), self._last_commits
        opens = [texts[request_id].request() for request_id in self._opens]
        self._told.update((request.request_id, len(request.token_ids)) for request in opens)
        # One that was used again meanwhile is open with its new text; the old one is given up.
        ended = [request for request in self._ended if request.request_id not in self._told]
        self._opens, self._last_commits, self._ended = {}, [], []
        self._closes = [request.request_id for request in ended]
        return closes, (*opens, *ended), commits, last

    def _missed(self, request_id: str, text: CommittedText) -> list[Commit]:
        """The commits, as few as can be, that bring what it knows of a request up to date."""
        told, missed = self._told[request_id], []
        for answer in self._answers.pop(request_id, ()):
            if answer.base_len > told:
                tokens = text.tokens(told, answer.base_len)
                missed.append(Commit(request_id, told, tokens))
            missed.append(answer)
            told = answer.base_len + len(answer.tokens)
        if told < text.length:
            missed.append(Commit(request_id, told, text.tokens(told, text.length)))
        return missed
