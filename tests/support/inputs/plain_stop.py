"""Stop rules in their simplest form: all of the held text is searched again for every token."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.core.request.output import FinishReason
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import TextStream, stop_token_ids


class PlainStopRule:
    """What `StopRule` gives without `include_stop_str_in_output`, but for the stop reason."""

    def __init__(
        self, params: SamplingParams, eos: Sequence[int], max_tokens: int, stream: TextStream
    ) -> None:
        self.stop_ids = stop_token_ids(params, eos)
        self.params = params
        self.max_tokens = max_tokens
        self.stream = stream
        self.num_tokens = 0
        self.text = ""
        # Characters that were given out, and those of the first `min_tokens` tokens.
        self.num_given = 0
        self.num_early = 0

    def advance(self, token_ids: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        given = ""
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            stopped = token_id in self.stop_ids
            if not stopped:
                self.text += self.stream.push(token_id)
            if self.num_tokens <= self.params.min_tokens:
                self.num_early = len(self.text)
            cut = self.find_stop()
            if stopped or cut is not None or self.num_tokens == self.max_tokens:
                if cut is None:
                    self.text += self.stream.flush()
                    if self.num_tokens <= self.params.min_tokens:
                        self.num_early = len(self.text)
                    cut = self.find_stop()
                reason: FinishReason = "stop" if stopped or cut is not None else "length"
                return index + 1, given + self.text[self.num_given : cut], reason
            given += self.release()
        return len(token_ids), given, None

    def find_stop(self) -> int | None:
        """Where the first stop text that ends behind the early tokens begins."""
        starts = [
            start
            for stop in self.params.stop
            if (start := self.text.find(stop, max(0, self.num_early - len(stop) + 1))) >= 0
        ]
        return min(starts, default=None)

    def release(self) -> str:
        keep = max((overlap(self.text, stop) for stop in self.params.stop), default=0)
        start, self.num_given = self.num_given, len(self.text) - keep
        return self.text[start : self.num_given]


def overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
