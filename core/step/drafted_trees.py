"""What drafters offer to the requests of a step, merged and not yet cut by the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..arrays import UInt32
from ..proposals import Proposal
from ..request.request import RequestState
from ..tree.tree import TokenTree, TreeBatch


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTree:
    """What drafters offer to one request, merged.

    max_nodes  most of its nodes that a step may hold
    form       uint32 [1 + nodes, words]  the tokens that the request's constraint allows after the
               root and each node; None without one
    """

    state: RequestState
    tree: TokenTree
    proposals: Sequence[Proposal]
    max_nodes: int
    form: UInt32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTrees:
    """What drafters offer to all requests of a step, in order.

    states, proposals, max_nodes  by request, as in `DraftedTree`
    forms                         by a request's place, of those that have one
    """

    states: Sequence[RequestState]
    trees: TreeBatch
    proposals: Sequence[Sequence[Proposal]]
    max_nodes: Sequence[int]
    forms: Mapping[int, UInt32] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[DraftedTree]) -> DraftedTrees:
        """These of some requests together."""
        return cls(
            [part.state for part in parts],
            TreeBatch.of([part.tree for part in parts]),
            [part.proposals for part in parts],
            [part.max_nodes for part in parts],
            {place: part.form for place, part in enumerate(parts) if part.form is not None},
        )

    def __len__(self) -> int:
        return len(self.states)

    def parts(self) -> list[DraftedTree]:
        """These of each request."""
        parts = zip(self.states, self.trees, self.proposals, self.max_nodes, strict=True)
        return [DraftedTree(*part, self.forms.get(place)) for place, part in enumerate(parts)]

    def where(self, is_wanted: Callable[[RequestState], bool]) -> DraftedTrees:
        """These of the requests that are wanted; itself where all are."""
        if all(map(is_wanted, self.states)):
            return self
        return DraftedTrees.of([part for part in self.parts() if is_wanted(part.state)])
