"""Bias, penalties and masks: numpy, torch and Triton agree bit by bit, and do what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from draftline.core import sampling as reference
from draftline.core.arrays import Float32, UInt32
from draftline.core.request.allowed_tokens import contains, full_mask, mask_of, num_words, unpack
from draftline.core.steps import LogitEdits, Penalties
from draftline.kernels.sampling import edit_kernels
from draftline.kernels.sampling.edit_tables import EditCapacity, EditTables
from draftline.kernels.sampling.reference import edit_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs.attention import DEVICE
from transformers import RepetitionPenaltyLogitsProcessor

NO_IDS = np.empty(0, dtype=np.int32)
NO_BIAS = np.empty(0, dtype=np.float32)


def penalties(
    tokens: list[int], counts: list[int], in_prompt: list[bool],
    path: tuple[tuple[int, int], ...] = (),
    repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0,
) -> Penalties:  # fmt: skip
    rows, indices = np.array(path, dtype=np.int32).reshape(-1, 2).T
    return Penalties(
        np.array(tokens, dtype=np.int32), np.array(counts, dtype=np.int32),
        np.array(in_prompt, dtype=np.bool_), rows, indices, repetition, presence, frequency,
    )  # fmt: skip


def edit(
    rows: int, *, first: int = 0, bias: dict[int, float] | None = None,
    penalty: Penalties | None = None, mask: UInt32 | None = None,
) -> LogitEdits:  # fmt: skip
    pairs = bias or {}
    return LogitEdits(
        first, rows, np.array([*pairs], dtype=np.int32),
        np.array([*pairs.values()], dtype=np.float32), penalty, mask,
    )  # fmt: skip


def by_kernels(logits: Float32, *edits: LogitEdits) -> np.ndarray:
    num_rows, vocab_size = logits.shape
    tables = EditTables(EditCapacity.of(edits, num_rows), vocab_size, DEVICE)
    return run_kernels(logits, tables, *edits)


def run_kernels(logits: Float32, tables: EditTables, *edits: LogitEdits) -> np.ndarray:
    tables.refill(edits)
    out = torch.full(logits.shape, torch.nan, device=DEVICE)
    edit_kernels.edit_logits(torch.from_numpy(logits).to(DEVICE), tables, out)
    return out.cpu().numpy()


def by_torch(logits: Float32, *edits: LogitEdits) -> np.ndarray:
    return edit_logits(torch.from_numpy(logits), edits).numpy()


def all_ways(logits: Float32, *edits: LogitEdits) -> np.ndarray:
    ours = reference.edit_logits(logits, edits)
    for way in (by_torch, by_kernels):
        np.testing.assert_array_equal(ours, way(logits, *edits), err_msg=way.__name__)
    return ours


def test_without_edits_nothing_is_copied() -> None:
    logits = np.zeros((1, 3), dtype=np.float32)
    assert reference.edit_logits(logits, ()) is logits


def test_a_worked_example() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5]] * 2, dtype=np.float32)
    # Token 0 is in the prompt, token 1 twice in the answer; row 1 has token 2 on its path.
    penalty = penalties(
        [0, 1, 2], [0, 2, 0], [True, False, False], ((1, 2),),
        repetition=2.0, presence=0.5, frequency=0.25,
    )  # fmt: skip
    found = all_ways(logits, edit(2, bias={3: -1.0}, penalty=penalty))
    np.testing.assert_allclose(found[0], [1.0, -4.0 - 0.5 - 0.5, 1.0, -0.5])
    np.testing.assert_allclose(found[1], [1.0, -5.0, 0.5 - 0.5 - 0.25, -0.5])
    assert logits[0].tolist() == [2.0, -2.0, 1.0, 0.5]


def test_edits_touch_their_own_rows_only() -> None:
    logits = np.ones((4, 5), dtype=np.float32)
    found = all_ways(logits, edit(2, first=1, mask=mask_of([2], 5)[None]))
    assert np.isneginf(found).sum(axis=1).tolist() == [0, 4, 4, 0]
    assert found[1, 2] == 1


def test_every_row_has_a_mask_of_its_own() -> None:
    masks = np.stack([mask_of([row], 40) for row in (3, 33)])
    found = all_ways(np.zeros((2, 40), dtype=np.float32), edit(2, mask=masks))
    assert np.argwhere(found == 0).tolist() == [[0, 3], [1, 33]]


def test_repetition_is_that_of_transformers() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32)
    text = [3, 7, 7, 12]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([text]),  # type: ignore[arg-type]
        torch.from_numpy(logits.copy()),  # type: ignore[arg-type]
    )
    own = penalties([3, 7, 12], [0, 2, 1], [True, False, False], repetition=1.3)
    np.testing.assert_allclose(all_ways(logits, edit(1, penalty=own)), theirs.numpy(), rtol=1e-6)


def random_edit(random: np.random.Generator, rows: int, vocab_size: int) -> LogitEdits:
    tokens = random.permutation(vocab_size)[: int(random.integers(1, vocab_size))]
    path = [(int(random.integers(rows)), int(random.integers(len(tokens)))) for _ in range(9)]
    penalty = penalties(
        tokens.tolist(), random.integers(0, 4, len(tokens)).tolist(),
        (random.random(len(tokens)) < 0.5).tolist(), tuple(path),
        *random.uniform([0.5, -2, -2], [2, 2, 2]).tolist(),
    )  # fmt: skip
    bias = {int(t): float(random.normal()) for t in random.permutation(vocab_size)[:5]}
    mask = random.integers(0, 2**32, (rows, num_words(vocab_size)), dtype=np.uint32)
    return edit(rows, first=1, bias=bias, penalty=penalty, mask=mask)


@given(st.integers(0, 2**32), st.integers(2, 90))
def test_numpy_and_torch_agree(case: int, vocab_size: int) -> None:
    random = np.random.default_rng(case)
    rows = int(random.integers(1, 6))
    logits = (random.normal(size=(rows + 2, vocab_size)) * 8).astype(np.float32)
    changes = random_edit(random, rows, vocab_size)
    np.testing.assert_array_equal(
        reference.edit_logits(logits, [changes]), by_torch(logits, changes)
    )


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from([2, 33, 700, 4100]))
def test_kernels_agree_with_numpy(case: int, vocab_size: int) -> None:
    """Two requests, in tables that have held another step."""
    random = np.random.default_rng(case)
    logits = (random.normal(size=(6, vocab_size)) * 8).astype(np.float32)
    tables = EditTables(EditCapacity(8, 2, 10, 2 * vocab_size, 18, 8), vocab_size, DEVICE)
    for _ in range(2):
        first = random_edit(random, 2, vocab_size)
        second = replace(random_edit(random, 2, vocab_size), first_row=3)
        if random.random() < 0.5:
            first = replace(first, penalties=None)
        if random.random() < 0.5:
            second = replace(second, mask=second.mask[:1] if second.mask is not None else None)
        expected = reference.edit_logits(logits, [first, second])
        np.testing.assert_array_equal(run_kernels(logits, tables, first, second), expected)


@given(st.integers(1, 200), st.data())
def test_masks_hold_what_was_put_in(vocab_size: int, data: st.DataObject) -> None:
    ids = data.draw(st.sets(st.integers(0, vocab_size - 1)))
    mask = mask_of(ids, vocab_size)
    assert set(np.flatnonzero(unpack(mask[None], vocab_size)[0]).tolist()) == ids
    every = np.arange(vocab_size, dtype=np.int32)
    assert contains(np.repeat(mask[None], vocab_size, 0), every).tolist() == [
        token in ids for token in range(vocab_size)
    ]
    assert unpack(full_mask(vocab_size)[None], vocab_size).all()
