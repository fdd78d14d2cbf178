"""What a step holds: prompt chunks, and the trees of decoding requests with what few of them want
beside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64, UInt32
from ..pipelined.chunks import TreeChunk
from ..proposals import Probe, Proposal
from ..request.request import RequestState
from ..speculation.draft_plan import DraftBatch
from ..steps import LogitEdits, TreeCandidates
from ..tree.tree import TokenTree, TreeBatch, empty_trees
from ..verify.rules import no_candidates


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """Positions `start` to `end` of a request, to be cached.

    wants_token  it is the last chunk of a prompt, which asks for the first token
    snapshot     slot of states that it goes on from; -1: the request's own
    saved_to     slot of a snapshot of the states behind it; -1: none
    """

    state: RequestState
    start: int
    end: int
    wants_token: bool
    snapshot: int = -1
    saved_to: int = -1

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return self.end - self.start

    @property
    def num_chosen(self) -> int:
        """Rows, the last ones, that get a target token."""
        return int(self.wants_token)

    @property
    def num_scored(self) -> int:
        """Rows, from the first on, whose next token's log-probability is wanted."""
        state = self.state
        if state.prompt_log_probs is None or state.has_answer:
            return 0
        return max(0, min(self.end, state.prompt_len - 1) - self.start)

    @property
    def tokens(self) -> Int32:
        """Its token ids, int32 [rows]."""
        if self.end <= self.state.prompt_len:
            return self.state.request.prompt_ids[self.start : self.end]
        return np.array(self.state.token_ids[self.start : self.end], dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTree:
    """What drafters offer to one request, merged.

    max_nodes  most of its nodes that a step may hold
    grammar_masks  uint32 [1 + nodes, words]  the tokens that the request's grammar allows after the
               root and each node; None without one
    """

    state: RequestState
    tree: TokenTree
    proposals: Sequence[Proposal]
    max_nodes: int
    grammar_masks: UInt32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTrees:
    """What drafters offer to all requests of a step, in order.

    states, proposals, max_nodes  by request, as in `DraftedTree`
    grammar_masks                 by index of the request, of those that have any
    """

    states: Sequence[RequestState]
    trees: TreeBatch
    proposals: Sequence[Sequence[Proposal]]
    max_nodes: Sequence[int]
    grammar_masks: Mapping[int, UInt32] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[DraftedTree]) -> DraftedTrees:
        """These of some requests together."""
        return cls(
            [part.state for part in parts],
            TreeBatch.of([part.tree for part in parts]),
            [part.proposals for part in parts],
            [part.max_nodes for part in parts],
            {
                index: part.grammar_masks
                for index, part in enumerate(parts)
                if part.grammar_masks is not None
            },
        )

    def __len__(self) -> int:
        return len(self.states)

    def parts(self) -> list[DraftedTree]:
        """These of each request."""
        parts = zip(self.states, self.trees, self.proposals, self.max_nodes, strict=True)
        return [
            DraftedTree(*part, self.grammar_masks.get(index)) for index, part in enumerate(parts)
        ]

    def where(self, is_wanted: Callable[[RequestState], bool]) -> DraftedTrees:
        """These of the requests that are wanted; itself where all are."""
        if all(map(is_wanted, self.states)):
            return self
        return DraftedTrees.of([part for part in self.parts() if is_wanted(part.state)])


@dataclass(frozen=True, slots=True, eq=False)
class TreeExtras:
    """What a request's tree has beside its nodes, by source; most have nothing.

    num_top_next_tokens  how many most probable next tokens of the root and every node are wanted
    candidates           of the tree, where an acceptance rule decides; else None
    grammar_masks        uint32 [1 + nodes, words]  the tokens that the request's grammar allows
                         after the root and each node; None without one
    """

    probes: Mapping[str, Probe] = field(default_factory=dict)
    num_top_next_tokens: Mapping[str, int] = field(default_factory=dict)
    candidates: TreeCandidates | None = None
    grammar_masks: UInt32 | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing."""
        has_rows = self.probes or self.num_top_next_tokens
        return not has_rows and self.candidates is None and self.grammar_masks is None

    @property
    def num_probe_rows(self) -> int:
        """Rows of its probes."""
        return sum(len(probe.tokens) for probe in self.probes.values())

    def of_root(self) -> TreeExtras:
        """What the root has where its tree is left out."""
        rule, masks = self.candidates, self.grammar_masks
        return TreeExtras(
            candidates=None if rule is None else no_candidates(rule.rule),
            grammar_masks=None if masks is None else masks[:1],
        )


NO_EXTRAS = TreeExtras()


@dataclass(frozen=True, slots=True, eq=False)
class TreeStep:
    """The root, the tree and the probes of one decoding request."""

    state: RequestState
    tree: TokenTree
    extras: TreeExtras
    tree_chunk: TreeChunk | None = None

    @property
    def root_token(self) -> int:
        """The token of the first row."""
        return self.state.token_ids[-1] if self.tree_chunk is None else self.tree_chunk.root.token

    @property
    def num_chosen(self) -> int:
        """Rows, the first ones, that get a target token."""
        return 1 + len(self.tree)

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return self.num_chosen + self.extras.num_probe_rows


@dataclass(frozen=True, slots=True, eq=False)
class TreeSteps:
    """The parts of all decoding requests, in order.

    drafted  the trees before the budget cut them, to learn from
    extras   by index of the request, of those that have any
    tree_chunks  likewise, of those whose trees go out in chunks; nodes of `trees` that follow nodes
             of earlier chunks stand below the root
    """

    states: Sequence[RequestState]
    trees: TreeBatch
    drafted: TreeBatch
    extras: Mapping[int, TreeExtras] = field(default_factory=dict)
    tree_chunks: Mapping[int, TreeChunk] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[TreeStep]:
        return map(self.part, range(len(self)))

    @property
    def num_rows(self) -> Int64:
        """int64 [requests]: rows of each in the step."""
        rows = self.trees.sizes + 1
        for index, extras in self.extras.items():
            rows[index] += extras.num_probe_rows
        return rows

    @property
    def followers(self) -> frozenset[str]:
        """Ids of the requests whose chunks go behind others of theirs."""
        later = (index for index, part in self.tree_chunks.items() if not part.is_first)
        return frozenset(self.states[index].request_id for index in later)

    def part(self, index: int) -> TreeStep:
        """That of one request."""
        extras = self.extras.get(index, NO_EXTRAS)
        return TreeStep(self.states[index], self.trees[index], extras, self.tree_chunks.get(index))

    def beside(
        self, tree_chunks: Sequence[tuple[RequestState, TreeChunk, TreeExtras]]
    ) -> TreeSteps:
        """These, and chunks of other requests behind them; itself without any."""
        if not tree_chunks:
            return self
        states, tree_chunks, extras = zip(*tree_chunks, strict=True)
        count = len(self)
        return TreeSteps(
            [*self.states, *states],
            TreeBatch.of([*self.trees, *(part.tree() for part in tree_chunks)]),
            TreeBatch.of([*self.drafted, *empty_trees(len(tree_chunks))]),
            {
                **self.extras,
                **{index: own for index, own in enumerate(extras, count) if not own.is_empty},
            },
            dict(enumerate(tree_chunks, count)),
        )

    def with_bare(self, indices: Collection[int]) -> TreeSteps:
        """The requests at these indices get their root alone, as in plain decoding."""
        if not indices:
            return self
        is_kept = np.ones(len(self), dtype=np.bool_)
        is_kept[list(indices)] = False
        extras = {
            index: own.of_root() if index in indices else own for index, own in self.extras.items()
        }
        return TreeSteps(
            self.states,
            self.trees.keep(is_kept.repeat(self.trees.sizes)),
            self.drafted.keep(is_kept.repeat(self.drafted.sizes)),
            {index: own for index, own in extras.items() if not own.is_empty},
            {
                index: part.bare() if index in indices else part
                for index, part in self.tree_chunks.items()
            },
        )

    def select(self, indices: Sequence[int]) -> TreeSteps:
        """Those of the requests at `indices`, which rise; itself where these are all."""
        if len(indices) == len(self):
            return self
        if not indices:
            return NO_TREE_STEPS
        return TreeSteps(
            [self.states[index] for index in indices],
            TreeBatch.of([self.trees[index] for index in indices]),
            TreeBatch.of([self.drafted[index] for index in indices]),
            {new: self.extras[old] for new, old in enumerate(indices) if old in self.extras},
            {
                new: self.tree_chunks[old]
                for new, old in enumerate(indices)
                if old in self.tree_chunks
            },
        )


NO_TREE_STEPS = TreeSteps((), empty_trees(0), empty_trees(0))


class ScheduledStep(NamedTuple):
    """What goes into the next step.

    edits             `edits_for` of each part, trees first; empty where no logits are changed
    num_decode_steps  tokens of each request, above 1 in a step of roots alone
    draft_batch       what drafters proposed for it; None if none was asked
    """

    trees: TreeSteps
    prompt_chunks: Sequence[PromptChunk]
    edits: Sequence[LogitEdits | None]
    num_decode_steps: int
    draft_batch: DraftBatch | None
