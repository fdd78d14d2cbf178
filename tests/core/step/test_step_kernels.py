"""Rows of a step against the loops that they stand for."""

import numpy as np
from draftline.core.arrays import ROOT
from draftline.core.step.layout import lay_out
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 20)), min_size=0, max_size=4
)


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(SIZES, SIZES, st.integers(1, 4))
def test_rows_stand_behind_their_context(
    trees: list[tuple[int, int, int]], chunks: list[tuple[int, int, int]], block_size: int
) -> None:
    """A tree has nodes, probe rows and a context; a chunk rows, chosen rows and a context."""
    rng = np.random.default_rng(0)
    num_nodes = sum(nodes for nodes, _, _ in trees)
    nodes = rng.integers(0, 99, (num_nodes, 4)).astype(np.int32)
    nodes[:, 1] = ROOT
    probe_tokens, probe_offsets = rng.integers(0, 99, (2, sum(own for _, own, _ in trees)))
    chunk_tokens = rng.integers(0, 99, sum(rows for rows, _, _ in chunks))
    chosen_of_chunks = [min(rows, chosen) for rows, chosen, _ in chunks]
    contexts = [context for _, _, context in (*trees, *chunks)]
    tables = rng.permutation(len(contexts) * 40).reshape(-1, 40).astype(np.int32)
    token_ids, positions, slots, starts, logits_rows, chosen = lay_out(
        nodes, np.cumsum([nodes for nodes, _, _ in trees], dtype=np.int64),
        int32([1000 + index for index in range(len(trees))]),
        int32(probe_tokens.tolist()), int32(probe_offsets.tolist()),
        int32([own for _, own, _ in trees]), int32(chunk_tokens.tolist()),
        int32([rows for rows, _, _ in chunks]), int32(chosen_of_chunks), int32(contexts),
        tables, block_size,
    )  # fmt: skip
    rows: list[tuple[int, int]] = []
    wanted, counts, node, probe, prompt = [], [], 0, 0, 0
    for index, (num, own, context) in enumerate(trees):
        wanted += range(len(rows), len(rows) + 1 + num)
        counts.append(1 + num)
        rows.append((1000 + index, context))
        rows += [(int(row[0]), context + int(row[2])) for row in nodes[node : node + num]]
        probes = slice(probe, probe + own)
        rows += [
            (int(token), context + int(offset))
            for token, offset in zip(probe_tokens[probes], probe_offsets[probes], strict=True)
        ]
        node, probe = node + num, probe + own
    for (num, _, context), taken in zip(chunks, chosen_of_chunks, strict=True):
        rows += [(int(chunk_tokens[prompt + own]), context + own) for own in range(num)]
        wanted += range(len(rows) - taken, len(rows))
        counts.append(taken)
        prompt += num
    assert list(zip(token_ids.tolist(), positions.tolist(), strict=True)) == rows
    assert (logits_rows.tolist(), chosen.tolist()) == (wanted, counts)
    sizes = [1 + nodes + own for nodes, own, _ in trees] + [num for num, _, _ in chunks]
    assert starts.tolist() == [0, *np.cumsum(sizes).tolist()]
    for part, (table, context) in enumerate(zip(tables.tolist(), contexts, strict=True)):
        for place in range(sizes[part]):
            block, rest = divmod(context + place, block_size)
            assert slots[starts[part] + place] == table[block] * block_size + rest
