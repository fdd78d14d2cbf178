"""Drafting one target token by what drafted strings become: for drafters of small alphabets.

SLRS (Timor et al., arXiv 2502.05202, Algorithm 3) draws the drafter's tokens until the first target
token of their text can no longer change. Its probability psi is the sum over all strings that begin
with it. Where no token of the drafter begins another one, every string has one spelling, and the
strings are the leaves of a tree: psi is known, and a rule may be told what was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

import numpy as np

from ....core.arrays import ROOT, Float32, Float64, Int32
from ....core.errors import ConfigError
from ....core.steps import StepOutput
from ...coupled_rank import CoupledChoice, rank_coupled
from ..expansion import GrownNodes
from ..text_distribution import DraftDistribution, TextDistribution, draw_index, weights_of
from ..tree_job import TreeJob
from .strategy import DraftNodes, DraftText
from .surfaces import Speller, Vocabulary
from .written import Retokenizer, WrittenText, WrittenVocabulary

MOST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StringLimits:
    """How much of the tree of strings is looked at. What is left out is left out of the draws, too.

    choices     most probable tokens after a string that may be drawn
    width       strings of a length that go on
    least_mass  less probable strings are taken as they are
    """

    choices: int = 16
    width: int = 16
    least_mass: float = 1e-3


def check_prefix_code(draft: Vocabulary) -> None:
    """Raise `ConfigError` unless every text has one spelling, in few different tokens."""
    surfaces = sorted(surface for _, surface in draft.pieces())
    if len(surfaces) > MOST_TOKENS:
        raise ConfigError(
            "vocabulary",
            f"slrs sums over all spellings of a text, and the drafter has {len(surfaces)} tokens; "
            "it is for drafters of single bytes or letters: take tli or slem",
        )
    for before, after in pairwise(surfaces):
        if after.startswith(before):
            raise ConfigError(
                "vocabulary",
                f"slrs needs one spelling of every text, and {before!r} begins {after!r}; take "
                "tli or slem",
            )


class FirstTargetTokens:
    """The first target token of strings behind committed tokens."""

    __slots__ = ("_beginnings", "_draft", "_retokenizer", "_speller", "_target", "longest")

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self._draft = draft
        self._target = target
        self._retokenizer = Retokenizer(target)
        self._speller = Speller(target)
        # Bytes of the longest token: no string needs to be longer.
        self.longest = max((len(surface) for _, surface in target.pieces()), default=1)
        self._beginnings = {
            surface[:length] for _, surface in target.pieces() for length in range(1, len(surface))
        }

    def written(self, tokens: Sequence[int]) -> bytes:
        """The bytes that the drafter's tokens write."""
        return self._draft.bytes_of(tokens)

    def is_end(self, token: int) -> bool:
        """Whether the drafter's token writes nothing, so that a string ends with it."""
        return not self._draft.surface(token)

    def may_grow(self, text: WrittenText, drafted: bytes) -> bool:
        """Whether the first token may still become longer: some token begins with all of it."""
        rest = drafted[len(text.held) :]
        return not rest or rest in self._beginnings

    def of(self, text: WrittenText, drafted: bytes) -> int | None:
        """The first target token of `drafted` behind a text; None where it has none."""
        if not drafted:
            return self._target.end
        if not drafted.startswith(text.held[: len(drafted)]):
            return None
        rest = drafted[len(text.held) :]
        ids = self._retokenizer.continuation(text.committed, rest) or self._speller.spell(rest)
        return ids[0] if ids else None


class StringExpansion(GrownNodes):
    """The tree of drafted strings on its way, level by level; `psi` sums its leaves.

    Nodes are strings that were looked behind, by the drafter's tokens.
    """

    __slots__ = ("_first", "_limits", "_text", "leaves")

    def __init__(self, first: FirstTargetTokens, text: WrittenText, limits: StringLimits) -> None:
        super().__init__()
        self._first = first
        self._text = text
        self._limits = limits
        # Bytes and probability of every string that is not followed further.
        self.leaves: list[tuple[bytes, float]] = []

    @property
    def num_candidates(self) -> int:
        """Number of candidates that `grow` takes after a node."""
        return self._limits.choices

    @property
    def most_fed(self) -> int:
        """Upper bound of the nodes that the model is run on, the root not counted."""
        return self._limits.width * self._first.longest

    def ranks(self, node: int) -> Sequence[int]:  # noqa: ARG002 - the same for all
        """Ranks of the candidates that `grow` takes after a node."""
        return range(self._limits.choices)

    def grow(self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Add the candidates behind each string of the frontier, whose probabilities add up to 1.

        Strings whose first target token may still grow go on, the most probable ones of a length.
        """
        still_open: list[tuple[float, int, int]] = []
        for node, own, given in zip(self.frontier, ids, log_probs, strict=True):
            for token, log_prob in zip(own, given, strict=True):
                mass = exp(self.score(node) + log_prob)
                string = self._written(node) + self._first.written([token])
                goes_on = not self._first.is_end(token) and self._first.may_grow(self._text, string)
                if goes_on and mass >= self._limits.least_mass:
                    still_open.append((log_prob, node, token))
                else:
                    self.leaves.append((string, mass))
        still_open.sort(key=lambda one: (-self.score(one[1]) - one[0], one[1:]))
        for log_prob, node, token in still_open[self._limits.width :]:
            string = self._written(node) + self._first.written([token])
            self.leaves.append((string, exp(self.score(node) + log_prob)))
        self.frontier = [
            self.add(node, token, log_prob)
            for log_prob, node, token in still_open[: self._limits.width]
        ]

    def stop(self) -> None:
        """Take the strings that still go on as they are."""
        if self.frontier != [ROOT]:
            self.leaves += [(self._written(node), exp(self.score(node))) for node in self.frontier]
        self.frontier = []

    def psi(self) -> dict[int, float]:
        """Probability of each target token to be the first one. Together 1, less what has none."""
        psi: dict[int, float] = {}
        for string, mass in self.leaves:
            token = self._first.of(self._text, string)
            if token is not None and mass > 0:
                psi[token] = psi.get(token, 0.0) + mass
        return psi

    def _written(self, node: int) -> bytes:
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return self._first.written(path[::-1])


def next_log_probs(
    output: StepOutput, row: int, choices: int, temperature: float
) -> tuple[list[int], list[float]]:
    """The tokens that may follow a row and their log-probabilities at a temperature, by which
    they add up to 1; at temperature 0 those of 1.
    """
    top = output.log_probs.top
    assert top is not None
    ids, log_probs = top.ids[row, :choices], top.log_probs[row, :choices]
    weights = weights_of(log_probs, temperature or 1.0)
    kept = weights > 0
    return ids[kept].tolist(), np.log(weights[kept] / weights.sum()).tolist()


def coupled_first(psi: dict[int, float], choice: CoupledChoice) -> tuple[int, float]:
    """The token that the request's noise chooses by psi, and its log-probability given the noise.

    psi is of the request's temperature already.
    """
    tokens, log_psi = _arrays(psi)
    siblings = np.full(len(tokens), ROOT, dtype=np.int32)
    at_one = CoupledChoice(float(choice.temperature > 0), choice.seed, choice.next_position)
    kept, _, log_probs = rank_coupled(tokens, siblings, log_psi, at_one, 1)
    return int(kept[0]), float(log_probs[0])


def drawn_first(
    psi: dict[int, float], size: int, rng: np.random.Generator
) -> tuple[int, float, DraftDistribution]:
    """A draw among the `size` tokens of highest psi, its log-probability, and what it is from."""
    tokens, log_psi = _arrays(psi)
    kept = np.argsort(-log_psi, kind="stable")[:size]
    weights: Float64 = np.exp(log_psi[kept].astype(np.float64))
    index, probs = draw_index(weights, rng)
    distribution = DraftDistribution(tokens[kept], probs)
    return int(tokens[kept][index]), log(float(probs[index])), distribution


def _arrays(psi: dict[int, float]) -> tuple[Int32, Float32]:
    tokens = sorted(psi)
    log_psi = [log(max(psi[token], exp(-80.0))) for token in tokens]
    return np.array(tokens, dtype=np.int32), np.minimum(
        np.array(log_psi, dtype=np.float32), np.float32(0)
    )


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
