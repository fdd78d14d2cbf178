from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.directory_store.folder import folder_name, namespace_of
from draftline.retrieval_store.directory_store.store import (
    GRACE_SECONDS,
    DirectoryEraser,
    DirectoryStore,
)
from draftline.retrieval_store.serving.open_store import open_store
from draftline.retrieval_store.store import NAMESPACE
from hypothesis import given
from hypothesis import strategies as st
from support.contracts.store_contract import A, B, StoreContract
from support.inputs.segments import make_segment


class TestDirectoryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def set_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"

    def grow_old(self, segment_id: str) -> None:
        age(self.folder / "n" / f"{segment_id}.segment")

    @pytest.fixture
    def store(self, tmp_path: Path) -> DirectoryStore:
        return DirectoryStore(tmp_path / "store")

    @pytest.fixture
    def second_store(self, tmp_path: Path) -> DirectoryStore:
        return DirectoryStore(tmp_path / "store")


def age(path: Path) -> None:
    long_ago = path.stat().st_mtime - 2 * GRACE_SECONDS
    os.utime(path, (long_ago, long_ago))


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    segment_id = store.put("n", A)
    path = tmp_path / "n" / f"{segment_id}.segment"
    path.write_bytes(A.data[:-1] + b"\1")
    with pytest.raises(StoreError, match=str(path)):
        store.get("n", segment_id)


def test_a_file_of_another_segment_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    segment_id = store.put("n", A)
    (tmp_path / "n" / f"{segment_id}.segment").write_bytes(B.data)
    with pytest.raises(StoreError, match=f"holds another segment .{B.segment_id}"):
        store.get("n", segment_id)


@pytest.mark.parametrize(
    "sizes", [{"..": {"0" * 32: 1}}, {"n": {"0": 1}}, {"n": {"0" * 32: "many"}}]
)
def test_a_manifest_of_unsound_names_is_refused(tmp_path: Path, sizes: object) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"segments": sizes}))
    with pytest.raises(StoreError, match="manifest is corrupt"):
        DirectoryStore(tmp_path).manifest()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"segments": ', '{"segments": 3}'])
def test_a_corrupt_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json: corrupt"):
        DirectoryStore(tmp_path).manifest()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be"):
        DirectoryStore(tmp_path / "file").put("n", A)


def test_old_files_that_nobody_lists_are_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    kept, gone = store.put("n", A), store.put("n", B)
    store.delete("n", gone)
    left_by_a_crash = tmp_path / "n" / "abc.k2.new"
    left_by_a_crash.touch()
    files = {path.name for path in (tmp_path / "n").iterdir()}
    assert files == {f"{kept}.segment", f"{gone}.segment", "abc.k2.new"}
    for path in (tmp_path / "n").iterdir():
        age(path)
    new = store.put("n", make_segment([[9, 9]]))
    files = {path.name for path in (tmp_path / "n").iterdir()}
    assert files == {f"{kept}.segment", f"{new}.segment"}


def test_urls(tmp_path: Path) -> None:
    assert open_store(str(tmp_path)).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    for url in ("http://host/x", "", "s3://bucket"):
        with pytest.raises(ConfigError, match="store"):
            open_store(url)


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    """Another name for a segment would let its file be removed."""
    store = DirectoryStore(tmp_path)
    segment_id = store.put("n", A)
    path = tmp_path / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace(segment_id, "0" * 32))
    with pytest.raises(StoreError, match=r"manifest\.json: corrupt"):
        store.manifest()
    with pytest.raises(StoreError, match=r"manifest\.json: corrupt"):
        store.put("n", B)
    path.write_text(text)
    assert store.manifest().segment_ids("n") == [segment_id]


@pytest.mark.parametrize("name", ["Team", "a.b", "team.new"])
def test_folders_of_older_versions_are_read(tmp_path: Path, name: str) -> None:
    store = DirectoryStore(tmp_path)
    segment_id = store.put(name, A)
    (tmp_path / folder_name(name)).rename(tmp_path / name)
    (tmp_path / "manifest.json").write_text(
        json.dumps({"segments": {name: {segment_id: len(A.data)}}})
    )
    assert store.get(name, segment_id).data[:] == A.data
    for path in tmp_path.rglob("*"):
        age(path)
    other = store.put(name, B)
    assert store.get(name, segment_id).data[:] == A.data
    assert store.get(name, other).data[:] == B.data
    store.delete(name, segment_id)
    assert store.manifest().segment_ids(name) == [other]
    eraser = DirectoryEraser(tmp_path)
    eraser.erase(name)
    assert eraser.remains(name) == []


names = st.from_regex(NAMESPACE, fullmatch=True)


@given(one=names, other=names)
def test_names_of_folders_tell_all_namespaces_apart(one: str, other: str) -> None:
    assert namespace_of(folder_name(one)) == one
    # Folders of older versions have the namespaces' own names.
    assert namespace_of(one) == one
    assert len(folder_name(one)) <= 192
    assert folder_name(one) == folder_name(one).lower()
    assert "." not in folder_name(one)
    assert folder_name(one) != "lock"
    assert (folder_name(one) == folder_name(other)) == (one == other)
    assert folder_name(one) != folder_name(one.swapcase()) or one == one.swapcase()


def test_one_file_that_cannot_be_removed_is_in_nobodys_way(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("n", A)
    (tmp_path / "n" / "folder.segment").mkdir()
    age(tmp_path / "n" / "folder.segment")
    store.put("m", B)
    assert store.manifest().segment_ids("m") == [B.segment_id]


def test_the_grace_does_not_depend_on_the_writers_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    gone = store.put("n", A)
    store.delete("n", gone)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400)
    store.put("n", B)
    assert store.get("n", gone).data[:] == A.data
