"""`serve run deploy/70b.yaml` with small models in place of large ones, as its first lines say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Semaphore
from typing import Any

import draftline
import httpx
import openai
import yaml
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.deploy.cli.main import app
from draftline.deploy.cli.serve.listening import free_port
from draftline.deploy.ray_serve.runtime import RAY_ENVIRONMENT
from draftline.deploy.settings.settings import ServerConfig
from typer.testing import CliRunner

from .redis_server import RedisServer

FILE = Path(draftline.__file__).parent / "deploy" / "70b.yaml"
STAND_INS = {
    "model": "demo",
    "head": "demo-griffin",
    "small_model": "demo-drafter",
    "stages": "2",
    "drafter_gpus": "0",
    "cpus": "0.1",
}
PASSWORD, OPERATOR = "of-redis", "operator-key"
PROMPTS = [prompt.text for prompt in held_out_prompts(4)]
SERVE = str(Path(sys.executable).with_name("serve"))


def stood_in(**variables: str) -> dict[str, Any]:
    """What the file says where its variables are these, and the stand-ins."""
    text = FILE.read_text("utf-8")
    for name, value in (STAND_INS | variables).items():
        text, count = re.subn(rf"^(  {name}: &{name} )\S+", rf"\g<1>{value}", text, flags=re.M)
        assert count == 1, name
    return yaml.safe_load(text)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What was brought up."""

    url: str
    tenant_key: str
    redis: RedisServer
    num_tokens: int
    model: str
    drafters: frozenset[str]

    def text(
        self, index: int, *, drafts: bool = True, begins: Callable[[], object] = lambda: None
    ) -> str:
        """An answer to the tenant, streamed; every second one is drawn. `begins` is called with
        the first chunk."""
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.tenant_key, max_retries=0, timeout=300
        ) as client:
            stream = client.completions.create(
                model=self.model, prompt=PROMPTS[index % len(PROMPTS)], max_tokens=self.num_tokens,
                seed=index, temperature=0.8 * (index % 2), stream=True,
                extra_body={"ignore_eos": True, "speculative": {"enabled": drafts}},
            )  # fmt: skip
            first = next(stream)
            begins()
            chunks = chain([first], stream)
            return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def texts(self, count: int, between: Callable[[], None] = lambda: None) -> list[str]:
        """So many at once; `between` is called when all have begun: one that has not begun is
        refused, not resumed, where its only replica dies."""
        with ThreadPoolExecutor(max_workers=count) as pool:
            all_begin = Semaphore(0)
            running = [
                pool.submit(self.text, index, begins=all_begin.release) for index in range(count)
            ]
            for _ in range(count):
                assert all_begin.acquire(timeout=60), "a stream does not begin"
            between()
            return [future.result(300) for future in running]

    def values(self, name: str) -> dict[str, float]:
        """A metric, by its source; nothing while nobody answers."""
        headers = {"authorization": f"Bearer {OPERATOR}"}
        try:
            page = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        except httpx.TransportError:
            return {}
        rows = re.findall(rf'^{name}{{.*source="([^"]+)".*}} (\S+)$', page, re.MULTILINE)
        found: dict[str, float] = {}
        for source, value in rows:
            found[source] = found.get(source, 0.0) + float(value)
        return found


def draftline_says(*arguments: str) -> str:
    """What a command of draftline's prints; in this process, which has imported most of it."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> None:
    """Wait for it; fail with `what` if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@contextmanager
def deployment(
    folder: Path,
    *,
    num_documents: int,
    num_tokens: int,
    num_lookups: int = 2,
    model: str = "demo",
) -> Iterator[Deployment]:
    """Everything runs: Redis with a store of so many documents and a tenant, and `serve run`.

    model        the target; only `demo` has a head
    num_tokens   of each answer
    num_lookups  servers of the pool of lookups, at the start
    """
    (folder / "redis_password").write_text(f"{PASSWORD}\n")
    (folder / "operator").write_text(f"{OPERATOR}\n")
    (folder / "corpus").mkdir()
    for index, prompt in enumerate(held_out_prompts(2 * num_documents)):
        (folder / "corpus" / f"{index}.txt").write_text(prompt.text * 4)
    options = ("--requirepass", PASSWORD, "--appendonly", "yes")
    with RedisServer(folder, *options) as redis:
        store = f"{redis.url}?password_file={folder}/redis_password"
        draftline_says("corpus", "build", str(folder / "corpus"), "--model", model,
                       "--store", store, "--keep", str(num_documents))  # fmt: skip
        made = draftline_says("tenant", "create", "acme", "--store", store)
        [tenant_key] = re.findall(r"\bdl-[\w-]+|\bsk-[\w-]+", made)
        port = free_port(ServerConfig(port=0))
        settings = stood_in(model=model, redis=store, operator_key=str(folder / "operator"))
        settings["http_options"]["port"] = port
        _, retrieval, server = (one["args"] for one in settings["applications"])
        retrieval["min_replicas"] = num_lookups
        if model != "demo":
            server["drafters"] = [one for one in server["drafters"] if one["kind"] != "head"]
        scaling = server["deployment"]["autoscaling_config"]
        scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 5}
        file, log = folder / "70b.yaml", folder / "serve.log"
        file.write_text(yaml.safe_dump(settings))
        kinds = frozenset(one["kind"] for one in server["drafters"])
        url = f"http://127.0.0.1:{port}"
        running = Deployment(url, tenant_key, redis, num_tokens, model, kinds)
        variables = os.environ | RAY_ENVIRONMENT | {"RAY_worker_niceness": "0"}
        with (
            log.open("w") as out,
            subprocess.Popen(
                [SERVE, "run", str(file)], stdout=out, stderr=subprocess.STDOUT, env=variables
            ) as process,
        ):
            try:
                # An engine is there, and has all servers of its drafters.
                servers = dict.fromkeys(kinds, 1) | {"retrieval": num_lookups}
                until(
                    lambda: (
                        running.values("draftline:drafter_servers") == servers
                        or process.poll() is not None
                    ),
                    "it is not ready",
                    600,
                )
                assert process.poll() is None, log.read_text()
                yield running
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
