"""Counts of a text's tokens, and penalties along the paths of a tree."""

from __future__ import annotations

from collections import Counter

import numpy as np
from draftline.core.logits_params import LogitsParams
from draftline.core.proposals import Proposal
from draftline.core.request.request import TokenCounts
from draftline.core.sampling.choose import counts_of
from draftline.core.sampling.rows import penalties_of
from draftline.core.tree.merge import merge
from hypothesis import given
from hypothesis import strategies as st

tokens = st.lists(st.integers(0, 30), max_size=40)
edges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=10)


@given(tokens, st.lists(tokens, max_size=4), edges)
def test_every_row_counts_the_text_and_its_own_path(
    prompt: list[int], answers: list[list[int]], drafted: list[tuple[int, int]]
) -> None:
    counts = TokenCounts(prompt)
    for answer in answers:
        kept, counts = counts, counts.copy()
        counts.append(answer)
        kept.append([99])
    parents = [min(parent, node) - 1 for node, (_, parent) in enumerate(drafted)]
    proposal = Proposal(
        "any", np.array([token for token, _ in drafted], dtype=np.int32),
        np.array(parents, dtype=np.int32), np.zeros(len(drafted), dtype=np.float32),
    )  # fmt: skip
    tree = merge([proposal], 10, 10)
    penalties = penalties_of(LogitsParams(presence_penalty=1.0), counts, tree)
    distinct = penalties.tokens.tolist()
    assert len(set(distinct)) == len(distinct)
    assert {token for token, own in zip(distinct, penalties.in_prompt, strict=True) if own} == set(
        prompt
    )
    text = Counter(token for answer in answers for token in answer)
    paths = [Counter[int]()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append(paths[parent + 1] + Counter([token]))
    for row, path in zip(counts_of(penalties, 1 + len(tree)), paths, strict=True):
        assert dict(zip(distinct, row.tolist(), strict=True)) == {
            token: text[token] + path[token] for token in distinct
        }
