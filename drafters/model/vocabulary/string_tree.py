"""The tree of strings that a request's SLRS draft grows, and the vocabulary that asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ....core.arrays import ROOT, Float32, Int32
from ....core.steps import StepOutput
from ...coupled_rank import CoupledChoice
from ..text_distribution import TextDistribution
from ..tree_job import TreeJob
from .prefix_code import (
    FirstTargetTokens,
    StringExpansion,
    StringLimits,
    check_prefix_code,
    coupled_first,
    drawn_first,
    next_log_probs,
)
from .strategy import DraftNodes, DraftText
from .surfaces import Vocabulary
from .written import WrittenText, WrittenVocabulary


@dataclass(slots=True)
class StringTree(TreeJob):
    """Grows the strings that may follow a text, and proposes one target token by them.

    strings           the same as `expansion`
    choice            how the request chooses its next token
    rng, num_declared where a token is drawn and what it was drawn from is told, among so many
    most_levels       strings are at most so long
    """

    strings: StringExpansion | None = None
    choice: CoupledChoice | None = None
    rng: np.random.Generator | None = None
    num_declared: int = 0
    most_levels: int = 1

    @property
    def reach(self) -> float:
        """Its levels are of one token's strings, which are no tokens by themselves."""
        return inf

    @property
    def num_top(self) -> int:
        """Number of most probable tokens to look at after a node."""
        return self.expansion.num_candidates

    def take(self, output: StepOutput, first: int) -> None:
        """Grow the strings by the model's results for its frontier, whose rows begin at `first`."""
        assert self.strings is not None
        rows = range(first, first + len(self.strings.frontier))
        temperature = self.distribution.temperature
        pairs = [next_log_probs(output, row, self.num_top, temperature) for row in rows]
        level = self.strings.depth(self.strings.frontier[0]) + 1
        self.strings.grow([ids for ids, _ in pairs], [probs for _, probs in pairs])
        if level >= self.most_levels:
            self.strings.stop()

    def proposed(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """One target token at most, its parent and its log-probability."""
        assert self.strings is not None
        assert self.choice is not None
        self.strings.stop()
        psi = self.strings.psi() if max_nodes else {}
        tokens: list[int] = []
        log_probs: list[float] = []
        if psi and self.rng is not None:
            token, log_prob, distribution = drawn_first(psi, self.num_declared, self.rng)
            tokens, log_probs, self.declared = [token], [log_prob], [distribution]
        elif psi:
            token, log_prob = coupled_first(psi, self.choice)
            tokens, log_probs = [token], [log_prob]
        return (
            np.array(tokens, dtype=np.int32),
            np.full(len(tokens), ROOT, dtype=np.int32),
            np.array(log_probs, dtype=np.float32),
        )


class StringVocabulary(WrittenVocabulary):
    """SLRS: one target token a draft, by what the strings that may follow become."""

    is_declared = True

    def __init__(
        self, draft: Vocabulary, target: Vocabulary, size: int, target_size: int,
        limits: StringLimits | None = None,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` for a drafter whose texts have several spellings."""
        check_prefix_code(draft)
        super().__init__(draft, target, size, target_size)
        self._first = FirstTargetTokens(draft, target)
        self._limits = limits or StringLimits()

    @property
    def most_fed(self) -> int:
        """Upper bound of the strings that the model is run on."""
        return self._limits.width * self._first.longest

    def target_noise(self, text: DraftText, choice: CoupledChoice) -> None:
        """Nothing beside: `StringTree` chooses among target ids by their own noise."""

    def nodes(self, text: DraftText, drafted: DraftNodes) -> DraftNodes:  # noqa: ARG002
        """The nodes as they are: `StringTree` proposes target ids."""
        return drafted

    def tree(
        self, text: DraftText, choice: CoupledChoice, blocks: Sequence[int],
        distribution: TextDistribution, *,
        rng: np.random.Generator | None, num_declared: int,
    ) -> StringTree:  # fmt: skip
        """The tree of strings behind a text, after which the request makes this choice."""
        assert isinstance(text, WrittenText)
        strings = StringExpansion(self._first, text, self._limits)
        text_len = len(text.tokens)
        return StringTree(
            strings, text_len, text_len, blocks, distribution, self,
            strings=strings,
            choice=choice, rng=rng, num_declared=num_declared, most_levels=self._first.longest,
        )  # fmt: skip
