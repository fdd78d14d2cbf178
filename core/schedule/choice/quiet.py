"""How long nobody is asked for drafts without thinking it over anew."""

from __future__ import annotations

from collections.abc import Iterable

# Tokens of each request, at most.
MOST_TOKENS = 32


class Quiet:
    """A while in which nobody is asked, begun by a plan that asked nobody.

    Planning takes the host about as long as drafting. Where nothing pays, one plan is like the one
    before it: each that asks nobody holds for twice as many tokens, up to `MOST_TOKENS`. It holds
    for the requests that it was about and for new ones that nothing is expected to pay for.
    """

    __slots__ = ("_ids", "_num_left", "_num_tokens")

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._num_tokens = self._num_left = 0

    def holds(self, ids: Iterable[str], num_tokens: int = 1) -> bool:
        """Whether nobody is asked for a step of these requests.

        Counts the tokens of each that the step before decoded, if so.
        """
        if self._num_left <= 0 or not self._ids.issuperset(ids):
            return False
        self._num_left -= num_tokens
        return True

    def go_on(self, ids: Iterable[str]) -> None:
        """A plan asked nobody for these requests."""
        self._ids.update(ids)
        self._num_tokens = min(max(2 * self._num_tokens, 1), MOST_TOKENS)
        self._num_left = self._num_tokens

    def end(self) -> None:
        """A plan asked somebody."""
        self._ids.clear()
        self._num_tokens = self._num_left = 0

    def join(self, request_id: str) -> None:
        """Nothing is expected to pay for a new request."""
        if self._num_left > 0:
            self._ids.add(request_id)

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        self._ids.discard(request_id)
