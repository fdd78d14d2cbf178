"""The share of FlashAttention in a step, with a fake of its function; and the merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.kernels.attention.flash_attention import (
    FlashOps,
    flash_attention,
    merge_results,
    plan_flash,
)
from draftline.kernels.attention.spec import AttentionShape, LayerSpec
from draftline.kernels.dispatch import load_ops
from support.fakes.fake_flash import PAGE, flash_attn_varlen_func
from support.inputs.attention import Part, make_case

SHAPE = AttentionShape(4, 2, 16)
# Trees and chunks in turn; a tree and a chunk with no context.
MIXED = [
    Part(300, parents=[-1, 0, 0, 1]),
    Part(0, num_rows=20),
    Part(0, parents=[-1, 0]),
    Part(260, num_rows=7),
    Part(40, parents=[-1, 0, 1], in_flight=1),
    Part(50),
]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the fake computes on the CPU")


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (None, 2.0), (30, 1.0)])
@pytest.mark.parametrize("kinds", ["mixed", "chunks", "trees"])
def test_equals_dense_attention(window: int | None, softcap: float | None, kinds: str) -> None:
    kind = {"mixed": (True, False), "chunks": (True,), "trees": (False,)}[kinds]
    parts = [part for part in MIXED if (part.parents is None) in kind]
    case = make_case(parts, SHAPE, LayerSpec(0.25, window, softcap), block_size=PAGE)
    # FlashAttention loads whole pages, and its masked columns must be finite.
    pairs = case.pairs.nan_to_num(0.0)
    work = plan_flash(case.step, PAGE, case.layout(), case.layout())
    ops = FlashOps(flash_attn_varlen_func, load_ops("reference").paged_attention)
    out = flash_attention(ops, work, case.query, pairs, case.spec)
    np.testing.assert_allclose(out, case.expected()[0], rtol=0, atol=1e-5)


def test_trees_and_chunks_are_calls_of_their_own() -> None:
    case = make_case(MIXED, SHAPE, LayerSpec(0.25), block_size=PAGE)
    work = plan_flash(case.step, PAGE, case.layout(), case.layout())
    chunks, contexts = work.chunks, work.contexts
    assert chunks is not None
    assert contexts is not None
    assert (chunks.is_causal, contexts.is_causal) == (True, False)
    assert chunks.query_starts.tolist() == [0, 20, 27, 28]
    assert chunks.key_starts.tolist() == [0, 20, 20 + 267, 20 + 267 + 51]
    assert contexts.query_starts.tolist() == [0, 4, 6, 8]
    assert contexts.key_starts.tolist() == [0, 300, 300, 340]
    assert contexts.rows.tolist() == [0, 1, 2, 3, 24, 25, 33, 34]
    assert (chunks.most_rows, chunks.most_columns) == (20, 267)


def test_merged_halves_are_the_whole() -> None:
    torch.manual_seed(0)
    logits, values = torch.randn(5, 3, 12) * 30, torch.randn(12, 8)
    halves = [
        (logits[..., part].softmax(-1) @ values[part], logits[..., part].logsumexp(-1))
        for part in (slice(0, 5), slice(5, 12))
    ]
    merged = merge_results(*halves[0], *halves[1])
    torch.testing.assert_close(merged, logits.softmax(-1) @ values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_a_row_that_one_side_does_not_see_is_the_other_side(nothing: float) -> None:
    out, sums = torch.randn(2, 3, 8), torch.full((2, 3), 40.0)
    empty, empty_sums = torch.zeros(2, 3, 8), torch.full((2, 3), nothing)
    torch.testing.assert_close(merge_results(out, sums, empty, empty_sums), out)
    torch.testing.assert_close(merge_results(empty, empty_sums, out, sums), out)
    assert (merge_results(empty, empty_sums, empty, empty_sums) == 0).all()
