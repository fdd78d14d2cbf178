from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.delta.delta_log import Folded, text_digest
from draftline.retrieval_store.delta.fold import Folder
from draftline.retrieval_store.delta.settings import Fingerprint, LearningSettings
from draftline.retrieval_store.directory_store import folder as directory_locks
from draftline.retrieval_store.directory_store import store as directory_store
from draftline.retrieval_store.directory_store.delta_log import DirectoryDeltaLog
from draftline.retrieval_store.directory_store.store import GRACE_SECONDS
from draftline.retrieval_store.learning import forget_namespace
from draftline.retrieval_store.serving.open_store import open_delta_log, open_eraser, open_policy
from support.contracts.containment_contract import ContainmentContract, FolderVandal
from support.contracts.delta_log_contract import FINGERPRINT, DeltaLogContract, Make, learned
from support.contracts.forgetting_contract import ForgettingContract
from support.contracts.learning_contract import LearningContract
from support.contracts.policy_contract import PolicyContract
from support.inputs.segments import context, make_segment
from support.servers.learning_replica import Replica


class TestDirectoryDeltaLog(DeltaLogContract):
    @pytest.fixture
    def make_log(self, tmp_path: Path) -> Make:
        def make(fingerprint: Fingerprint, settings: LearningSettings) -> DirectoryDeltaLog:
            return DirectoryDeltaLog(tmp_path / "store", fingerprint, settings)

        return make


class TestDirectoryLearning(LearningContract, ForgettingContract, PolicyContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


class TestDirectoryContainment(ContainmentContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")

    @pytest.fixture
    def vandal(self, url: str) -> FolderVandal:
        return FolderVandal(Path(url))

    def let_time_pass(self, url: str) -> None:
        for path in Path(url).rglob("*"):
            if path.name != ".clock":
                age = path.stat().st_mtime - 2 * GRACE_SECONDS
                os.utime(path, (age, age))


def older_log(folder: Path, namespace: str, rows: list[object], **changes: object) -> Path:
    """A log as versions before this one wrote it."""
    path = folder / ".delta" / namespace / f"{FINGERPRINT.tag}.json"
    path.parent.mkdir(parents=True)
    fields = {"epoch": "e", "next": 9, "folded": Folded().to_json(), "events": rows}
    path.write_text(json.dumps(fields | changes), encoding="utf-8")
    return path


def older_row(position: int, *tokens: int) -> list[object]:
    text = context(*tokens)
    packed = base64.b64encode(text.astype("<i4").tobytes()).decode()
    return [f"{position:016d}", time.time(), text_digest(text), 1.0, packed]


@pytest.mark.parametrize("namespace", ["tenant", "Team.A"])
def test_logs_of_older_versions_are_read_and_taken_over(tmp_path: Path, namespace: str) -> None:
    path = older_log(tmp_path, namespace, [older_row(3, 1, 2, 3), older_row(4, 1, 2, 4)])
    replica = Replica(str(tmp_path))
    assert replica.fresh_answer(namespace, 1, 2) == {3, 4}
    replica.learn(namespace, 1, 2, 5)
    assert not path.exists()
    assert replica.fresh_answer(namespace, 1, 2) == {3, 4, 5}
    assert Replica(str(tmp_path)).fresh_answer(namespace, 1, 2) == {3, 4, 5}
    assert replica.folder.fold(namespace, must=True)
    replica.learn(namespace, 1, 2, 6)
    forget_namespace(open_eraser(str(tmp_path)), namespace)
    assert Replica(str(tmp_path)).fresh_answer(namespace, 1, 2) == set()


def test_damage_in_an_older_log_is_passed_over(tmp_path: Path) -> None:
    bad = [*older_row(5, 1, 2, 9)[:3], "many", None]
    older_log(tmp_path, "tenant", [older_row(3, 1, 2, 3), bad, [], {}], folded="{}")
    older_log(tmp_path, "second", []).write_bytes(b'{"epoch": "\xff')
    older_log(tmp_path, "third", []).write_bytes(b"{" * 100_000)
    replica = Replica(str(tmp_path))
    assert replica.fresh_answer("tenant", 1, 2) == {3}
    assert replica.service.status.num_damaged == 6
    for namespace in ("tenant", "second", "third"):
        replica.learn(namespace, 1, 2, 4)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 4}
    assert replica.answer("second", 1, 2) == replica.answer("third", 1, 2) == {4}


@pytest.mark.parametrize("place", range(0, 700, 21))
def test_no_byte_of_a_log_stops_anything(tmp_path: Path, place: int) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("other", 1, 2, 3)
    for token in (3, 4, 5):
        replica.learn("tenant", 1, 2, token)
    assert replica.fresh_answer("tenant", 1, 2) == {3, 4, 5}
    (path,) = tmp_path.glob(".delta/tenant/*.log")
    data = bytearray(path.read_bytes())
    # What divides two lines takes both along.
    num_left = 1 if data[place % len(data)] == ord("\n") else 2
    data[place % len(data)] ^= 0x80 if place % 2 else 0x04
    path.write_bytes(data)
    for one in (replica, Replica(str(tmp_path))):
        assert one.fresh_answer("tenant", 1, 2) <= {3, 4, 5}
        assert len(one.answer("tenant", 1, 2)) >= num_left
        assert one.answer("other", 1, 2) == {3}
        assert 1 <= one.service.status.num_damaged <= 2
    replica.learn("tenant", 1, 2, 6)
    assert replica.fresh_answer("tenant", 1, 2) >= {6}
    assert replica.folder.fold("tenant", must=True)
    assert Replica(str(tmp_path)).fresh_answer("tenant", 1, 2) >= {6}


def test_a_log_that_cannot_be_read_costs_its_own_namespace_only(tmp_path: Path) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("tenant", 1, 2, 3)
    (path,) = tmp_path.glob(".delta/tenant/*.log")
    path.unlink()
    path.mkdir()
    replica.learn("other", 1, 2, 3)
    assert replica.fresh_answer("other", 1, 2) == {3}
    with pytest.raises(StoreError, match="cannot be read"):
        replica.learn("tenant", 1, 2, 3)
    with pytest.raises(StoreError, match="cannot be read"):
        Folder(replica.store, replica.log, FINGERPRINT, LearningSettings(fold_entries=1)).fold_due()
    assert replica.log.read("other") == []


def test_a_lost_manifest_is_noticed_by_who_never_saw_it(tmp_path: Path) -> None:
    segment_id = Replica(str(tmp_path)).store.put("shared", make_segment([[1, 2, 9]]))
    (tmp_path / "manifest.json").unlink()
    replica = Replica(str(tmp_path))
    with pytest.raises(StoreError, match="lost its data"):
        replica.service.refresh()
    replica.log.append("tenant", [learned(1, 2, 3)])
    with pytest.raises(StoreError, match="lost its data"):
        replica.folder.fold("tenant", must=True)
    assert (tmp_path / "shared" / f"{segment_id}.segment").exists()
    replica.store.put("shared", make_segment([[1, 2, 8]]))
    assert replica.fresh_answer("shared", 1, 2) == {8}


def test_a_cut_manifest_is_not_replaced_by_a_fold(tmp_path: Path) -> None:
    replica = Replica(str(tmp_path))
    replica.store.put("shared", make_segment([[1, 2, 9]]))
    replica.service.refresh()
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:-5])
    cut = path.read_bytes()
    replica.learn("tenant", 1, 2, 3)
    with pytest.raises(StoreError, match="corrupt"):
        replica.folder.fold("tenant", must=True)
    with pytest.raises(StoreError, match="corrupt"):
        replica.service.refresh()
    assert path.read_bytes() == cut
    assert replica.answer("shared", 1, 2) == {9}


def test_a_first_fold_that_died_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("tenant", 1, 2, 3)

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replica.store, "_switch", die)
    with pytest.raises(KeyboardInterrupt):
        replica.folder.fold("tenant", must=True)
    assert list(tmp_path.glob("tenant/*.segment"))
    fresh = Replica(str(tmp_path))
    assert fresh.fresh_answer("tenant", 1, 2) == {3}
    assert fresh.folder.fold("tenant", must=True)


def test_a_stopped_process_keeps_nobody_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_locks, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(directory_store, "SHORT_WAIT_SECONDS", 0.05)
    replica = Replica(str(tmp_path))
    replica.learn("tenant", 1, 2, 3)
    with directory_locks.log_lock(tmp_path), pytest.raises(StoreError, match="another process"):
        replica.learn("tenant", 1, 2, 4)
    with (tmp_path / "lock").open("w") as file:
        assert directory_locks.lock_file(file, 1.0)
        with pytest.raises(StoreError, match="another writer"):
            replica.folder.fold("tenant", must=True)
    assert replica.folder.fold("tenant", must=True)
    assert replica.fresh_answer("tenant", 1, 2) == {3}


def test_old_logs_are_no_garbage_of_the_store(tmp_path: Path) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("tenant", 1, 2, 3)
    for path in tmp_path.rglob("*"):
        age = path.stat().st_mtime - 2 * GRACE_SECONDS
        os.utime(path, (age, age))
    replica.store.put("shared", make_segment([[4, 5, 6]]))
    assert replica.fresh_answer("tenant", 1, 2) == {3}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"off": "tenant"}', '{"off": [1]}'])
def test_a_damaged_policy_is_named_and_nothing_is_learned(tmp_path: Path, text: str) -> None:
    replica = Replica(str(tmp_path))
    (tmp_path / ".learning.json").write_text(text, encoding="utf-8")
    policy = open_policy(str(tmp_path), writes=True)
    with pytest.raises(StoreError, match=r"\.learning\.json: corrupt; delete it"):
        policy.switch("tenant", learns=True)
    with pytest.raises(StoreError, match="corrupt"):
        replica.learn("tenant", 1, 2, 3)
    assert replica.log.epochs() == {}


def test_a_policy_of_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store: no folder"):
        open_policy(str(tmp_path / "typo"), writes=True)
    with pytest.raises(ConfigError, match="bundled store is not written"):
        open_policy("demo", writes=True)
    assert open_policy("demo").off() == set()


def test_the_bundled_store_is_never_written() -> None:
    with pytest.raises(ConfigError, match="bundled store is not written"):
        open_eraser("demo")
    with pytest.raises(ConfigError, match="bundled store is not written"):
        open_delta_log("demo", FINGERPRINT, LearningSettings())


def test_a_store_that_begins_while_it_is_looked_at_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = Replica(str(tmp_path)), Replica(str(tmp_path))
    read_bytes = Path.read_bytes

    def begin_after_the_first_look(path: Path) -> bytes:
        monkeypatch.undo()
        with pytest.raises(FileNotFoundError) as missing:
            read_bytes(path)
        writer.learn("tenant", 1, 2, 3)
        writer.folder.fold("tenant", must=True)
        raise missing.value

    monkeypatch.setattr(Path, "read_bytes", begin_after_the_first_look)
    assert reader.store.manifest().written
    assert not reader.store.manifest().is_broken
