"""The decoding requests of a step: their trees, and what few of them want beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Int64, UInt32
from ..proposals import Probe
from ..request.request import RequestState
from ..steps import TreeCandidates
from ..streaming.slices import TreeSlice
from ..tree.tree import TokenTree, TreeBatch, empty_trees


@dataclass(frozen=True, slots=True, eq=False)
class TreeWishes:
    """What a request's tree has beside its nodes, by source; most have nothing.

    num_top_next_tokens  how many most probable next tokens of the root and every node are wanted
    candidates           of the tree, where an acceptance rule decides; else None
    form                 uint32 [1 + nodes, words]  the tokens that the request's constraint allows
                         after the root and each node; None without one
    """

    probes: Mapping[str, Probe] = field(default_factory=dict)
    num_top_next_tokens: Mapping[str, int] = field(default_factory=dict)
    candidates: TreeCandidates | None = None
    form: UInt32 | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
        has_rows = self.probes or self.num_top_next_tokens
        return not has_rows and self.candidates is None and self.form is None


NO_WISHES = TreeWishes()


@dataclass(frozen=True, slots=True, eq=False)
class TreeStep:
    """The root, the tree and the probes of one decoding request."""

    state: RequestState
    tree: TokenTree
    wishes: TreeWishes
    slice: TreeSlice | None = None

    @property
    def root_token(self) -> int:
        """The token of the first row."""
        return self.state.token_ids[-1] if self.slice is None else self.slice.root.token

    @property
    def num_chosen(self) -> int:
        """Rows, the first ones, that get a target token."""
        return 1 + len(self.tree)

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return self.num_chosen + sum(len(probe.tokens) for probe in self.wishes.probes.values())


@dataclass(frozen=True, slots=True, eq=False)
class TreeSteps:
    """The parts of all decoding requests, in order.

    drafted  the trees before the budget cut them, to learn from
    wishes   by a request's place, of those that have any
    slices   likewise, of those whose trees go out in slices; nodes of `trees` that follow nodes of
             earlier slices stand below the root
    """

    states: Sequence[RequestState]
    trees: TreeBatch
    drafted: TreeBatch
    wishes: Mapping[int, TreeWishes] = field(default_factory=dict)
    slices: Mapping[int, TreeSlice] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[TreeStep]:
        return map(self.part, range(len(self)))

    @property
    def num_rows(self) -> Int64:
        """int64 [requests]: rows of each in the step."""
        rows = self.trees.sizes + 1
        for place, wishes in self.wishes.items():
            rows[place] += sum(len(probe.tokens) for probe in wishes.probes.values())
        return rows

    @property
    def followers(self) -> frozenset[str]:
        """Ids of the requests whose slices go behind others of theirs."""
        later = (place for place, part in self.slices.items() if not part.is_first)
        return frozenset(self.states[place].request_id for place in later)

    def part(self, place: int) -> TreeStep:
        """That of one request."""
        wishes = self.wishes.get(place, NO_WISHES)
        return TreeStep(self.states[place], self.trees[place], wishes, self.slices.get(place))

    def beside(self, sliced: Sequence[tuple[RequestState, TreeSlice, TreeWishes]]) -> TreeSteps:
        """These, and slices of other requests behind them; itself without any."""
        if not sliced:
            return self
        states, slices, wishes = zip(*sliced, strict=True)
        count = len(self)
        return TreeSteps(
            [*self.states, *states],
            TreeBatch.of([*self.trees, *(part.tree() for part in slices)]),
            TreeBatch.of([*self.drafted, *empty_trees(len(slices))]),
            {
                **self.wishes,
                **{place: own for place, own in enumerate(wishes, count) if not own.is_empty},
            },
            dict(enumerate(slices, count)),
        )

    def with_bare(self, bare: Mapping[int, TreeWishes]) -> TreeSteps:
        """The requests at these places get their root alone, as in plain decoding, and `bare`."""
        if not bare:
            return self
        is_kept = np.ones(len(self), dtype=np.bool_)
        is_kept[list(bare)] = False
        return TreeSteps(
            self.states,
            self.trees.keep(is_kept.repeat(self.trees.sizes)),
            self.drafted.keep(is_kept.repeat(self.drafted.sizes)),
            {
                place: wishes
                for place, wishes in {**self.wishes, **bare}.items()
                if not wishes.is_empty
            },
            {place: part.bare() if place in bare else part for place, part in self.slices.items()},
        )

    def select(self, places: Sequence[int]) -> TreeSteps:
        """Those of the requests at `places`, which rise; itself where these are all."""
        if len(places) == len(self):
            return self
        if not places:
            return NO_TREE_STEPS
        return TreeSteps(
            [self.states[place] for place in places],
            TreeBatch.of([self.trees[place] for place in places]),
            TreeBatch.of([self.drafted[place] for place in places]),
            {new: self.wishes[old] for new, old in enumerate(places) if old in self.wishes},
            {new: self.slices[old] for new, old in enumerate(places) if old in self.slices},
        )


NO_TREE_STEPS = TreeSteps((), empty_trees(0), empty_trees(0))
