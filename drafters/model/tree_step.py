"""The step that runs a model on nodes behind the cached texts of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ...core.arrays import ROOT, Float32, Int32
from ...core.sampling.rows import sampling_rows
from ...core.step.builder import block_tables
from ...core.steps import StepInput, StepOutput, TreeRows
from ..coupled_rank import CoupledChoice, rank_coupled
from .text_distribution import TextDistribution


class TreePart(NamedTuple):
    """What one request has in such a step.

    token_ids        of the nodes that are fed, in the model's own ids
    rows             what they see of each other and of nodes that were fed before
    context_len      tokens of the text that all of them see
    noise_positions  of the tokens after the last nodes, those that are looked at, as noise counts
    """

    token_ids: Sequence[int]
    rows: TreeRows
    context_len: int
    blocks: Sequence[int]
    distribution: TextDistribution
    noise_positions: Sequence[int]


def build_tree_step(
    parts: Sequence[TreePart], num_top: int, *, with_entropies: bool = False
) -> StepInput:
    """The step of all parts, whose results have the `num_top` most probable tokens of a row."""
    counts = [len(part.token_ids) for part in parts]
    ends = [*accumulate(counts)]
    wanted = [len(part.noise_positions) for part in parts]
    own = [slice(len(part.rows.slots) - len(part.token_ids), None) for part in parts]
    pairs = list(zip(parts, own, strict=True))
    logits_rows = [
        row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)
    ]
    distributions = [part.distribution for part in parts]
    no_rows = np.empty(0, dtype=np.int32)
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=np.array([token for part in parts for token in part.token_ids], dtype=np.int32),
        positions=np.concatenate([part.rows.positions[rows] for part, rows in pairs]),
        slots=np.concatenate([part.rows.slots[rows] for part, rows in pairs]),
        request_starts=np.array([0, *ends], dtype=np.int32),
        context_lens=np.array([part.context_len for part in parts], dtype=np.int32),
        block_tables=block_tables([part.blocks for part in parts]),
        trees=tuple(part.rows for part in parts),
        logits_rows=np.array(logits_rows, dtype=np.int32),
        sampling=sampling_rows(
            [distribution.temperature for distribution in distributions],
            [distribution.logits_params for distribution in distributions],
            [distribution.seed for distribution in distributions],
            np.array([one for part in parts for one in part.noise_positions], dtype=np.int64),
            np.array(wanted, dtype=np.int32),
        ),
        probe_rows=no_rows,
        probe_top_k=0,
        scored_rows=no_rows,
        scored_tokens=no_rows,
        with_log_probs=True,
        with_entropies=with_entropies,
        num_top=num_top,
    )


def ranked_tokens(
    output: StepOutput, row: int, num_top: int, choice: CoupledChoice, count: int
) -> tuple[Int32, Float32]:
    """The `count` tokens that most likely follow a row, best first, given the request's noise, and
    the logarithms of their probabilities: of its `num_top` most probable ones and, however unlikely
    it was, what the model itself would choose."""
    assert output.top is not None
    assert output.log_probs is not None
    tokens, log_probs = output.top.ids[row, :num_top], output.top.log_probs[row, :num_top]
    chosen = output.target_tokens[row]
    if chosen not in tokens:
        tokens = np.append(tokens, chosen)
        log_probs = np.append(log_probs, output.log_probs[row])
    siblings = np.full(len(tokens), ROOT, dtype=np.int32)
    tokens, _, given = rank_coupled(tokens, siblings, log_probs, choice, count)
    return tokens, given
