"""A request's committed tokens, and what of them one drafter has not been told yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...core.arrays import Int32
from ...core.proposals import Commit, DraftRequest, StepCommit


class CommittedText:
    """All committed tokens of an open request; grows by appending, never changes before its end.

    `append` only stores a reference; the tokens are joined when a drafter must be opened again or
    a late proposal re-rooted, which is rare beside steps.
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
        return self._joined()[start:stop]

    def request(self) -> DraftRequest:
        """What a drafter that does not know the request must be told: all tokens so far."""
        return replace(self._request, token_ids=self._joined())

    def _joined(self) -> Int32:
        if len(self._chunks) > 1:
            self._chunks = [np.concatenate(self._chunks)]
        return self._chunks[0]


class DrafterBacklog:
    """Opens, closes and commits that wait for the next message to a drafter; bounded.

    A request that waits to be opened needs no commits: it is opened with all tokens it has when
    the message leaves. So more than `max_commits` commits turn into opening their requests again.
    Of requests that end, more than so many are left out: drafters may learn from them, no more.
    """

    __slots__ = ("_closes", "_commits", "_last_commits", "_max_commits", "_opens", "_source")

    def __init__(self, source: str, max_commits: int) -> None:
        self._source = source
        self._max_commits = max_commits
        self._opens: dict[str, None] = {}
        self._closes: list[str] = []
        self._commits: list[Commit] = []
        self._last_commits: list[Commit] = []

    def __bool__(self) -> bool:
        return bool(self._commits or self._opens or self._closes)

    def reset(self, request_ids: Iterable[str]) -> None:
        """The drafter knows nothing: open these requests, forget the rest."""
        self._opens = dict.fromkeys(request_ids)
        self._closes = []
        self._commits = []
        self._last_commits = []

    def open(self, request_id: str) -> None:
        """Open a request, or open it anew."""
        self._drop_commits(request_id)
        self._opens[request_id] = None

    def close(self, request_id: str, last: Sequence[StepCommit]) -> None:
        """Close a request, after its `last` commits."""
        if request_id not in self._opens:
            self._last_commits += [told for told in self._commits if told.request_id == request_id]
            self._last_commits += [_told(self._source, commit) for commit in last]
        if len(self._last_commits) > self._max_commits:
            self._last_commits = []
        self._drop_commits(request_id)
        self._opens.pop(request_id, None)
        self._closes.append(request_id)

    def commit(self, commits: Sequence[StepCommit]) -> None:
        """Tell what was committed."""
        for commit in commits:
            if commit.request_id not in self._opens:
                self._commits.append(_told(self._source, commit))
        if len(self._commits) > self._max_commits:
            self._opens.update(dict.fromkeys(commit.request_id for commit in self._commits))
            self._commits = []

    def take(
        self, texts: Mapping[str, CommittedText]
    ) -> tuple[tuple[str, ...], tuple[DraftRequest, ...], list[Commit], list[Commit]]:
        """Closes, opens, commits and last commits of a message that leaves now."""
        commits, self._commits = self._commits, []
        if not (self._opens or self._closes):
            return (), (), commits, []
        closes, last = tuple(self._closes), self._last_commits
        opens = tuple(texts[request_id].request() for request_id in self._opens)
        self.reset(())
        return closes, opens, commits, last

    def _drop_commits(self, request_id: str) -> None:
        self._commits = [commit for commit in self._commits if commit.request_id != request_id]


def _told(source: str, commit: StepCommit) -> Commit:
    """A commit as one drafter hears of it."""
    return Commit(
        commit.request_id,
        commit.base_len,
        commit.tokens,
        commit.probe_ids.get(source),
        commit.top_next_tokens.get(source),
    )
