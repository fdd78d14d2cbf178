"""Streams outlive their replica, and their texts are those of plain decoding."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.servers.processes import coordinator_pids, send_signal
from support.servers.served_model import ServedModel, served_model

NUM_TOKENS = 300
PROMPTS = [prompt.text for prompt in held_out_prompts(3)]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "max_tokens": NUM_TOKENS}
BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPTS[0], "temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS},
    {"prompt": PROMPTS[1], "seed": 3, "n": 2, **SAMPLED},
    {"prompt": PROMPTS[2], "seed": 4, "frequency_penalty": 0.4, "logprobs": 2, **SAMPLED},
    {"prompt": PROMPTS[0], "seed": 5, "stop": ["no such text", "nor"], "echo": True, **SAMPLED},
    {
        "prompt": PROMPTS[1], "seed": 6, "max_tokens": NUM_TOKENS, "temperature": 1.0,
        "structured_outputs": {"regex": "([a-z]{1,9} ){80}[a-z]{1,9}"},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """Two replicas, each with a stage in a process of its own."""
    file = tmp_path_factory.mktemp("config") / "serve.yaml"
    deployment = {"num_replicas": 2, "coordinator_cpus": 0.5, "ingress_cpus": 0.5}
    settings = {"model": "demo", "backend": "ray", "standby_stages": 0, "deployment": deployment}
    file.write_text(yaml.safe_dump(settings))
    with served_model("--config", str(file)) as served:
        yield served


def stream(url: str, body: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Text, log-probabilities and end of each choice."""
    texts: dict[int, str] = {}
    entries: dict[int, list[Any]] = {}
    ends: dict[int, Any] = {}
    usage: dict[str, int] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/completions", json=body | options, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                entries.setdefault(index, []).extend(
                    (choice.get("logprobs") or {}).get("tokens") or []
                )
                ends[index] = choice["finish_reason"]
            usage = event.get("usage") or usage
    # Cached tokens are of the replica that ended it.
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return [(texts[i], entries[i], (ends[i], counts)) for i in sorted(texts)]


def num_resumed(url: str) -> float:
    page = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=60).text
    found = re.findall(r"^draftline:resumed_requests_total{.*} (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def engines(url: str) -> set[str]:
    """Those that tell of themselves: one whose process has only begun is none."""
    page = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=60).text
    return set(re.findall(r'^draftline:engine_steps_total{.*engine="([^"]+)"', page, re.MULTILINE))


# Processor time of a replica whose streams have begun, and not ended: 0.3 s.
UNDER_WAY_TICKS = 30


def ticks(pid: int) -> int:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_lost_replica_go_on_at_another(
    served: ServedModel, number: signal.Signals
) -> None:
    deadline = time.monotonic() + 240
    while len(engines(served.url)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    plain = [stream(served.url, body | {"speculative": {"enabled": False}}) for body in BODIES]
    resumed_before = num_resumed(served.url)
    idle = {pid: ticks(pid) for pid in coordinator_pids()}
    with ThreadPoolExecutor(max_workers=2 * len(BODIES)) as pool:
        running: list[Future[Any]] = [
            pool.submit(stream, served.url, body) for body in (*BODIES, *BODIES)
        ]
        # Requests go where their prefixes are: one of the replicas may have none.
        worked = dict.fromkeys(idle, 0)
        while max(worked.values()) < UNDER_WAY_TICKS:
            time.sleep(0.02)
            worked = {pid: ticks(pid) - before for pid, before in idle.items()}
        victim = max(worked, key=worked.__getitem__)
        send_signal(victim, number)
        assert [future.result(300) for future in running] == [*plain, *plain]
    assert num_resumed(served.url) > resumed_before
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)


@pytest.fixture(autouse=True)
def nothing_stays_stopped() -> Iterator[None]:
    yield
    for pid in coordinator_pids():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            os.kill(pid, signal.SIGKILL)
