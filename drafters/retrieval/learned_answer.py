"""One request's answer while it grows, for a store that learns from it when it ends."""

from __future__ import annotations

from array import array

import numpy as np

from ...core.arrays import ROOT, Int32
from ...core.interfaces import Ended
from ...core.proposals import DraftRequest, Proposal

SHARED = "shared"
# The prompt's last tokens are learned, too, so that the answer's first ones are found by them.
PROMPT_TAIL = 16
# The first tokens of a longer answer are learned.
MAX_TOKENS = 2048


def refusal(request: DraftRequest) -> str | None:
    """The reason why a request's text is not learned, one of `OUTCOMES`; None where it may be.

    What is learned may be read by all later requests of the namespace. A store knows namespaces
    but no salts, so what a salt keeps apart is not learned.
    """
    if request.namespace == SHARED:
        return "shared"
    if not request.store:
        return "unstored"
    return "salted" if request.cache_salt else None


class LearnedAnswer:
    """The end of a prompt, the answer so far, and which runs of it were proposed."""

    __slots__ = ("_accepted", "_answer_start", "_namespace", "_proposal", "_tokens")

    def __init__(self, request: DraftRequest) -> None:
        start = max(request.prompt_len - PROMPT_TAIL, 0)
        self._namespace = request.namespace
        self._tokens = array("i", request.token_ids[start:].tolist())
        self._answer_start = request.prompt_len - start
        self._accepted: list[tuple[int, int]] = []
        self._proposal: Proposal | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tokens."""
        return len(self._tokens) * self._tokens.itemsize

    def propose(self, proposal: Proposal) -> None:
        """Note the last proposal, against which the next commit is compared."""
        self._proposal = proposal

    def extend(self, tokens: Int32) -> None:
        """Add committed tokens; those that the last proposal began with are an accepted run."""
        start = len(self._tokens)
        if self._proposal is not None:
            length = _agreed(self._proposal, tokens)
            if length and start + length <= MAX_TOKENS:
                self._accepted.append((start, start + length))
        self._proposal = None
        self._tokens.extend(tokens.tolist())
        del self._tokens[MAX_TOKENS:]

    def end(self) -> Ended | None:
        """The text and its accepted runs, to be learned; None if there is no answer."""
        if len(self._tokens) <= self._answer_start:
            return None
        tokens = np.array(self._tokens, dtype=np.int32)
        return Ended(self._namespace, tokens, tuple(self._accepted))


def _agreed(proposal: Proposal, tokens: Int32) -> int:
    """Number of the first tokens that are a path of the proposal."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        )
    }
    node = ROOT
    for length, token in enumerate(tokens.tolist()):
        child = children.get((node, token))
        if child is None:
            return length
        node = child
    return len(tokens)
