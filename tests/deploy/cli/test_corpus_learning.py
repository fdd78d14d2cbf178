"""`draftline corpus learn` and `forget`, and what `stats` tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline.core.errors import ConfigError, StoreError
from draftline.deploy.cli import main as cli
from draftline.retrieval_store.serving.open_store import open_policy, open_store
from support.contracts.delta_log_contract import learned
from support.inputs.segments import make_segment
from support.servers.learning_replica import Replica
from typer.testing import CliRunner


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    replica = Replica(str(tmp_path))
    replica.store.put("shared", make_segment([[1, 2, 3]]))
    replica.store.put("a", make_segment([[1, 2, 4]]))
    replica.learn("a", 1, 2, 5)
    return replica


def corpus(folder: Path, *arguments: str) -> list[str]:
    result = CliRunner().invoke(cli.app, ["corpus", *arguments, "--store", str(folder)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def learning(folder: Path) -> dict[str, str]:
    """The last column of stats, by namespace."""
    rows = [line.split() for line in corpus(folder, "stats")]
    assert rows[0][-1] == "learning"
    return {row[0]: row[-1] for row in rows[1:]}


def test_learning_is_switched_and_shown(tmp_path: Path, replica: Replica) -> None:
    assert learning(tmp_path) == {"a": "allowed", "shared": "never"}
    for name in ("a", "later"):
        told = corpus(tmp_path, "learn", name, "--off")
        assert told == [f"learning of {name} is off in this store"]
    assert learning(tmp_path) == {"a": "off", "shared": "never", "later": "off"}
    assert not replica.log.append("a", [learned(1, 2, 6)])
    assert corpus(tmp_path, "learn", "a", "--on") == ["learning of a is allowed in this store"]
    assert learning(tmp_path)["a"] == "allowed"
    assert replica.log.append("a", [learned(1, 2, 6)])


def test_forgetting_switches_learning_off_for_good(tmp_path: Path, replica: Replica) -> None:
    first, second = corpus(tmp_path, "forget", "a")
    assert first.startswith("forgot a: ")
    assert first.endswith(" entries deleted, nothing is left")
    assert second == "learning stays off; draftline corpus learn a --on allows it"
    replica.learn("a", 1, 2, 7)
    assert replica.fresh_answer("a", 1, 2) == {3}
    assert learning(tmp_path) == {"shared": "never", "a": "off"}
    # A second one keeps what the first one said, and tells it.
    assert corpus(tmp_path, "forget", "a", "--keep-learning")[1] == second


def test_a_forgetting_that_keeps_learning(tmp_path: Path, replica: Replica) -> None:
    assert len(corpus(tmp_path, "forget", "a", "--keep-learning")) == 1
    assert open_policy(str(tmp_path)).off() == set()
    replica.learn("a", 1, 2, 7)
    assert replica.fresh_answer("a", 1, 2) == {3, 7}


def test_shared_has_no_policy(tmp_path: Path, replica: Replica) -> None:
    assert len(corpus(tmp_path, "forget", "shared")) == 1
    assert open_policy(str(tmp_path)).off() == set()
    assert replica.store.manifest().sizes.keys() == {"a"}
    with pytest.raises(ConfigError, match="nothing is ever learned of shared"):
        corpus(tmp_path, "learn", "shared", "--off")


@pytest.mark.parametrize("arguments", [["learn", "a", "--off"], ["forget", "a"]])
def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="store: no folder"):
        corpus(tmp_path / "typo", *arguments)
    assert not (tmp_path / "typo").exists()


def test_learn_needs_to_be_told_which(tmp_path: Path) -> None:
    store = ["--store", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["corpus", "learn", "a", *store])
    assert result.exit_code == 2


def test_stats_of_a_store_that_never_learned() -> None:
    assert open_policy("demo").off() == set()
    assert open_store("demo").manifest().sizes
    result = CliRunner().invoke(cli.app, ["corpus", "stats", "--store", "demo"])
    assert result.output.split()[-1] == "never"


def test_stats_tell_what_is_learned_and_what_is_damaged(tmp_path: Path, replica: Replica) -> None:
    for token in (6, 7, 8):
        replica.learn("b", 1, 2, token)
    (path,) = tmp_path.glob(".delta/b/*.log")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    segment_id = replica.store.put("c", make_segment([[1, 2, 3]]))
    segment = tmp_path / "c" / f"{segment_id}.segment"
    segment.write_bytes(segment.read_bytes()[:-1] + b"\1")
    header, *rows = [line.split() for line in corpus(tmp_path, "stats")]
    assert header[5:7] == ["learned", "damaged"]
    found = {row[0]: row[1:] for row in rows}
    assert found["b"] == ["0", "0", "0", "0", "2", "1", "allowed"]
    assert found["c"][:3] + found["c"][4:] == ["1", "0", "0", "0", "1", "allowed"]


def test_a_lost_manifest_is_told_and_accepted(tmp_path: Path, replica: Replica) -> None:
    replica.service.refresh()
    (tmp_path / "manifest.json").unlink()
    for command in ("list", "stats"):
        with pytest.raises(StoreError, match="lost its data; build the corpora again, or give"):
            corpus(tmp_path, command)
    with pytest.raises(StoreError, match="lost its data"):
        replica.service.refresh()
    first, second = corpus(tmp_path, "accept-loss")
    assert first == f"servers follow what {tmp_path} holds now: 0 segments"
    assert "corpus learn NAMESPACE --off" in second
    assert corpus(tmp_path, "list") == ["namespace  segment  bytes"]
    replica.service.refresh()
    assert not replica.service.status.is_lost
    with pytest.raises(ConfigError, match="store: no folder"):
        corpus(tmp_path / "typo", "accept-loss")
