"""Writers that are killed, whatever they were doing: nothing wrong is served, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from draftline.retrieval_store.directory_store.store import GRACE_SECONDS
from draftline.retrieval_store.serving.open_store import open_store
from draftline.retrieval_store.serving.service import RetrievalService
from draftline.retrieval_store.store import SegmentStore
from support.inputs.segments import make_segment
from support.servers import doomed_writer
from support.servers.redis_server import RedisServer
from support.servers.steady_lookups import answer, steady_lookups, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("redis")]

POINTS = [
    pytest.param("build", marks=pytest.mark.full),
    "upload",
    pytest.param("before", marks=pytest.mark.full),
    "switch",
]
OLD, NEW = make_segment([[1, 2, 10]]), make_segment([[1, 2, 11]])


def kill_writer_at(point: str, url: str, old_id: str) -> None:
    command = [sys.executable, doomed_writer.__file__, url, point, old_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()


def survive_a_killed_writer(point: str, url: str) -> SegmentStore:
    """Kill one, look at what is served, and let the next one finish; returns the store."""
    store = open_store(url)
    old_id = store.put("shared", OLD)
    before = store.manifest()
    service = RetrievalService(open_store(url), poll_seconds=0.05)
    service.refresh()
    service.start()
    with steady_lookups(service) as lookups:
        kill_writer_at(point, url, old_id)
        assert store.manifest() == before
        assert store.get("shared", old_id).data[:] == OLD.data
        assert answer(service) == {10}
        store.change("shared", add=[NEW], remove=[old_id])
        wait_until(lambda: answer(service) == {11}, "the next writer's segment is served")
    service.stop()
    assert lookups.failures == []
    assert lookups.seen in ([{10}, {11}], [{10}])
    return store


@pytest.mark.parametrize("point", POINTS)
def test_redis(server: RedisServer, point: str) -> None:
    store = survive_a_killed_writer(point, server.url)
    listed = store.manifest().segment_ids("shared")
    assert listed == [NEW.segment_id]
    with RedisServer.client(server.url) as client:
        lasting = {key for key in client.scan_iter() if client.ttl(key) == -1}
    prefix = b"{draftline:retrieval}:"
    assert lasting == {
        prefix + b"manifest",
        prefix + b"chunk:shared:%s:0" % NEW.segment_id.encode(),
    }
    store.close()


@pytest.mark.parametrize("point", POINTS)
def test_directory(tmp_path: Path, point: str) -> None:
    store = survive_a_killed_writer(point, str(tmp_path))
    for path in tmp_path.rglob("*"):
        long_ago = path.stat().st_mtime - 2 * GRACE_SECONDS
        os.utime(path, (long_ago, long_ago))
    store.change("shared", add=[NEW])
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {f"{NEW.segment_id}.segment", "manifest.json", "lock"}
