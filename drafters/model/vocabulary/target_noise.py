"""Ranks a drafter's own tokens by the sampling noise of the target's tokens that they write.

The target's token at a position is argmax(log p / T + noise), and the noise belongs to its own ids.
A drafted token of another vocabulary gets the noise of the first of the target's tokens that it
adds to the text, or changes in it. So drafts follow the target's choice, which noise of the
drafter's own ids would not. See docs/drafters.md, "SLEM".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....core.arrays import Float32, Int32
from ...coupled_rank import CoupledChoice, rank_siblings
from .surfaces import Vocabulary

# Tokens after a text that are looked at, for noise may raise an unlikely one.
NUM_LOOKED_AT = 24
# For drafted tokens that add none of the target's: their bytes are no whole character.
NO_TOKEN = -1
# What is remembered of pairs of tokens.
MAX_REMEMBERED = 65_536


class Retokenized(NamedTuple):
    """What a drafted token adds to a text that is encoded in the target's tokens.

    token  the first of them that is new
    place  of that one, counted from the end of the text: -1, if it takes the last one's place
    last   the last of them
    added  how many more there are
    """

    token: int
    place: int
    last: int
    added: int


class TargetTokens:
    """The drafter's tokens behind one of the target's, as the target's tokenizer writes the two.

    Tokens further back may change it, too: drafts are encoded as a whole once they are made, and
    this only says whose noise counts.
    """

    __slots__ = ("_draft", "_remembered", "_target")

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self._draft = draft
        self._target = target
        self._remembered: dict[tuple[int, int], Retokenized] = {}

    @property
    def num_looked_at(self) -> int:
        """Number of most probable tokens to rank after a text."""
        return min(NUM_LOOKED_AT, len(self._draft.surfaces))

    def after(self, last: int, token: int) -> Retokenized:
        """`token` of the drafter behind `last` of the target."""
        pair = last, token
        found = self._remembered.get(pair)
        if found is None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            found = self._remembered[pair] = self._written(last, token)
        return found

    def _written(self, last: int, token: int) -> Retokenized:
        if token == self._draft.end and self._target.end is not None:
            return Retokenized(self._target.end, 0, self._target.end, 1)
        before, own = self._target.surface(last), self._draft.surface(token)
        try:
            ids = self._target.encode((before + own).decode())
        except UnicodeDecodeError:
            before, ids = b"", self._target.encode(own.decode(errors="ignore"))
        if not ids:
            return Retokenized(NO_TOKEN, 0, last, 0)
        if not before:
            return Retokenized(ids[0], 0, ids[-1], len(ids))
        if ids[0] != last:
            return Retokenized(ids[0], -1, ids[-1], len(ids) - 1)
        if len(ids) == 1:
            return Retokenized(NO_TOKEN, 0, last, 0)
        return Retokenized(ids[1], 0, ids[-1], len(ids) - 1)


class TargetNoise:
    """The noise of one request's next tokens, for drafts in another vocabulary.

    last    the last committed target id
    choice  how the target chooses the token behind it
    """

    __slots__ = ("_choice", "_last", "_tokens")

    def __init__(self, tokens: TargetTokens, last: int, choice: CoupledChoice) -> None:
        self._tokens = tokens
        self._last = last
        self._choice = choice

    @property
    def num_looked_at(self) -> int:
        """Number of most probable tokens to rank after a text."""
        return self._tokens.num_looked_at

    def rank(
        self, path: Sequence[int], tokens: Int32, log_probs: Float32, count: int
    ) -> tuple[Int32, Float32]:
        """The `count` of `tokens`, drafted behind `path`, that the target most likely goes on with.

        tokens, log_probs  [n], the drafter's own. The result has the best first, with their
        log-probabilities given the noise.
        """
        last, length = self._last, 0
        for token in path:
            found = self._tokens.after(last, token)
            last, length = found.last, length + found.added
        every = [self._tokens.after(last, token) for token in tokens.tolist()]
        ids = np.array([found.token for found in every], dtype=np.int32)
        # A committed token is never replaced.
        depths = np.array([max(0, length + found.place) for found in every], dtype=np.int32)
        kept, given = rank_siblings(log_probs, ids, depths, self._choice, count)
        return tokens[kept], given
