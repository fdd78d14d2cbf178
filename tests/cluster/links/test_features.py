"""Features on the wire: columns of a drafter, 16 bits, pieces, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.cluster.links.features import (
    feature_bytes,
    feature_columns,
    from_bfloat16,
    newest,
    pieces,
    to_bfloat16,
)
from draftline.core.errors import DrafterError
from draftline.core.proposals import FeatureLayers, FeatureRows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    3.4e38,
    -3.4e38,
    1e-45,
    65504.0,
    1e6,
    1 + 2**-8,
    1 + 3 * 2**-8,
]


@given(arrays(np.uint32, array_shapes(min_dims=2, max_dims=2), elements=st.integers(0, 2**32 - 1)))
def test_numbers_are_rounded_as_torch_rounds_them(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    rounded = from_bfloat16(to_bfloat16(values))
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded, expected)


def test_what_overflows_16_bit_floats_stays_finite() -> None:
    values = np.array([SPECIAL], dtype=np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(values)), expected)
    assert np.isfinite(from_bfloat16(to_bfloat16(np.array([[1e6]], dtype=np.float32)))).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FC00000])
def test_what_is_no_number_stays_none(bits: int) -> None:
    values = np.array([[bits]], dtype=np.uint32).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(values))).all()


def test_parts_of_arrays_are_rounded_like_whole_ones() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6) / 7
    assert np.array_equal(to_bfloat16(values[:, ::2]), to_bfloat16(values)[:, ::2])


def rows_of(request_id: str, position: int, count: int, width: int = 4) -> FeatureRows:
    values = (position + np.arange(count, dtype=np.float32))[:, None] * np.ones(width)
    return FeatureRows(request_id, position, values.astype(np.float32))


def tokens(rows: list[FeatureRows]) -> dict[str, list[int]]:
    """Positions by request; each row holds its own."""
    found: dict[str, list[int]] = {}
    for own in rows:
        places = list(range(own.position, own.position + len(own.values)))
        assert own.values[:, 0].tolist() == places
        found.setdefault(own.request_id, []).extend(places)
    return found


GROUPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=6)


def in_order(groups: list[tuple[str, int]]) -> list[FeatureRows]:
    ends: dict[str, int] = {}
    rows = []
    for name, count in groups:
        rows.append(rows_of(name, ends.get(name, 0), count))
        ends[name] = ends.get(name, 0) + count
    return rows


@given(GROUPS, st.integers(1, 64))
def test_pieces_are_all_rows_in_order(groups: list[tuple[str, int]], most_bytes: int) -> None:
    rows = in_order(groups)
    found = pieces(rows, most_bytes)
    assert tokens([own for piece in found for own in piece]) == tokens(
        [own for own in rows if len(own.values)]
    )
    for piece in found:
        # Eight bytes are a row.
        assert feature_bytes(piece) <= max(most_bytes, 8)
    assert all(found[1:])


@given(GROUPS, st.integers(0, 200))
def test_the_newest_of_each_request_are_kept(groups: list[tuple[str, int]], most: int) -> None:
    rows = in_order(groups)
    kept = newest(rows, most)
    assert feature_bytes(kept) <= most
    if feature_bytes(rows) <= most:
        assert kept is rows
        return
    share = most // len({own.request_id for own in rows}) // 8
    left = tokens(list(kept))
    for name, places in tokens(rows).items():
        assert left.get(name, []) == places[len(places) - min(share, len(places)) :]


def test_columns_are_of_the_drafters_layers_in_its_order() -> None:
    handed_out = FeatureLayers((-1, 3, 9), 2)
    columns = feature_columns(handed_out, FeatureLayers((9, -1), 2))
    rows = FeatureRows("r", 5, np.array([[0, 1, 2, 3, 4, 5]], dtype=np.float32))
    assert columns.of(rows).values.tolist() == [[4, 5, 0, 1]]
    assert columns.of(rows).position == 5
    assert feature_columns(handed_out, handed_out).of(rows) is rows


@pytest.mark.parametrize(
    ("handed_out", "read", "message"),
    [
        (FeatureLayers((3,), 8), FeatureLayers((2,), 8), r"^model: .*\[2\] .*\[3\].*folder"),
        (FeatureLayers((3,), 8), FeatureLayers((3,), 16), r"^model: .*width 16.*width 8"),
        (FeatureLayers((3,), 8), None, r"^kind: is head"),
        (None, FeatureLayers((3,), 8), r"^kind: .*kind: head, and model"),
    ],
)
def test_what_does_not_fit_names_the_setting(
    handed_out: FeatureLayers | None, read: FeatureLayers | None, message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        feature_columns(handed_out, read)
