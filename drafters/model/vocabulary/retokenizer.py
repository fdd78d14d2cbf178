"""Encodes text behind committed tokens, which stay as they are.

String-level drafting (SLEM: Timor et al., arXiv 2502.05202, Algorithm 2) turns text into tokens and
back. Encoding only the last tokens together with what follows gives, away from the window's start,
what encoding the whole text gives. Tokens are aligned by the bytes that they write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from .surfaces import Speller, Vocabulary

LOOKBEHIND = 10
# A byte of UTF-8 that goes on with a character: 10xxxxxx.
CONTINUES, CONTINUES_MASK = 0x80, 0xC0


class Retokenizer:
    """Encodes text in one vocabulary, looking behind at the last tokens.

    Bytes that are no whole character are held back: no text can say them.
    """

    __slots__ = ("_lookbehind", "_speller", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, lookbehind: int = LOOKBEHIND) -> None:
        self._vocabulary = vocabulary
        self._lookbehind = lookbehind
        self._speller = Speller(vocabulary)

    def continuation(self, committed: Sequence[int], text: bytes) -> list[int]:
        """Tokens of `text` behind committed ones, none of which changes.

        Where a token of the whole text would begin within the committed ones, `text` is encoded
        by itself. Tokens of an incomplete last character are left out.
        """
        window = self._window(committed)
        whole = window + text
        whole = whole[: complete_len(whole)]
        if len(whole) <= len(window):
            return []
        added = whole[len(window) :]
        encoded = self._encode(whole)
        if encoded is None:
            return []
        ids, starts = encoded
        if len(window) in starts:
            # Of several the last: a token before it may have been put before the text's first word.
            following = ids[len(starts) - 1 - starts[::-1].index(len(window)) :]
            if self._vocabulary.bytes_of(following) == added:
                return following
        return list(self._speller.spell(added))

    def rewritten(self, own: Sequence[int], text: bytes) -> tuple[int, list[int]]:
        """How `text` is appended to tokens of one's own, which may change.

        Returns how many of them stay, and what follows these. `text` ends between characters.
        """
        window = self._window(own)
        encoded = self._encode(window + text)
        if encoded is None:
            return len(own), list(self._speller.spell(text))
        ids, starts = encoded
        agreed = self._agreed(own, len(window), dict(zip(starts, ids, strict=False)))
        if agreed is not None:
            kept, border = agreed
            following = ids[starts.index(border) :]
            # A space before the first word is right where no other text is before it.
            is_first = not window or not kept
            if is_first or self._vocabulary.bytes_of(following) == (window + text)[border:]:
                return kept, following
        return len(own), list(self._speller.spell(text))

    def _agreed(
        self, own: Sequence[int], window_len: int, token_at: Mapping[int, int]
    ) -> tuple[int, int] | None:
        """How many of one's own tokens stay, and where in the window they end.

        Tokens at the window's start may differ for want of what is before them; from the first
        that is the same on, they stay as long as they are the same. None where no token is, and the
        window begins within one.
        """
        first, start = len(own), window_len
        while start > 0:
            first -= 1
            start -= len(self._vocabulary.surface(own[first]))
        agreed = (first, 0) if start == 0 else None
        has_met = False
        for place in range(first, len(own)):
            end = start + len(self._vocabulary.surface(own[place]))
            if token_at.get(start) == own[place]:
                agreed, has_met = (place + 1, end), True
            elif has_met:
                break
            start = end
        return agreed

    def _window(self, ids: Sequence[int]) -> bytes:
        """Bytes of the last tokens, from the beginning of a character on, and behind the last
        special token."""
        surfaces: list[bytes] = []
        for token in reversed(ids[-self._lookbehind :]):
            surface = self._vocabulary.surface(token)
            if not surface:
                break
            surfaces.append(surface)
        window = b"".join(reversed(surfaces))
        return window[_first_whole(window) :]

    def _encode(self, text: bytes) -> tuple[list[int], list[int]] | None:
        """Tokens of a text, and where each of them begins and the last one ends.

        None where they do not write this text: it is no UTF-8, or the tokenizer changes it.
        """
        try:
            ids = self._vocabulary.encode(text.decode())
        except UnicodeDecodeError:
            return None
        surfaces = [self._vocabulary.surface(token) for token in ids]
        # Some put a space before a text's first word.
        extra = sum(map(len, surfaces)) - len(text)
        written = b"".join(surfaces)
        if extra not in (0, 1) or written[extra:] != text or written[:extra].strip(b" "):
            return None
        starts = [0, *accumulate(map(len, surfaces))]
        return ids, [max(0, start - extra) for start in starts]


def complete_len(text: bytes) -> int:
    """Bytes of `text` without an incomplete character at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & CONTINUES_MASK != CONTINUES:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return len(text) if needed <= back else len(text) - back
    return len(text)


def _first_whole(text: bytes) -> int:
    """Where the first character begins whose beginning is there."""
    skipped = 0
    while skipped < len(text) and text[skipped] & CONTINUES_MASK == CONTINUES:
        skipped += 1
    return skipped
