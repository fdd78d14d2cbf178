"""What the target chose after some rows of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Float32, Int32
from ..steps import StepOutput, TopTokens
from .output import TokenLogProb


class Chosen(NamedTuple):
    """The target's tokens after some rows of one request.

    tokens     int32 [rows]
    log_probs  float32 [rows]; None if nobody in the step wants them
    top        of the same rows; None likewise
    features   float32 [rows, width]  the target's, of slices whose are wanted; None of all others
    """

    tokens: Int32
    log_probs: Float32 | None
    top: TopTokens | None
    features: Float32 | None = None

    def logprobs_of(self, rows: Iterable[int], num_top: int | None) -> tuple[TokenLogProb, ...]:
        """Log-probabilities of the tokens after `rows`; none if `num_top` is None."""
        if num_top is None or self.log_probs is None:
            return ()
        return tuple(
            token_log_prob(int(self.tokens[row]), self.log_probs, self.top, row, num_top)
            for row in rows
        )

    @classmethod
    def of_rows(cls, output: StepOutput, rows: slice) -> Chosen:
        """Those of a step's answer, of these of its `logits_rows`."""
        top = output.top
        return cls(
            output.target_tokens[rows],
            None if output.log_probs is None else output.log_probs[rows],
            None if top is None else TopTokens(top.ids[rows], top.log_probs[rows]),
        )

    @classmethod
    def along(cls, answers: Sequence[RowAnswer]) -> Chosen:
        """What was chosen after rows of several answers, one behind the other."""
        tokens = np.array([own.tokens[row] for own, row in answers], dtype=np.int32)
        log_probs = [own.log_probs[row] for own, row in answers if own.log_probs is not None]
        tops = [(own.top, row) for own, row in answers if own.top is not None]
        is_told = len(log_probs) == len(tokens)
        return cls(
            tokens,
            np.array(log_probs, dtype=np.float32) if is_told else None,
            _top_along(tops) if tops and len(tops) == len(tokens) else None,
        )


# The answer to a row: to which rows it is one, and which.
RowAnswer = tuple[Chosen, int]


def _top_along(tops: Sequence[tuple[TopTokens, int]]) -> TopTokens:
    # Steps answer with as many as one of their requests wants.
    count = min(top.ids.shape[1] for top, _ in tops)
    return TopTokens(
        np.stack([top.ids[row, :count] for top, row in tops]),
        np.stack([top.log_probs[row, :count] for top, row in tops]),
    )


def token_log_prob(
    token: int, log_probs: Float32, top: TopTokens | None, row: int, num_top: int
) -> TokenLogProb:
    """The log-probability of a token after a row, beside those of the most probable ones."""
    log_prob = float(log_probs[row])
    if top is None:
        return TokenLogProb(token, log_prob)
    ids, values = top.ids[row, :num_top], top.log_probs[row, :num_top]
    return TokenLogProb(token, log_prob, tuple(ids.tolist()), tuple(values.tolist()))
