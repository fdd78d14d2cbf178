from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.directory_store import GRACE_SECONDS, DirectoryStore
from draftline.retrieval_store.open_store import open_store
from support.segments import make_segment
from support.store_contract import A, B, StoreContract


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
