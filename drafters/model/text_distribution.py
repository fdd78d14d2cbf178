"""How a request chooses the token after a text, for a drafter that chooses as the target does."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core.arrays import Float32, Float64, Int32
from ...core.proposals import DraftDistributions, DraftRequest, LogitsParams
from ...core.request.allowed_tokens import AllowedTokens, allowed_tokens_of
from ...core.request.request import TokenCounts
from ...core.sampling import edits_of
from ...core.steps import LogitEdits, StepOutput
from ...core.tree.tree import NO_TREE


@dataclass(slots=True, eq=False)
class TextDistribution:
    """Follows one text token by token. Structured outputs are not known to it.

    rules         lists of tokens and the least length, over the drafter's vocabulary
    counts        of the text's tokens; None without penalties
    num_answered  tokens of the answer so far
    """

    temperature: float
    seed: int
    logits_params: LogitsParams
    rules: AllowedTokens | None
    counts: TokenCounts | None
    num_answered: int

    @classmethod
    def of(cls, request: DraftRequest, vocab_size: int) -> TextDistribution:
        """The distribution after all tokens of `request`, for a drafter with this vocabulary."""
        logits_params = request.logits_params
        bias = {token: b for token, b in logits_params.logit_bias.items() if token < vocab_size}
        tokens = request.token_ids.tolist()
        distribution = cls(
            request.temperature,
            request.seed,
            replace(logits_params, logit_bias=bias),
            allowed_tokens_of(logits_params, request.end_ids, vocab_size),
            TokenCounts(tokens[: request.prompt_len]) if logits_params.has_penalties else None,
            num_answered=0,
        )
        distribution.append(tokens[request.prompt_len :])
        return distribution

    @property
    def has_choice(self) -> bool:
        """Whether any token of the drafter may be chosen."""
        return self.rules is None or self.rules.always is None or bool(self.rules.always.any())

    @property
    def is_plain(self) -> bool:
        """Whether the model's own distribution ranks its tokens; filters only leave out the last
        ones.
        """
        return self.rules is None and self.counts is None and not self.logits_params.logit_bias

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer."""
        self.num_answered += len(tokens)
        if self.counts is not None:
            self.counts.append(tokens)

    def copy(self) -> TextDistribution:
        """A copy that can follow another continuation of the same text."""
        return replace(self, counts=None if self.counts is None else self.counts.copy())

    def edits(self, row: int) -> LogitEdits | None:
        """The edits of the next token's logits, which stand in row `row`; None: there are none."""
        mask = None if self.rules is None else self.rules.masks(NO_TREE, self.num_answered)
        return edits_of(self.logits_params, self.counts, mask, NO_TREE, row)


class DraftDistribution(NamedTuple):
    """The distribution that one token was drawn from: ids int32 [k] and probs float32 [k]."""

    ids: Int32
    probs: Float32


def draft_rng(name: str, seed: int, committed_len: int) -> np.random.Generator:
    """Random numbers for one draft of one drafter.

    What two drafters draw must not depend on each other, and what one draws must not depend on
    its drafts before, by whose fate the text went on: so neither may use the sampling noise.
    """
    return np.random.default_rng([seed, committed_len, zlib.crc32(name.encode())])


def draw(
    output: StepOutput, row: int, size: int, temperature: float, rng: np.random.Generator
) -> tuple[int, float, DraftDistribution]:
    """A token after `row`, drawn among the `size` most probable ones.

    With it come its log-probability and the distribution.
    """
    top = output.log_probs.top
    assert top is not None
    ids, log_probs = top.ids[row, :size], top.log_probs[row, :size]
    index, probs = draw_index(weights_of(log_probs, temperature), rng)
    return int(ids[index]), float(np.log(probs[index])), DraftDistribution(ids, probs)


def weights_of(log_probs: Float32, temperature: float) -> Float64:
    """float64 [n]: in proportion to the probabilities at a temperature."""
    return np.exp((log_probs - log_probs.max()).astype(np.float64) / temperature)


def draw_index(weights: Float64, rng: np.random.Generator) -> tuple[int, Float32]:
    """A place drawn by its weight, of which one is above 0, and float32 [n] probabilities.

    These are what is drawn from, rounding included: they may be declared.
    """
    probs = (weights / weights.sum()).astype(np.float32)
    sums = np.cumsum(probs, dtype=np.float64)
    index = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    return min(index, int(np.flatnonzero(probs)[-1])), probs


def stacked(distributions: Sequence[DraftDistribution]) -> DraftDistributions | None:
    """The distributions of a chain; None without any."""
    if not distributions:
        return None
    return DraftDistributions(
        np.stack([distribution.ids for distribution in distributions]).astype(np.int32),
        np.stack([distribution.probs for distribution in distributions]),
    )


@dataclass(frozen=True, slots=True)
class TreeDraws:
    """How the candidates after a node are drawn.

    size  draws are among so many of the most probable tokens
    """

    size: int
    temperature: float
    rng: np.random.Generator

    def candidates(self, output: StepOutput, row: int, count: int) -> list[DrawnToken]:
        """`count` draws after `row`, in their order; fewer where no further token can be drawn."""
        top = output.log_probs.top
        assert top is not None
        ids, log_probs = top.ids[row, : self.size], top.log_probs[row, : self.size]
        weights = weights_of(log_probs, self.temperature)
        drawn: list[DrawnToken] = []
        while len(drawn) < count and weights.any():
            index, probs = draw_index(weights, self.rng)
            drawn.append(
                DrawnToken(
                    int(ids[index]), float(np.log(probs[index])), DraftDistribution(ids, probs)
                )
            )
            weights[index] = 0.0
        return drawn


@dataclass(frozen=True, slots=True, eq=False)
class DrawnToken:
    """A candidate, its log-probability, and the distribution that it was drawn from, given the
    draws before it."""

    token: int
    log_prob: float
    distribution: DraftDistribution
