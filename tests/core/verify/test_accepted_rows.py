"""The walk beside the logits is the coordinator's, for all requests of a step at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.proposals import Proposal
from draftline.core.steps import (
    HeadInput,
    StepInput,
    StepTrees,
    TreeRows,
    VerificationResult,
    prompt_step,
)
from draftline.core.tree.acceptance import AcceptanceTable
from draftline.core.tree.merge import merge_all
from draftline.core.tree.tree import TreeBatch
from draftline.core.tree.tree_loops import pack
from draftline.core.verify.accepted_rows import accepted_rows, committed_rows
from draftline.core.verify.walk import follow
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 3


def random_trees(rng: np.random.Generator, sizes: list[int]) -> TreeBatch:
    proposals = []
    for size in sizes:
        parents = np.array([rng.integers(-1, node) for node in range(size)], dtype=np.int32)
        tokens = rng.integers(VOCAB, size=size, dtype=np.int32)
        proposals.append([Proposal("any", tokens, parents, np.zeros(size, dtype=np.float32))])
    return merge_all(proposals, [200] * len(sizes), [200] * len(sizes), AcceptanceTable())


class Case:
    """A step of trees, some with probes behind them, and prompt chunks; and its target tokens."""

    def __init__(self, seed: int, sizes: list[int], chunks: list[int]) -> None:
        rng = np.random.default_rng(seed)
        self.trees = random_trees(rng, sizes)
        probes = rng.integers(0, 3, size=len(sizes)).tolist()
        own = list(zip(self.trees, probes, strict=True))
        counts = [1 + len(tree.tokens) + probe for tree, probe in own] + chunks
        starts = np.cumsum([0, *counts]).astype(np.int32)
        context = rng.integers(1, 50, size=len(counts)).astype(np.int32)
        tokens = rng.integers(VOCAB, size=starts[-1], dtype=np.int32)
        positions = np.concatenate([np.arange(n) for n in counts]) if counts else np.arange(0)
        positions = positions.astype(np.int32) + context.repeat(counts)
        masks, chosen = [], []
        for place, (tree, probe) in enumerate(own):
            first, size = starts[place], len(tree.tokens)
            tokens[first + 1 : first + 1 + size] = tree.tokens
            mask, depths = np.eye(counts[place], dtype=np.bool_), [0]
            for node, parent in enumerate(tree.parents.tolist()):
                mask[node + 1] |= mask[parent + 1]
                depths.append(depths[parent + 1] + 1)
            # A probe sees the root, and stands where a child of it would.
            mask[1 + size :, 0] = True
            positions[first : first + counts[place]] = context[place] + [*depths, *[1] * probe]
            masks.append(pack(mask))
            chosen += range(first, first + 1 + size)
        # Every second chunk is the last of its prompt; before the others stands a token.
        is_last = np.arange(len(chunks)) % 2 == 0
        ends = starts[len(sizes) + 1 :]
        self.told = np.where(is_last, -1, 7).astype(np.int32)
        chosen += (ends[is_last] - 1).tolist()
        self.targets = rng.integers(VOCAB, size=len(chosen), dtype=np.int32)
        self.num_trees, self.masks = len(sizes), masks
        none = [np.empty(0, dtype=np.uint64)]
        slots = np.arange(starts[-1], dtype=np.int32)
        self.step = replace(
            prompt_step(1, 4), token_ids=tokens, positions=positions, slots=slots,
            request_starts=starts, context_lens=context,
            logits_rows=np.array(chosen, dtype=np.int32),
            trees=StepTrees(
                np.concatenate(none + [mask.ravel() for mask in masks]), starts, slots, positions,
                len(sizes),
            ),
            heads=HeadInput(tuple(range(0, len(counts), 2)), following_tokens=self.told),
        )  # fmt: skip

    def apart(self) -> StepInput:
        """The same with an object a tree, and a column of an earlier step before its own."""
        trees = []
        for place, mask in enumerate(self.masks):
            own = slice(*self.step.request_starts[place : place + 2].tolist())
            bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
            size = own.stop - own.start
            wide = np.concatenate([np.ones((size, 1), dtype=np.bool_), bits[:, :size]], axis=1)
            columns = np.zeros(size + 1, dtype=np.int32)
            trees.append(TreeRows(pack(wide), columns, columns))
        num_chunks = len(self.step.context_lens) - self.num_trees
        return replace(self.step, trees=(*trees, *[None] * num_chunks))

    def expected(self) -> list[tuple[list[int], list[int]]]:
        """Of each request rows and the tokens behind them, as the coordinator walks."""
        count = self.num_trees + len(self.trees.nodes)
        steps, ends = follow(self.trees.nodes, self.trees.node_ends, self.targets[:count])
        starts, tokens = self.step.request_starts.tolist(), self.step.token_ids.tolist()
        first, found = 0, []
        for place, end in enumerate(ends.tolist()):
            rows = (steps[0, first:end] + starts[place]).tolist()
            found.append((rows, steps[1, first:end].tolist()))
            first = end
        last = iter(self.targets[count:].tolist())
        for index, told in enumerate(self.told.tolist()):
            rows = list(range(*starts[self.num_trees + index :][:2]))
            behind = tokens[rows[0] + 1 : rows[-1] + 1]
            found.append((rows, [*behind, told if told >= 0 else next(last)]))
        return found


sizes = st.lists(st.integers(0, 12) | st.just(70), max_size=5)
cases = st.builds(Case, st.integers(0, 2**16), sizes, st.lists(st.integers(1, 4), max_size=3))


@given(cases)
def test_rows_and_tokens_are_the_coordinators(case: Case) -> None:
    for step in (case.step, case.apart()):
        rows, following, starts = committed_rows(step, case.targets)
        expected = case.expected()
        spans = [slice(*starts[place : place + 2].tolist()) for place in range(len(expected))]
        assert [(rows[own].tolist(), following[own].tolist()) for own in spans] == expected
        wanted = [row for place in step.heads.feature_requests for row in expected[place][0]]
        assert accepted_rows(step, case.targets).tolist() == wanted


@given(cases)
def test_a_rule_decides_where_there_is_one(case: Case) -> None:
    results = tuple(
        VerificationResult([len(tree.tokens) - 1] if len(tree.tokens) else [], 0)
        for tree in case.trees
    )
    rows, _, starts = committed_rows(case.step, case.targets, results)
    firsts = case.step.request_starts.tolist()
    for place, result in enumerate(results):
        own = rows[starts[place] : starts[place + 1]] - firsts[place]
        assert own.tolist() == [0, *(node + 1 for node in result.path)]


@pytest.mark.parametrize(
    ("told", "rows"), [(np.array([-1]), [0, 1]), (np.array([5]), [0, 1, 2]), (None, [0, 1])]
)
def test_a_row_without_a_token_behind_it_is_left_out(told: Int32 | None, rows: list[int]) -> None:
    step = replace(prompt_step(3, 4), logits_rows=np.empty(0, dtype=np.int32))
    following = None if told is None else told.astype(np.int32)
    step = replace(step, heads=HeadInput(following_tokens=following))
    assert committed_rows(step, np.empty(0, dtype=np.int32)).rows.tolist() == rows
