from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.segment.packed_file import PREFIX, pack
from draftline.retrieval_store.segment.segment import SEPARATOR, Segment
from support.inputs.segments import make_segment

SEGMENT = make_segment([[3, 1, 2], [1, 2]], vocab_size=4)
ARRAYS = ("text", "suffixes", "common_lens", "wide_children", "wide_nodes", "first_places")


def test_worked_example() -> None:
    """Text 3 1 2 | 1 2 |, sorted: 12| (at 1 and 4), 2| (2 and 5), 312, | (3 and 6)."""
    assert SEGMENT.text.tolist() == [3, 1, 2, SEPARATOR, 1, 2, SEPARATOR]
    assert SEGMENT.suffixes.tolist() == [4, 1, 5, 2, 0, 6, 3]
    assert SEGMENT.common_lens.tolist() == [0, 3, 0, 2, 0, 0, 1]
    assert SEGMENT.first_places.tolist() == [0, 0, 2, 4, 5]
    header = SEGMENT.header
    assert (header.num_documents, header.num_tokens, header.vocab_size) == (2, 5, 4)


def test_file_and_bytes_are_the_same_segment(tmp_path: Path) -> None:
    path = tmp_path / "a.segment"
    path.write_bytes(SEGMENT.data)
    mapped = Segment.open(path)
    assert mapped.header == SEGMENT.header
    for name in ARRAYS:
        assert np.array_equal(getattr(mapped, name), getattr(SEGMENT, name))
        assert not getattr(mapped, name).flags.writeable
    assert mapped.segment_id == SEGMENT.segment_id


def test_equal_corpora_have_equal_ids_and_others_have_not() -> None:
    assert make_segment([[3, 1, 2], [1, 2]], vocab_size=4).segment_id == SEGMENT.segment_id
    others = [
        make_segment([[3, 1, 2], [1, 3]], vocab_size=4),
        make_segment([[3, 1, 2], [1, 2]], vocab_size=5),
        make_segment([[3, 1, 2], [1, 2]], vocab_size=4, tokenizer_hash="other"),
    ]
    assert len({SEGMENT.segment_id, *(other.segment_id for other in others)}) == 4


def test_every_changed_byte_is_detected() -> None:
    for at in range(len(SEGMENT.data)):
        changed = bytearray(SEGMENT.data)
        changed[at] ^= 0x10
        with pytest.raises(StoreError, match=r"the\.file: "):
            Segment.from_data(bytes(changed), "the.file")


def test_every_missing_end_and_extra_byte_is_detected() -> None:
    for size in range(len(SEGMENT.data)):
        with pytest.raises(StoreError, match=r"the\.file: "):
            Segment.from_data(SEGMENT.data[:size], "the.file")
    with pytest.raises(StoreError, match="1 bytes after the last array"):
        Segment.from_data(SEGMENT.data[:] + b"\0", "the.file")


def test_another_format_version_is_named() -> None:
    data = bytearray(SEGMENT.data)
    struct.pack_into("<I", data, 8, 99)
    with pytest.raises(StoreError, match="format version 99, this draftline reads 2"):
        Segment.from_data(bytes(data), "the.file")


def test_a_sound_file_of_other_content_is_refused() -> None:
    with pytest.raises(StoreError, match="not a retrieval segment"):
        Segment.from_data(pack({"kind": "other"}, {"a": np.zeros(3)}), "the.file")
    header_len = struct.unpack_from("<I", SEGMENT.data, 12)[0]
    fields = json.loads(SEGMENT.data[PREFIX.size : PREFIX.size + header_len])["fields"]
    arrays = {name: getattr(SEGMENT, name) for name in ARRAYS if name != "text"}
    short = pack(fields, {**arrays, "text": SEGMENT.text[:-1]})
    with pytest.raises(StoreError, match="counts do not agree"):
        Segment.from_data(short, "the.file")


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.segment"
    empty.touch()
    for path in (empty, tmp_path / "missing.segment", tmp_path):
        with pytest.raises(StoreError, match=str(path)):
            Segment.open(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokenizer_hash", "other"), ("vocab_size", 5)],
)
def test_a_segment_for_another_model_is_refused(field: str, value: object) -> None:
    SEGMENT.require("here", tokenizer_hash="tokenizer", vocab_size=4)
    SEGMENT.require("here")
    with pytest.raises(StoreError, match=f"here: {field} is .*, the served model has {value}"):
        SEGMENT.require("here", **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("document", [[0, 4], [-1]])
def test_tokens_outside_the_vocabulary_are_refused(document: list[int]) -> None:
    with pytest.raises(ConfigError, match="use the target's tokenizer"):
        make_segment([document], vocab_size=4)


def test_an_empty_corpus_is_a_segment() -> None:
    assert Segment.from_data(make_segment([]).data, "x").header.num_tokens == 0
