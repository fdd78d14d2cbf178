"""The search for stop texts in an answer that arrives piece by piece.

Every text is searched for with the algorithm of Knuth, Morris and Pratt: a piece costs time in
proportion to its own length and the number of texts, whatever their lengths and however much of
one has matched so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop text that stands in the answer.

    start, end  its place in what was held back and the piece that completed it, characters
    """

    text: str
    start: int
    end: int


class StopTexts:
    """Finds the stop text that begins first in an answer, and holds back what may become one.

    Held back is the longest end of the answer that a stop text begins with. It equals the beginning
    of that stop text, so none of it is stored.
    """

    __slots__ = ("_longest", "_searches")

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: none of them empty."""
        self._searches = [_Search(text) for text in texts]
        self._longest = self._searches[0] if self._searches else None

    @property
    def held(self) -> str:
        """The end of the answer that is held back."""
        return "" if self._longest is None else self._longest.text[: self._longest.num_matched]

    def feed(self, piece: str, *, keep_match: bool = False) -> tuple[str, StopMatch | None]:
        """The text that this piece makes final, and the stop text that it completes.

        With a match the text ends where the stop text begins, or with `keep_match` where it ends;
        nothing may be fed afterwards.
        """
        longest = self._longest
        if longest is None:
            return piece, None
        num_held = longest.num_matched
        ends = [(search.text, end) for search in self._searches if (end := search.feed(piece))]
        if ends:
            matches = [StopMatch(text, num_held + end - len(text), num_held + end)
                       for text, end in ends]  # fmt: skip
            match = min(matches, key=lambda match: (match.start, match.end))
            split = match.end if keep_match else match.start
        else:
            match = None
            self._longest = max(self._searches, key=lambda search: search.num_matched)
            split = num_held + len(piece) - self._longest.num_matched
        return longest.text[: min(split, num_held)] + piece[: max(0, split - num_held)], match


class _Search:
    """One stop text: how many of its first characters the answer ends with."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # Of the text's first n characters: the longest proper beginning that is their end, too.
        # Known as far as an answer has matched, so that a long text costs nothing before.
        self._borders = [0, 0]

    def feed(self, piece: str) -> int:
        """Characters of the piece up to the end of the first match; 0: there is none."""
        text, borders, matched = self.text, self._borders, self.num_matched
        for index, letter in enumerate(piece):
            while matched and text[matched] != letter:
                matched = borders[matched]
            if text[matched] == letter:
                matched += 1
                if matched == len(text):
                    return index + 1
                if matched == len(borders):
                    self._extend()
        self.num_matched = matched
        return 0

    def _extend(self) -> None:
        borders = self._borders
        letter = self.text[len(borders) - 1]
        border = borders[-1]
        while border and self.text[border] != letter:
            border = borders[border]
        borders.append(border + (self.text[border] == letter))
