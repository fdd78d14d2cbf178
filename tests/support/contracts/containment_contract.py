"""What one namespace's bad data, one writer or a loss may not do to others; over any store."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import redis
from draftline.core.errors import StoreError
from draftline.retrieval_store.corpus.compaction import compact
from draftline.retrieval_store.delta.delta_log import DeltaEvent, text_digest
from draftline.retrieval_store.delta.fold import Folder
from draftline.retrieval_store.delta.settings import LearningSettings
from draftline.retrieval_store.learning import forget_namespace
from draftline.retrieval_store.serving.open_store import open_eraser, open_policy, open_store
from support.contracts.delta_log_contract import FINGERPRINT
from support.inputs.segments import context, make_segment
from support.servers.learning_replica import Replica

DAY = 86_400.0
NAMES = (
    "team.new", "a.b.c", "lock", "manifest.json", "x.segment", "Team", "team", "TEAM", "x.",
    "a-b_c", "format", "origin", "con", "x" * 64, "X" * 64,
)  # fmt: skip


class Vandal(Protocol):
    """Spoils what a store keeps of one namespace, as no writer of ours would."""

    def flip(self, namespace: str) -> None:
        """Change one bit of the last text of the log."""
        ...

    def cut(self, namespace: str) -> None:
        """Cut the last entry short."""
        ...

    def strange_entry(self, namespace: str) -> None:
        """Add an entry that another version may have written."""
        ...

    def strange_log(self, namespace: str) -> None:
        """Put something that is no log in its place."""
        ...

    def strange_folded(self, namespace: str) -> None:
        """Put something else in the place of what the last fold said."""
        ...

    def spoil_segments(self, namespace: str) -> None:
        """Change one bit of each segment."""
        ...

    def lose_all(self) -> None:
        """Let the store lose its manifest, at least."""
        ...

    def tidy(self) -> None:
        """And whatever else would tell that it held something."""
        ...


class ContainmentContract:
    @pytest.mark.parametrize("fault", ["flip", "cut", "strange_entry"])
    def test_a_damaged_entry_is_passed_over_and_counted(
        self, url: str, vandal: Vandal, fault: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 3)
        one.learn("other", 1, 2, 3)
        if fault != "strange_entry":
            one.learn("tenant", 1, 2, 4)
        getattr(vandal, fault)("tenant")
        with caplog.at_level(logging.DEBUG):
            assert two.fresh_answer("tenant", 1, 2) == {3}
            assert two.answer("other", 1, 2) == {3}
            assert two.service.status.num_damaged == 1
            # The rest of that namespace goes on, and so do the others.
            two.learn("tenant", 1, 2, 5)
            two.learn("other", 1, 2, 6)
            assert two.fresh_answer("tenant", 1, 2) == {3, 5}
            assert two.answer("other", 1, 2) == {3, 6}
            for namespace in ("tenant", "other"):
                assert two.folder.fold(namespace, must=True)
            assert two.fresh_answer("tenant", 1, 2) == {3, 5}
            assert two.answer("other", 1, 2) == {3, 6}
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [record.message for record in told] == [
            "event=learned_data_damaged namespace=tenant"
        ]
        assert two.service.status.num_damaged == 1
        assert two.learning.counts["damaged"] == 1

    def test_no_log_at_all_costs_its_own_namespace_only(self, url: str, vandal: Vandal) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        replica.learn("other", 1, 2, 3)
        vandal.strange_log("tenant")
        fresh = Replica(url)
        assert fresh.fresh_answer("other", 1, 2) == {3}
        assert fresh.service.status.num_damaged >= 1
        fresh.learn("tenant", 1, 2, 5)
        fresh.learn("other", 1, 2, 6)
        assert fresh.fresh_answer("tenant", 1, 2) == {5}
        assert fresh.answer("other", 1, 2) == {3, 6}
        assert set(due(fresh).fold_due()) == {"tenant", "other"}
        assert fresh.fresh_answer("tenant", 1, 2) == {5}

    def test_a_damaged_word_of_the_last_fold_keeps_nothing_else_away(
        self, url: str, vandal: Vandal
    ) -> None:
        replica = Replica(url)
        for namespace in ("tenant", "other"):
            replica.learn(namespace, 1, 2, 3)
            assert replica.folder.fold(namespace, must=True)
            replica.learn(namespace, 1, 2, 4)
        vandal.strange_folded("tenant")
        fresh = Replica(url)
        assert fresh.fresh_answer("tenant", 1, 2) == {3, 4}
        assert fresh.answer("other", 1, 2) == {3, 4}
        assert fresh.service.status.num_damaged == 1
        assert set(due(fresh).fold_due()) == {"tenant", "other"}
        assert fresh.fresh_answer("tenant", 1, 2) == {3, 4}

    def test_damaged_folded_texts_are_replaced_by_the_next_fold(
        self, url: str, vandal: Vandal
    ) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        assert replica.folder.fold("tenant", must=True)
        replica.learn("tenant", 1, 2, 4)
        vandal.spoil_segments("tenant")
        fresh = Replica(url)
        assert fresh.fresh_answer("tenant", 1, 2) == {4}
        assert len(fresh.service.status.refused) == 1
        assert fresh.service.status.last_error
        assert fresh.folder.fold("tenant", must=True)
        assert fresh.fresh_answer("tenant", 1, 2) == {4}
        assert len(fresh.store.manifest().segment_ids("tenant")) == 1

    @pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e300])
    def test_weights_that_nobody_gives_are_passed_over(self, url: str, weight: float) -> None:
        replica = Replica(url)
        replica.learn("other", 1, 2, 3)
        text = context(1, 2, 4)
        replica.log.append("tenant", [DeltaEvent(text_digest(text), weight, text)])
        assert replica.fresh_answer("other", 1, 2) == {3}
        assert replica.answer("tenant", 1, 2) == set()
        replica.learn("tenant", 1, 2, 5)
        assert set(due(replica).fold_due()) == {"tenant", "other"}
        assert replica.fresh_answer("tenant", 1, 2) == {5}

    def test_a_text_longer_than_any_is_passed_over(self, url: str) -> None:
        replica = Replica(url)
        text = context(*[1] * 5000)
        replica.log.append("tenant", [DeltaEvent(text_digest(text), 1.0, text)])
        assert replica.fresh_answer("tenant", 1, 1) == set()
        assert replica.service.status.num_damaged == 1

    def test_a_lost_corpus_stays_lost_until_somebody_acts(self, url: str, vandal: Vandal) -> None:
        replica = Replica(url)
        replica.store.put("shared", make_segment([[1, 2, 10]]))
        assert replica.fresh_answer("shared", 1, 2) == {10}
        vandal.lose_all()
        # Some that did not notice: what they learned waits to be folded.
        replica.log.append("tenant", [learned_text(1, 2, 4)])
        folder = due(replica)
        for _ in range(2):
            with pytest.raises(StoreError, match="lost its data"):
                replica.service.refresh()
            with pytest.raises(StoreError, match="lost its data"):
                folder.fold_due()
            with pytest.raises(StoreError, match="lost its data"):
                replica.folder.fold("tenant", must=True)
        assert not replica.store.manifest().written
        assert replica.service.status.is_lost
        assert replica.answer("shared", 1, 2) == {10}
        with pytest.raises(StoreError, match="lost its data"):
            replica.learn("tenant", 1, 2, 5)
        # Whoever builds the corpus again is followed.
        replica.store.put("shared", make_segment([[1, 2, 11]]))
        assert replica.fresh_answer("shared", 1, 2) == {11}
        assert not replica.service.status.is_lost
        replica.learn("tenant", 1, 2, 5)
        assert folder.fold_due() == ["tenant"]
        assert replica.fresh_answer("tenant", 1, 2) >= {5, 11}

    def test_a_replica_that_knows_of_no_loss_does_not_end_it_for_others(
        self, url: str, vandal: Vandal
    ) -> None:
        old = Replica(url)
        old.store.put("shared", make_segment([[1, 2, 10]]))
        assert old.fresh_answer("shared", 1, 2) == {10}
        vandal.lose_all()
        vandal.tidy()
        new = Replica(url)
        assert new.fresh_answer("shared", 1, 2) == set()
        new.learn("tenant", 1, 2, 4)
        assert new.folder.fold("tenant", must=True)
        assert new.store.manifest().written
        with pytest.raises(StoreError, match="lost its data"):
            old.service.refresh()
        assert old.answer("shared", 1, 2) == {10}
        with pytest.raises(StoreError, match="lost its data"):
            due(old).fold_due()
        open_store(url).accept_loss()
        assert old.fresh_answer("shared", 1, 2) == set()
        assert old.answer("tenant", 1, 2) == {4}

    def test_a_loss_can_be_accepted(self, url: str, vandal: Vandal) -> None:
        replica = Replica(url)
        replica.store.put("shared", make_segment([[1, 2, 10]]))
        replica.service.refresh()
        vandal.lose_all()
        with pytest.raises(StoreError, match="lost its data"):
            replica.service.refresh()
        open_store(url).accept_loss()
        assert replica.fresh_answer("shared", 1, 2) == set()
        replica.learn("tenant", 1, 2, 5)
        assert replica.folder.fold("tenant", must=True)
        assert replica.fresh_answer("tenant", 1, 2) == {5}

    def test_a_compaction_does_not_end_a_loss(
        self, url: str, vandal: Vandal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = Replica(url)
        for token in (10, 11):
            replica.store.put("shared", make_segment([[1, 2, token]]))
        change = replica.store.change

        def lose_first(*args: object, **options: object) -> object:
            monkeypatch.undo()
            vandal.lose_all()
            return change(*args, **options)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(replica.store, "change", lose_first)
        with pytest.raises(StoreError, match="lost its data"):
            compact(replica.store, "shared")
        assert not replica.store.manifest().written

    def test_learning_alone_begins_a_store(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        one.service.refresh()
        two.service.refresh()
        for token, replica in ((3, one), (4, two), (5, one)):
            replica.learn("tenant", 1, 2, token)
            assert replica.folder.fold("tenant", must=True)
        for replica in (one, two):
            assert replica.fresh_answer("tenant", 1, 2) == {3, 4, 5}
        # And a corpus that comes later is followed.
        one.store.put("shared", make_segment([[1, 2, 9]]))
        assert two.fresh_answer("tenant", 1, 2) == {3, 4, 5, 9}

    @pytest.mark.parametrize("name", NAMES)
    def test_every_name_works(self, url: str, name: str) -> None:
        replica = Replica(url)
        replica.store.put("shared", make_segment([[1, 2, 9]]))
        for other in NAMES:
            replica.learn(other, 1, 2, 30)
        replica.learn(name, 1, 2, 3)
        assert replica.folder.fold(name, must=True)
        replica.learn(name, 1, 2, 4)
        self.let_time_pass(url)
        replica.store.put("shared", make_segment([[1, 2, 8]]))
        assert Replica(url).fresh_answer(name, 1, 2) == {3, 4, 8, 9, 30}
        policy, eraser = open_policy(url, writes=True), open_eraser(url)
        assert forget_namespace(eraser, name, policy) > 0
        assert policy.off() == {name}
        fresh = Replica(url)
        assert fresh.fresh_answer(name, 1, 2) == {8, 9}
        for other in set(NAMES) - {name}:
            assert fresh.answer(other, 1, 2) == {8, 9, 30}
        eraser.close()

    def let_time_pass(self, url: str) -> None:
        """Make all that is stored look old, where age matters."""

    @pytest.mark.parametrize("skew", [DAY, 30 * DAY, -DAY, -30 * DAY])
    def test_a_writer_whose_clock_is_wrong_drops_nothing(
        self, url: str, skew: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right, wrong = Replica(url), Replica(url)
        right.learn("tenant", 1, 2, 3)
        right.learn("tenant", 1, 2, 4)
        assert right.folder.fold("tenant", must=True)
        right.learn("tenant", 1, 2, 5)
        before = {one.event.digest: one.time for one in right.log.read("tenant")}
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + skew)
        wrong.learn("tenant", 1, 2, 6)
        assert wrong.fresh_answer("tenant", 1, 2) == {3, 4, 5, 6}
        monkeypatch.undo()
        events = right.log.read("tenant")
        assert len(events) == 2
        assert before.items() <= {one.event.digest: one.time for one in events}.items()
        assert all(abs(one.time - now()) < 3600 for one in events)
        assert right.fresh_answer("tenant", 1, 2) == {3, 4, 5, 6}
        # Nor does a fold by its clock.
        monkeypatch.setattr(time, "time", lambda: now() + skew)
        assert wrong.folder.fold("tenant", must=True)
        monkeypatch.undo()
        assert right.fresh_answer("tenant", 1, 2) == {3, 4, 5, 6}
        assert abs(right.log.folded("tenant").time - now()) < 3600
        assert all(0.9 < one <= 1 for one in right.log.folded("tenant").weights.values())


def learned_text(*tokens: int) -> DeltaEvent:
    """The event of a new text."""
    text = context(*tokens)
    return DeltaEvent(text_digest(text), 1.0, text)


def due(replica: Replica) -> Folder:
    """What folds every log that holds anything, and knows the store as it is now."""
    settings = LearningSettings(fold_entries=1)
    return Folder(replica.store, replica.log, FINGERPRINT, settings, watch=replica.learning.watch)


class FolderVandal:
    """`Vandal` of a store in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _log(self, namespace: str) -> Path:
        (path,) = self._folder.glob(f".delta/{namespace}/*.log")
        return path

    def flip(self, namespace: str) -> None:
        path = self._log(namespace)
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)

    def cut(self, namespace: str) -> None:
        path = self._log(namespace)
        path.write_bytes(path.read_bytes()[:-9])

    def strange_entry(self, namespace: str) -> None:
        text = b'["0000000000000099", 1, "x", {"later": true}, "", 7]'
        with self._log(namespace).open("ab") as file:
            file.write(b"%08x %s\n" % (zlib.crc32(text), text))

    def strange_log(self, namespace: str) -> None:
        self._log(namespace).write_bytes(bytes(range(256)) * 8)

    def strange_folded(self, namespace: str) -> None:
        path = self._log(namespace)
        lines = path.read_bytes().split(b"\n")
        lines[1] = lines[1].replace(b"weights", b"weighty")
        path.write_bytes(b"\n".join(lines))

    def spoil_segments(self, namespace: str) -> None:
        for path in self._folder.glob(f"{namespace}/*.segment"):
            path.write_bytes(path.read_bytes()[:-1] + b"\1")

    def lose_all(self) -> None:
        (self._folder / "manifest.json").unlink()

    def tidy(self) -> None:
        for path in self._folder.glob("*/*.segment"):
            path.unlink()


class RedisVandal:
    """`Vandal` of a store in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def _key(self, kind: str, namespace: str) -> bytes:
        (key,) = self._client.keys(f"*:{kind}:{namespace}:*")
        return key

    def _replace_last(self, namespace: str, edit: Callable[[bytes], bytes]) -> None:
        key = self._key("delta", namespace)
        ((position, fields),) = self._client.xrevrange(key, count=1)
        self._client.xdel(key, position)
        self._client.xadd(key, fields | {b"tokens": edit(fields[b"tokens"])})

    def flip(self, namespace: str) -> None:
        self._replace_last(namespace, lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])

    def cut(self, namespace: str) -> None:
        self._replace_last(namespace, lambda data: data[:-4])

    def strange_entry(self, namespace: str) -> None:
        self._client.xadd(self._key("delta", namespace), {"later": "x"})

    def strange_log(self, namespace: str) -> None:
        key = self._key("delta", namespace)
        self._client.delete(key)
        self._client.rpush(key, "x")

    def strange_folded(self, namespace: str) -> None:
        self._client.set(self._key("folded", namespace), '{"weights": [], "garbage": "x"}')

    def spoil_segments(self, namespace: str) -> None:
        for key in self._client.keys(f"*:chunk:{namespace}:*"):
            self._client.setrange(key, 200, b"\xff")

    def lose_all(self) -> None:
        self._client.flushall()

    def tidy(self) -> None:
        self._client.flushall()
