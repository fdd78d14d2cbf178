"""Records of what requests took: whole lines, without text, and never a wait."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from draftline.cluster.config import EngineConfig
from draftline.core.errors import ConfigError
from draftline.core.fair_share import RequestUsage
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.deploy.engine import usage_log
from draftline.deploy.engine.async_engine import AsyncEngine
from draftline.deploy.engine.usage_log import STREAM, UsageLog
from support.servers.redis_server import RedisServer

USAGE = RequestUsage(
    tenant="acme", request_id="r", prompt_tokens=7, cached_tokens=4, completion_tokens=5, steps=2,
    nodes_verified=6, nodes_wasted=4, queue_s=0.25, status="stop",
)  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_go_to_the_file_that_is_there_now(tmp_path: Path) -> None:
    path, moved = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    log = UsageLog(str(path), "tiny")
    for _ in range(3):
        log.note(USAGE)
    log.close()
    path.rename(moved)
    log = UsageLog(str(path), "tiny")
    log.note(USAGE)
    log.close()
    assert [len(lines(one)) for one in (moved, path)] == [3, 1]
    (record,) = lines(path)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "model": "tiny", "tenant": "acme", "request_id": "r", "prompt_tokens": 7,
        "cached_tokens": 4, "completion_tokens": 5, "steps": 2, "nodes_verified": 6,
        "nodes_wasted": 4, "queue_s": 0.25, "status": "stop",
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"server\.usage_log"):
        UsageLog(str(tmp_path / "none" / "usage.jsonl"), "tiny")
    path = tmp_path / "folder" / "usage.jsonl"
    path.parent.mkdir()
    log = UsageLog(str(path), "tiny")
    path.unlink()
    path.parent.rmdir()
    for _ in range(5):
        log.note(USAGE)
    log.close()
    assert log.num_dropped == 5
    assert "event=usage_records_dropped" in caplog.text
    monkeypatch.setattr(usage_log, "MAX_WAITING", 1)
    full = UsageLog(str(tmp_path / "usage.jsonl"), "tiny")
    written = threading.Event()
    monkeypatch.setattr(full._target, "write", lambda _lines: written.wait())
    for _ in range(50):
        full.note(USAGE)
    assert full.num_dropped > 0
    written.set()
    full.close()


@pytest.mark.redis
@pytest.mark.net
def test_a_stream_of_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        log = UsageLog(server.url, "tiny")
        log.note(USAGE)
        log.note(USAGE)
        log.close()
        raw = server.raw()
        entries: Any = raw.xrange(STREAM)
        assert [json.loads(entry[b"record"])["tenant"] for _, entry in entries] == ["acme"] * 2
        raw.close()


async def test_an_engine_tells_what_requests_of_tenants_took(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "usage.jsonl"
    config = EngineConfig(
        model=str(checkpoint), drafters=[{"kind": "prompt_lookup"}], compile="off",
        served_model_name="tiny", kv_cache_tokens=512, max_model_len=64,
    )  # fmt: skip
    engine = AsyncEngine(config, usage_log=str(path))
    await engine.start()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for tenant in ("acme", "bert"):
        options = RequestOptions(tenant=tenant, namespace=tenant)
        for prompt in ("abcabcabc", "aaaaaaaa"):
            output = await engine.generate(prompt, params, options)
            assert len(output.token_ids) == 20
    left = engine.stream("abab", params, RequestOptions(tenant="left"))
    await anext(left)
    await left.aclose()
    async with asyncio.timeout(20):
        while "left" not in engine.stats().by_tenant:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
    totals = engine.stats().by_tenant
    await engine.close()
    *records, last = lines(path)
    assert (last["tenant"], last["status"]) == ("left", "cancelled")
    assert [record["tenant"] for record in records] == ["acme"] * 2 + ["bert"] * 2
    for record in records:
        assert (record["model"], record["status"]) == ("tiny", "length")
        assert record["completion_tokens"] == 20
        assert record["steps"] > 0
        assert 0 <= record["nodes_wasted"] <= record["nodes_verified"]
    assert "abc" not in path.read_text()
    for name in ("acme", "bert"):
        sums, own = totals[name], [record for record in records if record["tenant"] == name]
        assert sums.requests == 2
        assert sums.steps == sum(record["steps"] for record in own)
        assert sums.nodes_verified == sum(record["nodes_verified"] for record in own)
        assert sums.prompt_tokens == 17
