"""Applies a stopping rule to the drafts of one request, and reports their acceptance to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....core.arrays import ROOT
from ....core.errors import ConfigError
from .draft_costs import DraftCosts
from .rules import Confidence, Constant, Drawn, Goodput, Heuristic, Stopping, Svip

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


def _levels(tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> tuple[int, int]:
    """Levels of a tree, and how many of them its path of these tokens goes down."""
    depths: list[int] = []
    path = {0: ROOT}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        depth = 1 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if path.get(depth - 1) == parent and depth <= len(said) and token == said[depth - 1]:
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
    threshold: float,
    costs: DraftCosts,
) -> Callable[[], Stopping]:
    """A factory of the rule of this name, one for each request. Raises `ConfigError`.

    num_tokens  most tokens of a draft; `heuristic` starts there
    threshold   first threshold of `confidence`
    costs       measured times, for `goodput`
    """
    rules: dict[str, Callable[[], Stopping]] = {
        "constant": Constant,
        "heuristic": lambda: Heuristic(num_tokens, num_tokens),
        "confidence": lambda: Confidence(threshold, learns=True),
        "svip": Svip,
        "goodput": lambda: Goodput(costs),
    }
    if name not in rules:
        raise ConfigError("stop", f"must be one of {', '.join(rules)}, not {name!r}")
    rules[name]()
    return rules[name]
