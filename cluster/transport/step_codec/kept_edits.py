"""Changes to logits by request slot, on both ends of a message: biases, and counts of tokens."""

from __future__ import annotations

import numpy as np

from ....core.arrays import Bool, Float64, Int32
from ....core.compiled import compiled
from ....core.steps import Penalties
from .kept_tables import num_equal
from .typed_array import typed

NO_IDS = np.empty(0, dtype=np.int32)
NO_BIAS = np.empty(0, dtype=np.float32)
FIRST_ROOM = 256


class KeptEdits:
    """What one end knows of the biases and the penalties of the request in one slot.

    num_tokens  so many of `tokens`, `counts` and `in_prompt` are in use
    """

    __slots__ = ("bias", "bias_tokens", "counts", "factors", "in_prompt", "num_tokens", "tokens")

    def __init__(self) -> None:
        self.bias_tokens, self.bias = NO_IDS, NO_BIAS
        self.factors: Float64 = np.zeros(3)
        self.num_tokens = 0
        self.tokens = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.counts = np.zeros(FIRST_ROOM, dtype=np.int32)
        self.in_prompt = np.zeros(FIRST_ROOM, dtype=np.bool_)

    def put_tail(self, first: int, tokens: Int32, counts: Int32, in_prompt: Bool) -> None:
        """Put these behind the first ones, which stay."""
        end = first + len(tokens)
        if end > len(self.tokens):
            room = 2 * end
            self.tokens, self.counts = np.resize(self.tokens, room), np.resize(self.counts, room)
            self.in_prompt = np.resize(self.in_prompt, room)
        self.tokens[first:end] = tokens
        self.counts[first:end] = counts
        self.in_prompt[first:end] = in_prompt
        self.num_tokens = end

    @property
    def text(self) -> tuple[Int32, Int32, Bool]:
        """What is in use of `tokens`, `counts` and `in_prompt`."""
        count = self.num_tokens
        return self.tokens[:count], self.counts[:count], self.in_prompt[:count]

    def num_kept(self, penalties: Penalties) -> tuple[int, Int32]:
        """How many tokens, from the first on, are those kept; whose counts of them are others."""
        tokens = typed(penalties.tokens, np.int32, 1, "tokens")
        counts = typed(penalties.counts, np.int32, 1, "counts")
        in_prompt = typed(penalties.in_prompt, np.bool_, 1, "in_prompt")
        if not len(tokens) == len(counts) == len(in_prompt):
            raise TypeError("penalties have tokens without a count")
        return _compared(*self.text, tokens, counts, in_prompt)


@compiled
def _compared(  # noqa: PLR0917 - flat arrays, and one loop over them
    kept_tokens: Int32,
    kept_counts: Int32,
    kept_in_prompt: Bool,
    tokens: Int32,
    counts: Int32,
    in_prompt: Bool,
) -> tuple[int, Int32]:
    most = min(len(kept_tokens), len(tokens))
    num_kept = num_equal(kept_tokens[:most], tokens[:most], 0)
    places = np.empty(num_kept, dtype=np.int32)
    done = index = 0
    while index < num_kept:
        index = min(
            num_equal(kept_counts[:num_kept], counts[:num_kept], index),
            num_equal(kept_in_prompt[:num_kept], in_prompt[:num_kept], index),
        )
        if index < num_kept:
            places[done] = index
            done += 1
            index += 1
    return num_kept, places[:done].copy()
