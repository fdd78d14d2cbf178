"""Contexts of the rows that drafters ask about: the text that each follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...core.steps import StepInput
from ...core.tree.ancestor_bits import unpack


class RowContext(NamedTuple):
    """The text that a row follows: its request's text before `start`, then `tokens`.

    The last token is the row's own. `seed` identifies the request.
    """

    seed: int
    start: int
    tokens: tuple[int, ...]


# The target's most probable next tokens, best first.
Said = dict[RowContext, tuple[int, ...]]


def probed_contexts(step: StepInput) -> Iterator[RowContext]:
    """Contexts of the step's `probe_rows`, in order.

    A node follows the root and its ancestors; a row of a pool sees one token at each position, too.
    """
    owners = np.searchsorted(step.request_starts, step.probe_rows, side="right") - 1
    firsts = step.request_starts[owners]
    # A request that is asked about has a root, which gets a target token.
    seeds = step.sampling.seed[np.searchsorted(step.logits_rows, firsts)]
    rows = zip(
        seeds.tolist(), owners.tolist(), firsts.tolist(), step.probe_rows.tolist(), strict=True
    )
    for seed, owner, first, row in rows:
        tree = step.trees[owner]
        assert tree is not None
        visible = unpack(tree.ancestors[row - first : row - first + 1], len(tree.slots))
        seen = first + np.flatnonzero(visible[0])
        start = int(step.positions[first])
        assert np.array_equal(step.positions[seen], np.arange(start, start + len(seen)))
        yield RowContext(seed, start, tuple(step.token_ids[seen].tolist()))
