"""A draft behind one outcome: a chain, or a tree as any other of the model's (`TreeJob`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ....core.arrays import Float32, Int32
from ....core.steps import StepOutput
from ..expansion import Expansion, GrownNodes
from ..stopping.chain_length import Chain, ChainLength
from ..stopping.rules import Drawn


class Growing(Protocol):
    """A draft that grows by a level a pass, from the row of the outcome's token on."""

    @property
    def expansion(self) -> Expansion | GrownNodes:
        """Its nodes, and those of them whose rows it takes next; the root is the outcome."""
        ...

    @property
    def num_top(self) -> int:
        """Number of most probable tokens to look at after a node."""
        ...

    def take(self, output: StepOutput, first: int) -> None:
        """Go on by the results of the frontier, whose rows begin at `first`."""
        ...

    def proposed(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """Tokens, parents and log-probabilities of at most so many nodes, as in `Proposal`."""
        ...


@dataclass(slots=True)
class ChainBranch:
    """Tokens that the request's own parameters and noise draw from the model.

    limit          most tokens
    length, chain  the rule that may end it before, and what the rule knows of it
    first_foreign  the target has no tokens from this id on
    """

    limit: int
    length: ChainLength
    chain: Chain
    first_foreign: int
    expansion: GrownNodes = field(default_factory=GrownNodes)
    num_top: int = 0

    def __post_init__(self) -> None:
        if self.limit < 1:
            self.expansion.frontier = []

    def take(self, output: StepOutput, first: int) -> None:
        """Draw the next token."""
        assert output.log_probs is not None
        grown = self.expansion
        [last] = grown.frontier
        token, log_prob = int(output.target_tokens[first]), min(float(output.log_probs[first]), 0.0)
        if token >= self.first_foreign:
            grown.frontier = []
            return
        entropy = 0.0 if output.entropies is None else float(output.entropies[first])
        node = grown.add(last, token, log_prob)
        is_over = self.length.ends_with(token, Drawn(log_prob, entropy), self.chain)
        grown.frontier = [] if is_over or len(grown.tokens) >= self.limit else [node]

    def proposed(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """The first tokens."""
        return self.expansion.first(max_nodes)
