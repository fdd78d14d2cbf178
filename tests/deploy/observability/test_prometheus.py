"""Prometheus itself: the files of every deployment make it scrape a server and read the alerts."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import draftline
import httpx
import pytest
import yaml
from draftline.deploy.cli.serve.listening import free_port
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine
from support.servers.http_server import http_server

DEPLOY = Path(draftline.__file__).parent / "deploy"
OBSERVABILITY = DEPLOY / "assets" / "observability"
COMPOSE = DEPLOY / "docker" / "compose.yaml"
KEY = "a-key-of-the-operator"
WAIT_S = 60


def as_mounted(config: Path, folder: Path) -> str:
    """The text of a file, and in the folder what lies beside it where it is read."""
    (folder / "key").write_text(f"{KEY}\n")
    if config.parent == OBSERVABILITY:
        # `ray up` brings the whole folder, and `observe.sh` writes the key there.
        shutil.copytree(OBSERVABILITY, folder, dirs_exist_ok=True)
        (folder / "key").rename(folder / "draftline-key")
        return config.read_text("utf-8")
    service = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]["prometheus"]
    text = config.read_text("utf-8").replace("/run/secrets/operator_key", str(folder / "key"))
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            text = text.replace(target, str((COMPOSE.parent / source).resolve()))
    return text


@contextmanager
def prometheus(folder: Path, text: str) -> Iterator[str]:
    """It runs with a configuration; yields its URL."""
    (folder / "prometheus.yaml").write_text(text)
    address = f"127.0.0.1:{free_port(ServerConfig(port=0))}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/samples",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


async def ask(client: httpx.AsyncClient, query: str) -> list[dict[str, Any]]:
    """Labels and value of each series; nothing until Prometheus answers."""
    try:
        answer = await client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    return answer.json()["data"]["result"] if answer.status_code == 200 else []


async def computed_alerts(client: httpx.AsyncClient) -> set[str]:
    """Names of the alerts, once all of them were computed without an error."""
    [group] = (await client.get("/api/v1/rules")).json()["data"]["groups"]
    all_are = all(rule["health"] == "ok" for rule in group["rules"])
    return {rule["name"] for rule in group["rules"]} if all_are else set()


async def until(found: Callable[[], Awaitable[Any]]) -> Any:
    """What a question finds, once it finds something."""
    while True:
        if what := await found():
            return what
        await asyncio.sleep(0.2)


@pytest.mark.net
@pytest.mark.prometheus
@pytest.mark.parametrize(
    "config",
    [OBSERVABILITY / "prometheus.yaml", DEPLOY / "docker" / "config" / "prometheus.yaml"],
    ids=["ray up", "compose"],
)
async def test_it_scrapes_a_server_and_reads_the_alerts(
    engine: FakeEngine, config: Path, tmp_path: Path
) -> None:
    text = as_mounted(config, tmp_path).replace("15s", "1s").replace("5s", "1s")
    [target] = yaml.safe_load(text)["scrape_configs"][0]["static_configs"][0]["targets"]
    async with http_server(engine, api_keys=(KEY,)) as server:
        text = text.replace(target, f"127.0.0.1:{server.port}")
        with prometheus(tmp_path, text) as url:
            async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(WAIT_S):
                [running] = await until(lambda: ask(client, "vllm:num_requests_running"))
                assert running["metric"]["job"] == "draftline"
                [up] = await ask(client, 'up{job="draftline"}')
                assert up["value"][1] == "1"
                rules = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text("utf-8"))
                named = {rule["alert"] for rule in rules["groups"][0]["rules"]}
                # Each was computed, of what was scraped.
                assert await until(lambda: computed_alerts(client)) == named
