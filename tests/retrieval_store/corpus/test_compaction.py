from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.deploy.cli import main as cli
from draftline.retrieval_store.corpus.compaction import compact, documents_of, merge_segments
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.segment.check import check_segment
from draftline.retrieval_store.segment.packed_file import pack
from draftline.retrieval_store.segment.segment import Segment
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.segments import make_segment
from typer.testing import CliRunner

documents = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=6)
runner = CliRunner()


def plain(segment: Segment) -> list[list[int]]:
    return [document.tolist() for document in documents_of(segment)]


@given(st.lists(documents, min_size=1, max_size=3))
def test_a_merged_segment_is_the_one_built_of_all_documents_once(
    parts: list[list[list[int]]],
) -> None:
    merged, num_duplicates = merge_segments([make_segment(part) for part in parts])
    once = list(dict.fromkeys(tuple(document) for part in parts for document in part))
    assert plain(merged) == [list(document) for document in once]
    assert num_duplicates == sum(map(len, parts)) - len(once)
    assert merged.segment_id == make_segment(once).segment_id
    check_segment(merged, "merged")


def test_segments_of_different_models_are_not_merged() -> None:
    parts = [make_segment([[1]]), make_segment([[1]], model_hash="other")]
    with pytest.raises(ConfigError, match="for 2 different models; remove those"):
        merge_segments(parts)


def test_a_namespace_is_compacted_and_others_stay(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    old = {store.put("n", make_segment(part)) for part in ([[1, 2], [3]], [[3], [4, 5]])}
    kept = store.put("other", make_segment([[7, 8]]))
    report = compact(store, "n")
    assert set(report.removed) == old
    assert report.num_duplicates == 1
    assert store.manifest().segment_ids("n") == [report.segment_id]
    assert sorted(plain(store.get("n", report.segment_id))) == [[1, 2], [3], [4, 5]]
    assert store.manifest().segment_ids("other") == [kept]
    assert compact(store, "n").removed == ()
    with pytest.raises(ConfigError, match="nobody has no segments"):
        compact(store, "nobody")


def test_a_segment_within_another_leaves_that_one_in_place(tmp_path: Path) -> None:
    """The merged segment is one of the old ones, which must not go."""
    store = DirectoryStore(tmp_path)
    for part in ([[1, 2], [3, 4]], [[1, 2]], [[3, 4]]):
        store.put("n", make_segment(part))
    report = compact(store, "n")
    assert store.manifest().segment_ids("n") == [report.segment_id]
    assert report.num_duplicates == 2
    assert sorted(plain(store.get("n", report.segment_id))) == [[1, 2], [3, 4]]


SOUND = make_segment([[3, 1, 2] * 100, [1, 2, 3, 0]], vocab_size=4)


def rewritten(**changes: np.ndarray) -> Segment:
    names = ("text", "suffixes", "common_lens", "wide_children", "wide_nodes", "first_places")
    arrays = {name: changes.get(name, getattr(SOUND, name)) for name in names}
    return Segment.from_data(pack(asdict(SOUND.header), arrays), "x")


def swapped(array: np.ndarray, one: int, other: int) -> np.ndarray:
    changed = array.copy()
    changed[[one, other]] = array[[other, one]]
    return changed


def test_a_sound_segment_passes() -> None:
    check_segment(SOUND, "x")
    check_segment(make_segment([]), "x")


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("text", swapped(SOUND.text, -1, -2), "documents do not end"),
        ("text", np.where(SOUND.text == 3, np.uint32(9), SOUND.text), "token id is not below 4"),
        ("suffixes", swapped(SOUND.suffixes, 5, 6), "suffix 6 is not in its place"),
        ("suffixes", SOUND.suffixes[[0, 0, *range(2, 306)]], "suffix 1 is not"),
        ("common_lens", SOUND.common_lens + np.uint8(1), "suffix 0 is not"),
        ("first_places", SOUND.first_places + np.uint32(1), "table first_places does not agree"),
        ("wide_nodes", SOUND.wide_nodes[:-1], "table wide_nodes does not agree"),
        ("wide_children", SOUND.wide_children + np.uint32(1), "table wide_children does not"),
    ],
)
def test_unsound_segments_with_good_checksums_are_found(
    name: str, changed: np.ndarray, reason: str
) -> None:
    with pytest.raises(StoreError, match=f"here: .*{reason}.*build it again"):
        check_segment(rewritten(**{name: changed.astype(getattr(SOUND, name).dtype)}), "here")


def test_verify_names_the_bad_segment(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    good, bad = store.put("n", make_segment([[1, 2]])), store.put("n", make_segment([[3, 4]]))
    command = ["corpus", "verify", "--store", str(tmp_path)]
    passed = runner.invoke(cli.app, command)
    assert (passed.exit_code, passed.output.count("ok ")) == (0, 2)
    path = tmp_path / "n" / f"{bad}.segment"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    failed = runner.invoke(cli.app, command)
    assert failed.exit_code == 1
    assert f"ok   n/{good}" in failed.output
    assert f"BAD  n/{bad}" in failed.output


def test_compact_and_export_from_the_command_line(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for part in ([[1, 2], [3]], [[3], [4, 5]]):
        store.put("shared", make_segment(part))
    options = ["--store", str(tmp_path / "store")]
    assert "dropped: 1" in runner.invoke(cli.app, ["corpus", "compact", *options]).output
    again = runner.invoke(cli.app, ["corpus", "compact", *options]).output
    assert "has one segment already" in again
    output = tmp_path / "out.jsonl"
    done = runner.invoke(cli.app, ["corpus", "export", str(output), *options])
    assert "wrote 3 documents" in done.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["tokens"] for row in rows) == [[1, 2], [3], [4, 5]]
    refused = runner.invoke(cli.app, ["corpus", "export", str(output), *options, "--model", "demo"])
    assert isinstance(refused.exception, StoreError)
    assert "tokenizer_hash is tokenizer" in str(refused.exception)


def test_export_with_the_model_gives_texts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = ["corpus", "export", str(output), "--store", "demo", "--model", "demo"]
    assert "wrote 900 documents" in runner.invoke(cli.app, command).output
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert all(len(row["text"]) > 100 for row in rows)
