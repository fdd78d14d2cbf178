from __future__ import annotations

import os
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.retrieval_store.directory_delta_log import DirectoryDeltaLog
from draftline.retrieval_store.directory_store import GRACE_SECONDS
from draftline.retrieval_store.erasure import forget_namespace
from draftline.retrieval_store.fitness import Fitness
from draftline.retrieval_store.fold import Folder
from draftline.retrieval_store.learning_settings import LearningSettings
from draftline.retrieval_store.open_store import open_delta_log, open_eraser, open_policy
from support.delta_log_contract import FITNESS, DeltaLogContract, Make
from support.forgetting_contract import ForgettingContract
from support.learning_contract import LearningContract
from support.learning_replica import Replica
from support.policy_contract import PolicyContract
from support.segments import make_segment


class TestDirectoryDeltaLog(DeltaLogContract):
    @pytest.fixture
    def make_log(self, tmp_path: Path) -> Make:
        def make(fitness: Fitness, settings: LearningSettings) -> DirectoryDeltaLog:
            return DirectoryDeltaLog(tmp_path / "store", fitness, settings)

        return make


class TestDirectoryLearning(LearningContract, ForgettingContract, PolicyContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


def test_a_corrupt_log_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    replica = Replica(str(tmp_path))
    replica.learn("tenant", 1, 2, 3)
    replica.learn("other", 1, 2, 3)
    (path,) = tmp_path.glob(".delta/tenant/*.json")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(StoreError, match=f"{path.name}: corrupt; forget the namespace"):
        replica.service.refresh()
    assert replica.answer("other", 1, 2) == {3}
    with pytest.raises(StoreError, match="corrupt"):
        Folder(replica.store, replica.log, FITNESS, LearningSettings(fold_entries=1)).fold_due()
    assert replica.log.read("other") == []
    forget_namespace(open_eraser(str(tmp_path)), "tenant")
    assert replica.fresh_answer("tenant", 1, 2) == set()


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
        open_delta_log("demo", FITNESS, LearningSettings())
