"""A part of a prompt that a step caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Int32
from ..request.request import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """Positions `start` to `end` of a request, to be cached.

    wants_token  it is the last chunk of a prompt, which asks for the first token
    """

    state: RequestState
    start: int
    end: int
    wants_token: bool

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return self.end - self.start

    @property
    def num_chosen(self) -> int:
        """Rows, the last ones, that get a target token."""
        return int(self.wants_token)

    @property
    def num_scored(self) -> int:
        """Rows, from the first on, whose next token's log-probability is wanted."""
        state = self.state
        if state.prompt_log_probs is None or state.has_answer:
            return 0
        return max(0, min(self.end, state.prompt_len - 1) - self.start)

    @property
    def tokens(self) -> Int32:
        """Its token ids, int32 [rows]."""
        if self.end <= self.state.prompt_len:
            return self.state.request.prompt_ids[self.start : self.end]
        return np.array(self.state.token_ids[self.start : self.end], dtype=np.int32)
