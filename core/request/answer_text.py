"""The text of an answer from its tokens, for clients of engines that send tokens alone.

The engine commits tokens, and needs their text only where a stop text is looked for. Otherwise the
process that answers the client makes the text: `SilentStream` (`core/request/stop.py`) stands in
the engine for the text that is not made, and `AnswerText` makes it where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from .output import Delta, FinishReason
from .sampling_params import SamplingParams
from .stop import TextStream


class AnswerText:
    """Text of one answer's deltas, equal to that of a `StopRule` over the same stream.

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
