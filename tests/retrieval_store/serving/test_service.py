from __future__ import annotations

import threading
from pathlib import Path

import pytest
from draftline.core.errors import StoreError
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.segment.segment import Segment
from draftline.retrieval_store.serving import service as service_module
from draftline.retrieval_store.serving.service import Expected, RetrievalService
from draftline.retrieval_store.store import Manifest
from support.inputs.segments import context, make_segment
from support.servers.steady_lookups import wait_until

AFTER_12 = {token: make_segment([[1, 2, token]]) for token in (10, 11, 12)}


class ToldStore:
    """A store that does what the test says; waiting for a change waits for `tell`."""

    url = "told"

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self.is_lost = False
        self.is_dead = False
        self._told = threading.Semaphore(0)
        self.waits = threading.Semaphore(0)

    def manifest(self) -> Manifest:
        if self.is_dead:
            raise StoreError("told: dead")
        if self.is_lost:
            return Manifest()
        return Manifest({"shared": dict.fromkeys(self.segments, 1)}, written=True)

    def get(self, namespace: str, segment_id: str) -> Segment:
        assert namespace == "shared"
        return self.segments[segment_id]

    def put(self, namespace: str, segment: Segment) -> str:
        raise AssertionError("a service only reads")

    def delete(self, namespace: str, segment_id: str) -> None:
        raise AssertionError("a service only reads")

    def tell(self) -> None:
        self._told.release()

    def wait_for_change(self, timeout: float) -> None:
        self.waits.release()
        self._told.acquire(timeout=timeout)

    def close(self) -> None:
        self.tell()


def answer(service: RetrievalService) -> set[int]:
    return set(service.lookup([context(1, 2)], ["shared"], [8])[0].tokens.tolist())


def test_before_the_first_refresh_nothing_is_found() -> None:
    service = RetrievalService(ToldStore())
    assert answer(service) == set()
    assert service.version == ""


def test_refresh_serves_what_the_store_holds() -> None:
    store = ToldStore()
    service = RetrievalService(store)
    store.segments = {"a": AFTER_12[10]}
    assert service.refresh()
    assert answer(service) == {10}
    assert not service.refresh()
    store.segments = {"b": AFTER_12[11], "c": AFTER_12[12]}
    assert service.refresh()
    assert answer(service) == {11, 12}
    store.segments = {}
    assert service.refresh()
    assert answer(service) == set()


def test_a_dead_or_emptied_store_takes_nothing_away() -> None:
    store = ToldStore()
    service = RetrievalService(store)
    store.segments = {"a": AFTER_12[10]}
    service.refresh()
    store.is_dead = True
    with pytest.raises(StoreError, match="dead"):
        service.refresh()
    assert answer(service) == {10}
    store.is_dead, store.is_lost = False, True
    with pytest.raises(StoreError, match="has lost its data"):
        service.refresh()
    assert answer(service) == {10}


def test_segments_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    good = store.put("shared", AFTER_12[10])
    service = RetrievalService(store, Expected(tokenizer_hash="tokenizer", vocab_size=32))
    service.refresh()
    bad = store.put("shared", make_segment([[1, 2, 11]], tokenizer_hash="other"))
    message = f"shared/{bad}: tokenizer_hash is other, the served model has tokenizer; build"
    with pytest.raises(StoreError, match=message):
        service.refresh()
    assert answer(service) == {10}
    # One bad segment keeps nobody else's changes away.
    store.put("shared", AFTER_12[12])
    store.delete("shared", good)
    with pytest.raises(StoreError, match=message):
        service.refresh()
    assert answer(service) == {12}
    store.delete("shared", bad)
    assert service.refresh()
    assert not service.refresh()
    assert answer(service) == {12}


def test_a_damaged_segment_keeps_nobody_elses_changes_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a start."""
    monkeypatch.setattr(service_module, "RETRY_PAUSE_S", 3600.0)
    store = DirectoryStore(tmp_path)
    bad = store.put("tenant", AFTER_12[11])
    path = tmp_path / "tenant" / f"{bad}.segment"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    store.put("shared", AFTER_12[10])
    service = RetrievalService(store, poll_seconds=0.01)
    assert service.refresh()
    assert answer(service) == {10}
    assert service.status.refused == (f"tenant/{bad}",)
    service.start()
    try:
        for token, wanted in ((12, {10, 12}), (13, {10, 12, 13})):
            store.put("shared", make_segment([[1, 2, token]]))
            wait_until(lambda wanted=wanted: answer(service) == wanted, "others are followed")
        # It is not read again and again.
        assert service.status.num_refusals == 1
        assert service.status.last_error
    finally:
        service.stop()
    path.write_bytes(whole)
    assert service.refresh()
    assert service.status.refused == ()


def test_the_last_good_content_is_served_until_the_next_one_can_be() -> None:
    store = ToldStore()
    service = RetrievalService(store, Expected(tokenizer_hash="tokenizer"))
    assert service.status.num_segments == 0
    store.segments = {"a": AFTER_12[10]}
    service.refresh()
    assert service.status.num_segments == 1
    store.segments = {"bad": make_segment([[1, 2, 11]], tokenizer_hash="other")}
    for count in (1, 2):
        with pytest.raises(StoreError, match="tokenizer_hash is other"):
            service.refresh()
        assert answer(service) == {10}
        status = service.status
        assert (status.num_failures, status.num_refusals) == (count, count)
        assert (status.refused, status.version) == (("shared/bad",), "")
        assert "tokenizer_hash is other" in status.last_error
    store.segments |= {"c": AFTER_12[12]}
    with pytest.raises(StoreError):
        service.refresh()
    assert answer(service) == {12}
    # What was taken out on purpose is not served on.
    store.segments = {}
    assert service.refresh()
    assert answer(service) == set()
    status = service.status
    assert (status.num_failures, status.last_error, status.refused) == (0, "", ())
    assert (status.num_segments, status.num_bytes) == (0, 0)


def test_a_store_that_goes_back_is_followed() -> None:
    store = ToldStore()
    service = RetrievalService(store, Expected(tokenizer_hash="tokenizer"))
    before = store.segments = {"a": AFTER_12[10]}
    service.refresh()
    bad = make_segment([[1, 2, 11]], tokenizer_hash="other")
    store.segments = {"b": AFTER_12[12], "bad": bad}
    with pytest.raises(StoreError):
        service.refresh()
    assert answer(service) == {12}
    store.segments = before
    assert service.refresh()
    assert answer(service) == {10}


def test_the_thread_follows_changes_and_outlives_failures() -> None:
    store = ToldStore()
    service = RetrievalService(store, poll_seconds=0.01)
    store.segments = {"a": AFTER_12[10]}
    service.start()
    try:
        await_answer(store, service, {10})
        store.is_dead = True
        for _ in range(3):
            assert store.waits.acquire(timeout=10)
            store.tell()
        assert answer(service) == {10}
        store.segments = {"b": AFTER_12[11]}
        store.is_dead = False
        await_answer(store, service, {11})
    finally:
        service.stop()


def await_answer(store: ToldStore, service: RetrievalService, wanted: set[int]) -> None:
    for _ in range(1000):
        if answer(service) == wanted:
            return
        store.tell()
        assert store.waits.acquire(timeout=10)
    raise AssertionError(f"never answered {wanted}, but {answer(service)}")


def test_no_lookup_is_dropped_by_reloads() -> None:
    """Each lookup sees one of the two contents whole, whatever is reloaded meanwhile."""
    store = ToldStore()
    service = RetrievalService(store)
    contents = [{"a": AFTER_12[10], "b": AFTER_12[11]}, {"c": AFTER_12[12]}]
    store.segments = contents[0]
    service.refresh()
    done = threading.Event()

    def reload() -> None:
        for turn in range(200):
            store.segments = contents[turn % 2]
            service.refresh()
        done.set()

    writer = threading.Thread(target=reload)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(frozenset(answer(service)))
    writer.join()
    assert seen <= {frozenset({10, 11}), frozenset({12})}
