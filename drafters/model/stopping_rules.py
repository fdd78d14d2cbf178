"""Rules that end a draft drawn token by token: docs/drafters.md, "Stopping rules".

A rule may look at everything before a token is drawn, and at tokens that are in the draft already;
never at a token to decide whether that token itself is proposed. So drafts stay draws of the
distribution that their drafter declares, and every verification rule stays exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from ...core.arrays import ROOT
from ...core.errors import ConfigError
from .draft_costs import FIRST_ACCEPTED, DraftCosts

# Pairs of a draft's probability and its fate that the learned threshold is drawn from.
MAX_PAIRS = 512
# Below so many, the threshold stays as it was set.
MIN_PAIRS = 6
FIRST_THRESHOLD = 0.4
# A wrong stop costs a token, a missed one a row.
FALSE_NEGATIVE_COST = 3.0
# Weight of the newest draft in the mean of what is accepted, and, once nothing is drafted, of what
# it began with.
WEIGHT, RECALL = 0.1, 0.01
# The rule that asks for entropies.
SVIP = "svip"


class Drawn(NamedTuple):
    """A token of a draft: its log-probability, and the entropy of its distribution; in nats."""

    log_prob: float
    entropy: float


class Stopping(Protocol):
    """A rule that ends the drafts of one request."""

    def num_tokens(self, most: int, num_requests: int) -> int:
        """Most tokens of the next draft, at most `most`.

        `num_requests`: requests that are drafted for in the same batch.
        """
        ...

    def stops_after(self, drawn: Drawn) -> bool:
        """Whether the draft ends with the token that was just put in it."""
        ...

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        """Learn how many tokens of the last draft were accepted, from the first on."""
        ...


class Constant:
    """Ends a draft at the most tokens allowed."""

    def num_tokens(self, most: int, num_requests: int) -> int:  # noqa: ARG002
        """Length of the next draft: always `most`."""
        return most

    def stops_after(self, drawn: Drawn) -> bool:  # noqa: ARG002
        """Whether the draft ends with this token: never."""
        return False

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        """Ignore what was accepted."""


class Heuristic(Constant):
    """Grows by two tokens after a draft that was accepted whole, shrinks by one after any other.

    As transformers' `num_assistant_tokens_schedule="heuristic"`, but never above `most`, from where
    bad drafts would take as long to shorten it as good ones took to get there.
    """

    def __init__(self, start: int, most: int) -> None:
        self._num_tokens = start
        self._most = most

    def num_tokens(self, most: int, num_requests: int) -> int:  # noqa: ARG002
        """Length of the next draft: the one reached so far, at most `most`."""
        return min(most, self._num_tokens)

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        """Make the next draft two tokens longer or one shorter."""
        if draft:
            is_whole = num_accepted >= len(draft)
            longer = min(self._most, self._num_tokens + 2)
            self._num_tokens = longer if is_whole else max(1, self._num_tokens - 1)


class Confidence(Constant):
    """Ends a draft with the first token that is less probable than a threshold.

    As transformers' `assistant_confidence_threshold`. The threshold moves to where false positives
    + 3 false negatives are least over the latest drafts.
    """

    def __init__(self, threshold: float = FIRST_THRESHOLD) -> None:
        self._threshold = threshold
        self._pairs: deque[tuple[float, bool]] = deque(maxlen=MAX_PAIRS)

    @property
    def threshold(self) -> float:
        """Least probability after which a draft goes on."""
        return self._threshold

    def stops_after(self, drawn: Drawn) -> bool:
        """Whether the draft ends: after a token less probable than the threshold."""
        return math.exp(drawn.log_prob) < self._threshold

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        """Learn the threshold from the tokens that were judged: up to the first refused one."""
        for index, drawn in enumerate(draft[: num_accepted + 1]):
            self._pairs.append((math.exp(drawn.log_prob), index < num_accepted))
        if len(self._pairs) >= MIN_PAIRS:
            self._threshold = _cheapest_threshold(self._pairs, self._threshold)


class Svip(Constant):
    """Ends a draft with the first token of an uncertain q: sqrt(0.15 H(q)) > 0.3, H in nats.

    SVIP (arXiv 2411.18462). The uncertain token is still proposed.
    """

    def __init__(self, scale: float = 0.15, threshold: float = 0.3) -> None:
        self._most_entropy = threshold**2 / scale

    def stops_after(self, drawn: Drawn) -> bool:
        """Whether the draft ends: after a token of an uncertain distribution."""
        return drawn.entropy > self._most_entropy


class Goodput(Constant):
    """Chooses the length that is expected to bring most tokens a second.

    A draft of k tokens, or of k levels, brings 1 + a + .. + a^k, for a running mean a of the share
    of judged ones that was accepted, and takes what k draws and one verification take. Where the
    engine weighs drafts itself, none is shorter than a token.
    """

    def __init__(self, costs: DraftCosts) -> None:
        self._costs = costs
        self._accepted = costs.accepted

    def num_tokens(self, most: int, num_requests: int) -> int:  # noqa: ARG002
        """The length of most tokens a second, by the times measured so far."""
        lengths = np.arange(most + 1)
        tokens = np.cumsum(self._accepted**lengths)
        seconds = self._costs.verify_s + lengths * self._costs.draw_s
        best = int(np.argmax(tokens / seconds))
        if best:
            return best
        # Who never drafts never learns that it would pay by now.
        self._accepted += RECALL * (FIRST_ACCEPTED - self._accepted)
        return min(1, most) if self._costs.is_told else 0

    def observe(self, draft: Sequence[Drawn], num_accepted: int) -> None:
        """Move the running mean of acceptance."""
        judged = min(num_accepted + 1, len(draft))
        if judged:
            share = min(num_accepted, judged) / judged
            self._accepted += WEIGHT * (share - self._accepted)
            self._costs.note_accepted(share)


def _cheapest_threshold(pairs: Sequence[tuple[float, bool]], otherwise: float) -> float:
    """The probability, a point of the ROC curve, of least false positives + 3 false negatives."""
    order = sorted(pairs, reverse=True)
    probabilities = np.array([probability for probability, _ in order])
    accepted = np.array([was for _, was in order])
    num_accepted = int(accepted.sum())
    num_refused = len(order) - num_accepted
    if not num_accepted or not num_refused:
        return otherwise
    missed = 1.0 - np.cumsum(accepted) / num_accepted
    wrong = np.cumsum(~accepted) / num_refused
    # Equal probabilities fall on one side of any threshold.
    is_last = np.append(probabilities[1:] != probabilities[:-1], True)
    cost = np.where(is_last, wrong + FALSE_NEGATIVE_COST * missed, np.inf)
    return float(probabilities[int(np.argmin(cost))])


# A level of a tree: what rules ask of a drawn token is not asked of it.
LEVEL = Drawn(0.0, 0.0)


@dataclass(slots=True)
class Chain:
    """A chain whose acceptance is not known yet.

    assumed    tokens between the committed text and the chain
    is_behind  it stands behind tokens that are not committed
    num_right  of its tokens, that were committed already
    """

    assumed: list[int]
    is_behind: bool
    tokens: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    num_right: int = 0


class ChainLength:
    """Asks a rule how long a chain may become, or how deep a tree, and reports how much of it was
    accepted.
    """

    __slots__ = ("_chains", "_rule", "_tree")

    def __init__(self, rule: Stopping) -> None:
        self._rule = rule
        # The one that is verified, and those that were drafted behind others' tokens meanwhile.
        self._chains: list[Chain] = []
        # Tokens and parents of the tree that is verified in place of a chain.
        self._tree: tuple[list[int], list[int]] | None = None

    def begin(self, most: int, num_requests: int, assumed: Sequence[int] | None = None) -> int:
        """Begin a new chain: the most tokens that it may have.

        most          upper bound of the step
        num_requests  requests that are drafted for in the same batch
        assumed       tokens that stand before it and are not committed
        """
        path = list(assumed or ())
        if assumed is None:
            self._chains, self._tree = [], None
        # It takes the place of one that stood where it stands.
        others = [one for one in self._chains if one.assumed != path]
        self._chains = [*others, Chain(path, assumed is not None)]
        return self._rule.num_tokens(most, num_requests)

    def ends_with(self, token: int, drawn: Drawn) -> bool:
        """Whether the chain that began last is over with the token just drawn."""
        chain = self._chains[-1]
        chain.tokens.append(token)
        chain.drawn.append(drawn)
        return self._rule.stops_after(drawn)

    def becomes(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Note that the draft that began last is this tree, of tokens as `ends_with` has them.

        Nothing is learned from one that stands behind tokens that are not committed.
        """
        chain = self._chains.pop()
        if not chain.is_behind:
            self._tree = [*tokens], [*parents]

    def observe(self, committed: Sequence[int]) -> int:
        """Report what was committed, in the drafter's own tokens as `ends_with` has them; how many
        of them the draft has that was verified.

        The part of the chain that it begins with was accepted; of a tree, the levels of its path.
        Nothing is known of one that stands behind other tokens than were committed, and not all of
        one before which they end.
        """
        accepted = 0
        if self._tree is not None:
            num_levels, accepted = _levels(*self._tree, committed)
            self._rule.observe([LEVEL] * num_levels, accepted)
            self._tree = None
        chains, self._chains = self._chains, []
        for chain in chains:
            path = [*chain.assumed, *chain.tokens[chain.num_right :]]
            agreed = num_equal(path, committed)
            num_right = chain.num_right + max(0, agreed - len(chain.assumed))
            if chain.is_behind and agreed == len(committed):
                rest = chain.assumed[agreed:]
                # It is what is verified next.
                chain.assumed, chain.is_behind, chain.num_right = rest, bool(rest), num_right
                self._chains.append(chain)
            elif agreed >= len(chain.assumed) and chain.drawn:
                self._rule.observe(chain.drawn, num_right)
                accepted = max(accepted, num_right)
        return accepted


def _levels(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """Levels of a tree, and how many of them its path of the tokens of `text` goes down."""
    depths: list[int] = []
    path = {0: ROOT}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = 1 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if path.get(depth - 1) == parent and depth <= len(text) and token == text[depth - 1]:
            path.setdefault(depth, node)
    return max(depths, default=0), len(path) - 1


def num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    most = min(len(some), len(others))
    return next((index for index, (one, other) in pairs if one != other), most)


def stop_rule(
    name: str,
    num_tokens: int,
    costs: DraftCosts,
) -> Callable[[], Stopping]:
    """A factory of the rule of this name, one for each request. Raises `ConfigError`.

    num_tokens  most tokens of a draft; `heuristic` starts there
    costs       measured times, for `goodput`
    """
    rules: dict[str, Callable[[], Stopping]] = {
        "constant": Constant,
        "heuristic": lambda: Heuristic(num_tokens, num_tokens),
        "confidence": Confidence,
        "svip": Svip,
        "goodput": lambda: Goodput(costs),
    }
    if name not in rules:
        raise ConfigError("stop", f"must be one of {', '.join(rules)}, not {name!r}")
    rules[name]()
    return rules[name]
