"""Where an answer ends: at a token, at a text, or at its longest length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from .output import Delta, FinishReason, StopReason
from .sampling_params import SamplingParams


class TextStream(Protocol):
    """Turns tokens into text one by one."""

    def push(self, token_id: int) -> str:
        """Text that this token makes final; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end, with replacement characters for incomplete ones."""
        ...


NO_STOPS: Mapping[int, str] = MappingProxyType({})


class SilentStream:
    """A `TextStream` that gives no text, for callers that read the tokens alone."""

    __slots__ = ()

    def push(self, token_id: int) -> str:  # noqa: ARG002 - the interface
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end an answer."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset((*params.stop_token_ids, *eos))


class StopResult(NamedTuple):
    """Offered tokens that belong to the answer, the text they make final, and why it ends.

    stop_reason  the stop text, or the id out of `stop_token_ids`, that ended it; None for anything
                 else, as the model's end-of-sequence token
    """

    num_tokens: int
    text: str
    finish_reason: FinishReason | None
    stop_reason: StopReason = None


class StopRule:
    """Follows one answer and says at which exact token it ends.

    A stop token belongs to the answer's tokens but not to its text. A stop text ends the answer at
    the token that completes it and is cut from the text; text that may become the start of a stop
    text is held back until that is decided. With `include_stop_str_in_output` both stay in the
    text, which ends with them. Within the answer's `min_tokens` nothing ends it but its length: the
    target may not choose a stop token then (`core/request/allowed_tokens.py`), and a stop text that
    is complete by then is plain text. One that is completed later counts, wherever it began.
    """

    __slots__ = (
        "_eos_ids", "_includes_stop", "_is_silent", "_max_tokens", "_min_tokens",
        "_special_stops", "_stop_ids", "_stop_texts", "_stream", "num_tokens_left",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        stream: TextStream,
        special_stops: Mapping[int, str] = NO_STOPS,
    ) -> None:
        """`special_stops`: stop texts that are special tokens without text, by token id."""
        self._stop_ids = stop_token_ids(params, eos_token_ids)
        self._eos_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._special_stops = special_stops
        self._stop_texts = StopTexts(params.stop) if params.stop else None
        self._max_tokens = max_tokens
        self._stream = stream
        self._is_silent = isinstance(stream, SilentStream)
        # Tokens that the answer may still take.
        self.num_tokens_left = max_tokens

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end the answer."""
        return tuple(self._stop_ids)

    def advance(self, token_ids: Sequence[int]) -> StopResult:
        """Offer tokens in order; those after the end are not taken."""
        # Mostly no stop text is looked for, and none of the tokens is the last.
        count = len(token_ids)
        is_long = count >= self.num_tokens_left
        if not (self._stop_texts or is_long) and self._stop_ids.isdisjoint(token_ids):
            self.num_tokens_left -= count
            text = "" if self._is_silent else "".join(map(self._stream.push, token_ids))
            return StopResult(count, text, None)
        text = ""
        for index, token_id in enumerate(token_ids):
            self.num_tokens_left -= 1
            is_stop = token_id in self._stop_ids
            is_hidden = is_stop and not self._includes_stop
            new, match = self._feed("" if is_hidden else self._stream.push(token_id))
            text += new
            special = self._special_stops.get(token_id) if self._may_stop else None
            is_last = is_stop or special is not None or not self.num_tokens_left
            if is_last and match is None:
                new, match = self._rest()
                text += new
            if match is not None:
                return StopResult(index + 1, text, "stop", match.text)
            if special is not None:
                return StopResult(index + 1, text, "stop", special)
            if is_stop:
                return StopResult(index + 1, text, "stop", self._named(token_id))
            if is_last:
                return StopResult(index + 1, text, "length")
        return StopResult(len(token_ids), text, None)

    @property
    def _may_stop(self) -> bool:
        """Whether a text that the last token completes may end the answer."""
        return self._max_tokens - self.num_tokens_left > self._min_tokens

    def _feed(self, piece: str) -> tuple[str, StopMatch | None]:
        """Text that is final with this piece, and the stop text that ends it."""
        if self._stop_texts is None:
            return piece, None
        return self._stop_texts.feed(piece, keep_match=self._includes_stop, may_end=self._may_stop)

    def _rest(self) -> tuple[str, StopMatch | None]:
        """Text that an answer without further tokens still has, and the stop text that ends it."""
        new, match = self._feed(self._stream.flush())
        held = self._stop_texts.held if self._stop_texts is not None and match is None else ""
        return new + held, match

    def _named(self, token_id: int) -> int | None:
        return None if token_id in self._eos_ids else token_id


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

    def feed(
        self, piece: str, *, keep_match: bool = False, may_end: bool = True
    ) -> tuple[str, StopMatch | None]:
        """The text that this piece makes final, and the stop text that it completes.

        With a match the text ends where the stop text begins, or with `keep_match` where it ends;
        nothing may be fed afterwards. Without `may_end`, stop texts that the piece completes are
        text like any other.
        """
        longest = self._longest
        if longest is None:
            return piece, None
        num_held = longest.num_matched
        found = [(search.text, search.feed(piece, may_end=may_end)) for search in self._searches]
        matches = [
            StopMatch(text, num_held + end - len(text), num_held + end)
            for text, end in found
            if end
        ]
        if matches:
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

    def feed(self, piece: str, *, may_end: bool) -> int:
        """Characters of the piece up to the end of the first match; 0: there is none.

        Without `may_end` the search goes on behind each match.
        """
        text, borders, matched = self.text, self._borders, self.num_matched
        for index, letter in enumerate(piece):
            while matched and text[matched] != letter:
                matched = borders[matched]
            if text[matched] == letter:
                matched += 1
                if matched == len(borders):
                    self._extend()
                if matched == len(text):
                    if may_end:
                        return index + 1
                    matched = borders[matched]
        self.num_matched = matched
        return 0

    def _extend(self) -> None:
        borders = self._borders
        letter = self.text[len(borders) - 1]
        border = borders[-1]
        while border and self.text[border] != letter:
            border = borders[border]
        borders.append(border + (self.text[border] == letter))


class AnswerText:
    """Text of one answer's deltas, equal to that of a `StopRule` over the same stream.

    The engine needs text only where a stop text is looked for. Otherwise a `SilentStream` stands in
    the engine, and the process that replies to the client makes the text with this class.
    Answers with stop texts have theirs already: it is cut where the stop texts are looked for.
    """

    __slots__ = ("_has_text", "_includes_stop", "_stream")

    def __init__(self, params: SamplingParams, stream: TextStream) -> None:
        """`stream` begins after the prompt."""
        self._has_text = bool(params.stop)
        self._includes_stop = params.include_stop_str_in_output
        self._stream = stream

    def completed(self, delta: Delta) -> Delta:
        """The delta with its text."""
        text = self.advance(delta.token_ids, delta.finish_reason, delta.text)
        return delta if text == delta.text else delta._replace(text=text)

    def advance(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, text: str = ""
    ) -> str:
        """Text that the tokens of one delta make final; with `finish_reason` they are the last.

        `text`: what they came with.
        """
        if self._has_text:
            return text
        if finish_reason is None:
            return "".join(map(self._stream.push, token_ids))
        # Without stop texts, only a token stops an answer, and it is the last one.
        is_hidden = finish_reason == "stop" and not self._includes_stop
        text = "".join(map(self._stream.push, token_ids[:-1] if is_hidden else token_ids))
        # An answer that was cancelled, or of which only the prompt was computed, has no rest.
        has_rest = bool(token_ids) and finish_reason != "cancelled"
        return text + self._stream.flush() if has_rest else text
