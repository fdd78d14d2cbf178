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
        self.held = ""

    def advance(self, token_ids: Sequence[int]) -> tuple[int, str, FinishReason | None]:
        text = ""
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            stopped = token_id in self.stop_ids
            if not stopped:
                self.held += self.stream.push(token_id)
            cut = self.find_stop()
            if stopped or cut is not None or self.num_tokens == self.max_tokens:
                reason: FinishReason = "stop" if stopped or cut is not None else "length"
                return index + 1, text + self.last_text(cut), reason
            text += self.release()
        return len(token_ids), text, None

    def last_text(self, cut: int | None) -> str:
        if cut is None:
            self.held += self.stream.flush()
            cut = self.find_stop()
        return self.held if cut is None else self.held[:cut]

    def find_stop(self) -> int | None:
        if self.num_tokens <= self.params.min_tokens:
            return None
        starts = [start for stop in self.params.stop if (start := self.held.find(stop)) >= 0]
        return min(starts, default=None)

    def release(self) -> str:
        keep = 0
        if self.num_tokens > self.params.min_tokens:
            keep = max((overlap(self.held, stop) for stop in self.params.stop), default=0)
        split = len(self.held) - keep
        released, self.held = self.held[:split], self.held[split:]
        return released


def overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
