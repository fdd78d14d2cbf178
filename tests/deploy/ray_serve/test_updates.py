"""An update of a served application: no request fails, and none changes its text."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.servers.processes import coordinator_pids

BODY = {"prompt": "abc", "max_tokens": 100, "temperature": 0.9, "seed": 3, "ignore_eos": True}
NUM_CLIENTS = 3


def settings(checkpoint: Path, **changed: Any) -> dict[str, Any]:
    deployment = {
        "max_surge_percent": 100, "coordinator_cpus": 0.5, "ingress_cpus": 0.5,
    }  # fmt: skip
    return {
        "model": str(checkpoint), "kv_cache_tokens": 2048, "backend": "local",
        "deployment": deployment, **changed,
    }  # fmt: skip


class Clients:
    """Clients that ask again and again, until told to end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._end = threading.Event()
        self.answers: list[tuple[int, str]] = []

    def ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._end.is_set():
                answer = client.post("/v1/completions", json=BODY)
                text = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
                self.answers.append((answer.status_code, text))

    def end(self) -> None:
        self._end.set()


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
# Ray Serve's modules warn when they are imported, so they are imported in here.
@pytest.mark.filterwarnings("ignore")
def test_no_request_fails_while_settings_change(checkpoint: Path, ray_serve_url: str) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    serve.run(build_app(settings(checkpoint)), name="draftline")
    first = httpx.post(f"{ray_serve_url}/v1/completions", json=BODY, timeout=120).json()
    old = coordinator_pids()
    clients = Clients(ray_serve_url)
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(clients.ask) for _ in range(NUM_CLIENTS)]
        try:
            while len(clients.answers) < 2 * NUM_CLIENTS:
                time.sleep(0.1)
            changed = settings(checkpoint, tree_nodes=4, server={"drain_timeout_s": 15})
            serve.run(build_app(changed), name="draftline")
            deadline = time.monotonic() + 120
            while set(coordinator_pids()) & set(old):
                assert time.monotonic() < deadline, "the old replica stays"
                time.sleep(0.2)
            until = len(clients.answers) + 2 * NUM_CLIENTS
            while len(clients.answers) < until:
                time.sleep(0.1)
        finally:
            clients.end()
        for future in asking:
            future.result(120)
    assert coordinator_pids()
    assert set(clients.answers) == {(200, first["choices"][0]["text"])}


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_no_request_fails_while_replicas_come_and_go(checkpoint: Path, ray_serve_url: str) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    scaled = settings(checkpoint)
    scaled["deployment"] |= {
        "target_ttft_s": 60.0,
        "autoscaling_config": {
            "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1.2,
            "upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "look_back_period_s": 2.0,
            "metrics_interval_s": 0.5,
        },
    }  # fmt: skip
    serve.run(build_app(scaled), name="draftline")
    first = httpx.post(f"{ray_serve_url}/v1/completions", json=BODY, timeout=120).json()
    stays, leave = Clients(ray_serve_url), Clients(ray_serve_url)
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(clients.ask) for clients in (stays, leave, leave)]
        try:
            wait_for_replicas(2)
            until = len(stays.answers) + 5
            while len(stays.answers) < until:
                time.sleep(0.1)
            leave.end()
            wait_for_replicas(1)
        finally:
            leave.end()
            stays.end()
        for future in asking:
            future.result(120)
    assert set(stays.answers + leave.answers) == {(200, first["choices"][0]["text"])}


def wait_for_replicas(count: int) -> None:
    deadline = time.monotonic() + 200
    while len(coordinator_pids()) != count:
        assert time.monotonic() < deadline, f"there are not {count} replicas"
        time.sleep(0.2)
