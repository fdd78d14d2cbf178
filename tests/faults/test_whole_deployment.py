"""`serve run deploy/70b.yaml`, with small models in place of large ones: all parts, and the loss of
each of them.

In this order, and of one deployment: it takes its time to start.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.deploy.cli.serve.listening import free_port
from draftline.deploy.ray_serve.runtime import RAY_ENVIRONMENT
from draftline.deploy.settings.settings import ServerConfig
from support.servers.processes import coordinator_pids, pool_server_pids, stage_pids
from support.servers.redis_server import RedisServer
from support.servers.served_model import COMMAND
from support.servers.whole_deployment import stood_in

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1500)]

PASSWORD, OPERATOR = "of-redis", "operator-key"
NUM_TOKENS = 400
PROMPTS = [prompt.text for prompt in held_out_prompts(4)]
SERVE = str(Path(sys.executable).with_name("serve"))


@dataclass(frozen=True, slots=True)
class Deployment:
    """What was brought up."""

    url: str
    tenant_key: str
    redis: RedisServer

    def text(self, index: int, *, drafts: bool = True) -> str:
        """An answer to the tenant, streamed; every second one is drawn."""
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.tenant_key, max_retries=0, timeout=300
        ) as client:
            stream = client.completions.create(
                model="demo", prompt=PROMPTS[index % len(PROMPTS)], max_tokens=NUM_TOKENS,
                seed=index, temperature=0.8 * (index % 2), stream=True,
                extra_body={"ignore_eos": True, "speculative": {"enabled": drafts}},
            )  # fmt: skip
            return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    def texts(self, count: int, between: Callable[[], None] = lambda: None) -> list[str]:
        """So many at once; `between` is called when they have begun."""
        with ThreadPoolExecutor(max_workers=count) as pool:
            running = [pool.submit(self.text, index) for index in range(count)]
            time.sleep(0.3)
            between()
            return [future.result(300) for future in running]

    def counts(self, name: str) -> dict[str, float]:
        """A counter, by its source."""
        page = httpx.get(
            f"{self.url}/metrics", headers={"authorization": f"Bearer {OPERATOR}"}, timeout=60
        ).text
        rows = re.findall(rf'^{name}{{.*source="([^"]+)".*}} (\S+)$', page, re.MULTILINE)
        found: dict[str, float] = {}
        for source, value in rows:
            found[source] = found.get(source, 0.0) + float(value)
        return found


def draftline(*arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "redis_password").write_text(f"{PASSWORD}\n")
    (folder / "operator").write_text(f"{OPERATOR}\n")
    (folder / "corpus").mkdir()
    for index, prompt in enumerate(held_out_prompts(16)):
        (folder / "corpus" / f"{index}.txt").write_text(prompt.text * 4)
    options = ("--requirepass", PASSWORD, "--appendonly", "yes")
    with RedisServer(folder, *options) as redis:
        store = f"{redis.url}?password_file={folder}/redis_password"
        draftline("corpus", "build", str(folder / "corpus"), "--model", "demo", "--store", store,
                  "--keep", "8")  # fmt: skip
        made = draftline("tenant", "create", "acme", "--store", store)
        [tenant_key] = re.findall(r"\bdl-[\w-]+|\bsk-[\w-]+", made)
        port = free_port(ServerConfig(port=0))
        settings = stood_in(redis=store, operator_key=str(folder / "operator"))
        settings["http_options"]["port"] = port
        scaling = settings["applications"][2]["args"]["deployment"]["autoscaling_config"]
        scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 5}
        file = folder / "70b.yaml"
        file.write_text(yaml.safe_dump(settings))
        log = (folder / "serve.log").open("w")
        variables = os.environ | RAY_ENVIRONMENT | {"RAY_worker_niceness": "0"}
        with subprocess.Popen(
            [SERVE, "run", str(file)], stdout=log, stderr=subprocess.STDOUT, env=variables
        ) as process:
            url = f"http://127.0.0.1:{port}"
            try:
                until(lambda: is_ready() or process.poll() is not None, "it is not ready")
                assert process.poll() is None, (folder / "serve.log").read_text()
                yield Deployment(url, tenant_key, redis)
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
        log.close()


def is_ready() -> bool:
    """Whether all three applications run."""
    told = subprocess.run(
        [SERVE, "status"], check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | {"RAY_AUTH_MODE": "token"},
    )  # fmt: skip
    return len(re.findall(r"^    status: RUNNING$", told.stdout, re.MULTILINE)) == 3


@pytest.fixture(scope="module")
def plain(deployed: Deployment) -> list[str]:
    return [deployed.text(index, drafts=False) for index in range(4)]


def test_every_part_drafts_and_texts_are_those_of_plain_decoding(
    deployed: Deployment, plain: list[str]
) -> None:
    until(lambda: len(pool_server_pids("drafters")) == 1, "no drafter server")
    until(lambda: len(pool_server_pids("retrieval")) == 2, "no retrieval servers")
    everybody = {"head", "spectra", "suffix", "prompt_lookup", "model", "retrieval"}
    asked: dict[str, float] = {}
    for _ in range(20):
        assert deployed.texts(4) == plain
        asked = deployed.counts("draftline:drafter_proposals_total")
        if {name for name, count in asked.items() if count} >= everybody:
            break
    assert {name for name, count in asked.items() if count} >= everybody, asked
    with deployed.redis.client(
        deployed.redis.url.replace("redis://", f"redis://:{PASSWORD}@")
    ) as client:
        assert client.xlen("draftline:usage"), "no record of a request"


@pytest.mark.parametrize(
    "pids",
    [
        stage_pids,
        coordinator_pids,
        lambda: pool_server_pids("drafters"),
        lambda: pool_server_pids("retrieval"),
    ],
    ids=["stage", "engine", "drafter server", "retrieval server"],
)
def test_the_loss_of_a_process_changes_no_text(
    deployed: Deployment, plain: list[str], pids: Callable[[], list[int]]
) -> None:
    until(pids, "nobody is there")
    before = set(pids())
    victim = min(before)
    assert deployed.texts(4, lambda: os.kill(victim, signal.SIGKILL)) == plain
    # The loss of a stage is noticed by the next step.
    assert deployed.texts(4) == plain
    until(lambda: set(pids()) - before and victim not in pids(), "it is not replaced")
    assert deployed.texts(4) == plain


def test_without_redis_the_texts_stay_and_with_it_again_tenants_too(
    deployed: Deployment, plain: list[str]
) -> None:
    assert deployed.texts(4, deployed.redis.kill) == plain
    assert deployed.texts(2) == plain[:2]
    deployed.redis.start()
    assert deployed.texts(4) == plain


def test_a_replica_joins_under_load_and_leaves_again(
    deployed: Deployment, plain: list[str]
) -> None:
    until(lambda: len(coordinator_pids()) == 1, "it does not begin with one")
    found: list[list[str]] = []

    def load() -> bool:
        found.append(deployed.texts(24))
        return len(coordinator_pids()) == 2

    until(load, "it does not grow")
    found.append(deployed.texts(24))
    assert {tuple(texts[:4]) for texts in found} == {tuple(plain)}
    until(lambda: len(coordinator_pids()) == 1, "it does not shrink")
    assert deployed.texts(4) == plain
