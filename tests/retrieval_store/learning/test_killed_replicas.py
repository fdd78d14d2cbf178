"""Replicas of the retrieval server that are killed and started again under load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from draftline.cluster.retrieval import GrpcLookup, ReplicatedLookup
from draftline.core.errors import CapacityError, DrafterError
from draftline.retrieval_store.directory_store.store import DirectoryStore
from support.inputs.segments import make_segment
from support.servers.steady_lookups import SteadyLookups, answer, steady_lookups, wait_until

pytestmark = pytest.mark.net


class ReplicaProcess:
    """A retrieval server on its own port, the same after every start."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.port = 0
        self.launch()

    def launch(self) -> None:
        command = [sys.executable, "-m", "draftline.actors.retrieval_server"]
        command += ["--store", str(self._store), "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().removeprefix("ready port="))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def answers(client: GrpcLookup) -> bool:
    try:
        return answer(client) == {10}
    except (CapacityError, DrafterError):
        return False


def more(lookups: SteadyLookups) -> None:
    """Return when a hundred more were answered."""
    goal = lookups.count + 100
    wait_until(lambda: lookups.count >= goal or bool(lookups.failures), "lookups go on")


def test_lookups_outlive_every_replica_in_turn(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put("shared", make_segment([[1, 2, 10]]))
    replicas = [ReplicaProcess(tmp_path) for _ in range(2)]
    for replica in replicas:
        replica.await_ready()
    clients = [GrpcLookup(f"127.0.0.1:{replica.port}") for replica in replicas]
    lookup = ReplicatedLookup(clients, timeout_s=60)
    try:
        with steady_lookups(lookup) as lookups:
            more(lookups)
            replicas[0].kill()
            more(lookups)
            replicas[0].launch()
            replicas[0].await_ready()
            wait_until(lambda: answers(clients[0]), "the first is back")
            replicas[1].kill()
            more(lookups)
    finally:
        lookup.close()
        for replica in replicas:
            replica.kill()
    assert lookups.failures == []
    assert lookups.seen == [{10}]
