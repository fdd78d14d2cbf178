"""What every segment store must do; a test class per store inherits it."""

from __future__ import annotations

import threading

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.store import SegmentStore
from support.inputs.segments import make_segment

A = make_segment([[1, 2, 3, 4]])
B = make_segment([[5, 6, 7, 8]])
C = make_segment([[9, 10, 11]])


class StoreContract:
    def grow_old(self, segment_id: str) -> None:
        """Make a segment of namespace `n` look as if it was stored long ago, if age matters."""

    def test_a_new_store_is_empty_and_was_never_written(self, store: SegmentStore) -> None:
        manifest = store.manifest()
        assert manifest.sizes == {}
        assert not manifest.written

    def test_what_was_put_is_listed_and_can_be_read(self, store: SegmentStore) -> None:
        segment_id = store.put("tenant", A)
        manifest = store.manifest()
        assert manifest.written
        assert manifest.sizes == {"tenant": {segment_id: len(A.data)}}
        assert store.get("tenant", segment_id).data[:] == A.data

    def test_namespaces_are_apart(self, store: SegmentStore) -> None:
        segment_id = store.put("one", A)
        with pytest.raises(StoreError):
            store.get("two", segment_id)
        store.put("two", A)
        store.delete("two", segment_id)
        assert store.manifest().segment_ids("one") == [segment_id]
        assert store.manifest().segment_ids("two") == []
        assert store.get("one", segment_id).data[:] == A.data

    def test_the_version_follows_the_content(self, store: SegmentStore) -> None:
        empty = store.manifest().version
        first = store.put("n", A)
        one = store.manifest().version
        second = store.put("n", B)
        two = store.manifest().version
        assert len({empty, one, two}) == 3
        store.put("n", A)
        assert store.manifest().version == two
        store.delete("n", second)
        assert store.manifest().version == one
        store.delete("n", second)
        store.delete("n", first)
        assert store.manifest().version not in (one, two)

    def test_a_deleted_segment_stays_readable_for_those_who_saw_it(
        self, store: SegmentStore
    ) -> None:
        segment_id = store.put("n", A)
        self.grow_old(segment_id)
        store.delete("n", segment_id)
        assert store.manifest().sizes == {}
        assert store.get("n", segment_id).data[:] == A.data

    def test_a_deleted_segment_can_come_back(self, store: SegmentStore) -> None:
        segment_id = store.put("n", A)
        store.delete("n", segment_id)
        store.put("n", A)
        assert store.manifest().segment_ids("n") == [segment_id]
        assert store.get("n", segment_id).data[:] == A.data

    def test_a_change_adds_and_removes_at_once(
        self, store: SegmentStore, second_store: SegmentStore
    ) -> None:
        """A reader meets the old content or the new one, never a mixture."""
        contents = [[A.segment_id], sorted([B.segment_id, C.segment_id])]
        store.change("n", add=[A])
        done = threading.Event()

        def write() -> None:
            for _ in range(10):
                second_store.change("n", add=[B, C], remove=[A.segment_id])
                second_store.change("n", add=[A], remove=[B.segment_id, C.segment_id])
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = [store.manifest().segment_ids("n")]
        while not done.is_set():
            seen.append(store.manifest().segment_ids("n"))
        writer.join()
        assert all(ids in contents for ids in seen)

    def test_what_is_added_and_removed_stays_and_unknown_ids_are_ignored(
        self, store: SegmentStore
    ) -> None:
        assert store.change("n", remove=[A.segment_id]) == []
        assert not store.manifest().written
        ids = store.change("n", add=[A, B], remove=[A.segment_id, C.segment_id])
        assert ids == [A.segment_id, B.segment_id]
        assert store.manifest().segment_ids("n") == sorted(ids)
        assert store.get("n", A.segment_id).data[:] == A.data

    def test_two_writers_of_one_segment_leave_it_whole(
        self, store: SegmentStore, second_store: SegmentStore
    ) -> None:
        writers = [
            threading.Thread(target=lambda one=one: [one.put("n", A) for _ in range(10)])
            for one in (store, second_store)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert store.manifest().segment_ids("n") == [A.segment_id]
        assert store.get("n", A.segment_id).data[:] == A.data

    def test_a_second_client_sees_the_same(
        self, store: SegmentStore, second_store: SegmentStore
    ) -> None:
        store.put("n", A)
        assert second_store.manifest() == store.manifest()

    @pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 65, "a\n", "é"])
    def test_unsafe_namespaces_are_refused(self, store: SegmentStore, name: str) -> None:
        with pytest.raises(ConfigError, match="namespace"):
            store.put(name, A)
        with pytest.raises(ConfigError, match="namespace"):
            store.get(name, A.segment_id)

    @pytest.mark.parametrize("segment_id", ["", "..", "../" + "0" * 29, "0" * 33, "G" * 32])
    def test_unsafe_ids_are_refused(self, store: SegmentStore, segment_id: str) -> None:
        store.put("n", A)
        for call in (store.get, store.delete):
            with pytest.raises(ConfigError, match="segment_id"):
                call("n", segment_id)

    def test_readers_never_see_half_a_change(
        self, store: SegmentStore, second_store: SegmentStore
    ) -> None:
        """Whatever a manifest lists is whole, while a writer adds and deletes."""
        ids = {segment.segment_id: segment.data for segment in (A, B)}
        done = threading.Event()

        def write() -> None:
            for _ in range(15):
                second_store.put("n", A)
                second_store.put("n", B)
                second_store.delete("n", A.segment_id)
                second_store.delete("n", B.segment_id)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        num_read = 0
        while not done.is_set() or num_read == 0:
            for segment_id in store.manifest().segment_ids("n"):
                assert store.get("n", segment_id).data[:] == ids[segment_id]
            num_read += 1
        writer.join()
