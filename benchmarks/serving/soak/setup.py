"""The server of a soak: its settings, its tenants, and the data that it draws on."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from ....deploy.cli.demo.prompts import held_out_prompts
from ....deploy.ray_serve.deployment_plan import placement_bundles
from ....deploy.settings.settings import KEY_VARIABLE, build_serve_args
from ....deploy.tenants import create_tenant, open_tenant_store
from ....retrieval_store.serving.open_store import open_store
from ..ray_servers import END_TIMEOUT_S, POLL_S, Cluster, Process, RayServer, served, tree
from .faults import NODE, REDIS, RETRIEVAL, Targets
from .owned_servers import Disk, NetworkProxies, OwnedDrafterServer, RedisServer

TENANTS = ("amber", "birch", "cedar", "dune")
PROMPTS = 24
# Letters of a prompt, at its end.
PROMPT_LETTERS = (60, 700)
TOKENS = (48, 120, 240)
# Bodies that requests are drawn from: prompts come again, and prefixes with them.
BODIES_PER_REQUEST = 0.4
CHAT_SHARE = 0.25
STREAM_SHARE = 0.75
LEAVING_SHARE = 0.1
LEAVES_AFTER_S = (0.05, 1.5)
# So many requests come shortly before a fault, so that it meets some that run.
NEAR_FAULT_SHARE = 0.6
NEAR_FAULT_S = (0.1, 1.5)

WARM: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "sampled": WARM,
    "top_k": {**WARM, "top_k": 20, "min_p": 0.02},
    "penalties": {
        **WARM, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1,
    },
    "stop": {**GREEDY, "stop": ["return", "\n\n"]},
    "stop_warm": {**WARM, "stop": ["self", "):"], "min_tokens": 8},
    "logprobs": {**WARM, "logprobs": 3},
    "several": {**WARM, "n": 2},
    "bias": {**GREEDY, "logit_bias": {"10": -3.0, "265": 2.0}},
    "regex": {
        "temperature": 0.9,
        "structured_outputs": {"regex": "([a-z]{1,9} ){20,60}[a-z]{1,9}"},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SoakPrompt:
    """One request.

    at_s           seconds from the start
    leaves_after_s when its client goes away, from its sending; None: it stays
    """

    tenant: str
    kind: str
    path: str
    body: Mapping[str, Any]
    at_s: float
    leaves_after_s: float | None


def make_plan(
    rng: Random, count: int, seconds: float, fault_times: Sequence[float]
) -> list[SoakPrompt]:
    """`count` requests within `seconds`, in the order in which they are sent."""
    bodies = [_body(rng) for _ in range(max(round(count * BODIES_PER_REQUEST), 1))]
    asks = [_ask(rng, *rng.choice(bodies), _time(rng, seconds, fault_times)) for _ in range(count)]
    return sorted(asks, key=lambda ask: ask.at_s)


def _ask(rng: Random, kind: str, path: str, body: Mapping[str, Any], at_s: float) -> SoakPrompt:
    leaves = rng.random() < LEAVING_SHARE
    return SoakPrompt(
        tenant=rng.choice(TENANTS),
        kind=kind,
        path=path,
        body={**body, "stream": rng.random() < STREAM_SHARE},
        at_s=at_s,
        leaves_after_s=rng.uniform(*LEAVES_AFTER_S) if leaves else None,
    )


def _time(rng: Random, seconds: float, fault_times: Sequence[float]) -> float:
    if fault_times and rng.random() < NEAR_FAULT_SHARE:
        return max(rng.choice(fault_times) - rng.uniform(*NEAR_FAULT_S), 0.0)
    return rng.uniform(0.0, seconds)


def _body(rng: Random) -> tuple[str, str, Mapping[str, Any]]:
    """The kind, the path and the body of a request."""
    kind = rng.choice(list(KINDS))
    text = rng.choice(held_out_prompts(PROMPTS)).text
    text = text[-rng.randint(*PROMPT_LETTERS) :]
    body = {
        "model": "demo",
        "max_tokens": rng.choice(TOKENS),
        "seed": rng.randrange(1 << 30),
        "return_token_ids": True,
        **KINDS[kind],
    }
    if rng.random() >= CHAT_SHARE:
        return kind, "/v1/completions", body | {"prompt": text}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    messages = [{"role": "user", "content": text}]
    return kind, "/v1/chat/completions", body | {"messages": messages}


OPERATOR = "operator"
RETRIEVAL_SERVERS = 2
# Ray takes a lost node for alive for up to a minute, and places new replicas there meanwhile.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
# Titles of processes that a server on a cluster takes with it when it ends.
OWN_ROLES = (
    "ray::ServeReplica", "ray::StageWorker", "ray::DrafterActor", "ray::SupervisorServer",
    "python draftline",
)  # fmt: skip
# A request that takes longer ends with an error; a client waits somewhat longer for that.
REQUEST_TIMEOUT_S = 150.0
DEADLINE_S = REQUEST_TIMEOUT_S + 30.0
# Small models of the target's tokenizer and of others; the first in processes of their own.
OTHER = {"kind": "model", "model": "demo-drafter-other-vocab"}
MODEL_DRAFTERS: Sequence[Mapping[str, Any]] = (
    {"kind": "model", "model": "demo-drafter", "transport": "grpc", "servers": 2},
    {**OTHER, "name": "tli", "vocabulary": "tli", "tree": "dynamic"},
    {**OTHER, "name": "slem", "vocabulary": "slem"},
    {"kind": "model", "name": "slrs", "model": "demo-drafter-bytes", "vocabulary": "slrs"},
)  # fmt: skip
# Limits that are counted, and that nobody meets.
LIMITS: Mapping[str, Any] = {
    "requests_per_minute": 10_000,
    "tokens_per_minute": 10_000_000,
    "max_concurrency": 200,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A server that runs.

    keys  by the names of their owners
    logs  the folder of Ray's
    """

    server: RayServer
    cluster: Cluster
    redis: RedisServer
    retrieval: Sequence[OwnedDrafterServer]
    networks: Sequence[NetworkProxies]
    disk: Disk
    keys: Mapping[str, str]
    logs: Path

    def headers(self, name: str) -> dict[str, str]:
        """Those that a request of this tenant, or of the operator, has."""
        return {"Authorization": f"Bearer {self.keys[name]}"}

    def processes(self) -> list[Process]:
        """All of the server's, Ray's, and those that it draws on."""
        owned = [one.pid for one in (self.redis, *self.retrieval) if one.pid is not None]
        return tree(self.server.pid, *self.cluster.pids, *owned)

    def targets(self) -> Targets:
        """What faults may meet."""
        return Targets(
            roots=lambda: self.cluster.pids,
            owned={
                REDIS: [self.redis], RETRIEVAL: self.retrieval, NODE: [self.cluster.node],
            },
            disk=self.disk,
            networks=self.networks,
        )  # fmt: skip


def settings_of(
    redis_url: str,
    retrieval: Sequence[str],
    replicas: int,
    stages: int,
    *,
    model_drafters: bool = False,
) -> dict[str, Any]:
    """The server's settings: drafts in every step, parts of each in processes of their own."""
    return {
        "model": "demo",
        "backend": "ray",
        "pipeline_parallel_size": stages,
        "step_timeout_s": 3.0,
        "node_budget": "full",
        "tree_nodes": 8,
        "drafters": [
            {"kind": "spectra", "transport": "grpc"},
            {"kind": "suffix"},
            {"kind": "retrieval", "transport": "grpc", "address": list(retrieval)},
            *(MODEL_DRAFTERS if model_drafters else ()),
        ],
        "server": {
            "request_timeout_s": REQUEST_TIMEOUT_S,
            "tenant_store": redis_url,
            "rate_limit_store": redis_url,
            "usage_log": redis_url,
        },
        "deployment": {
            "num_replicas": replicas,
            "num_ingress_replicas": 2,
            "ingress_cpus": 0.5,
        },
    }


def cpus_of(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Of the head and of the other node, as Ray counts them: only one replica fits there, and the
    HTTP replicas may be anywhere."""
    args = build_serve_args(settings)
    deployment = args.deployment
    replica = sum(bundle["CPU"] for bundle in placement_bundles(args.engine, deployment))
    beside = deployment.ingress_cpus * deployment.num_ingress_replicas
    others = replica * (deployment.num_replicas - 1)
    return math.ceil(others + beside), math.ceil(replica + beside)


@contextmanager
def set_up(
    replicas: int, stages: int, logs: Path | None, *, model_drafters: bool = False
) -> Iterator[Setup]:
    """A Redis with tenants and texts, drafter servers over it, a Ray cluster, a server on it.

    logs  the folder that Ray's are left in; None: nobody wants them
    """
    # Ray's sockets lie in it, whose names must be short.
    with TemporaryDirectory(prefix="soak-") as name, ExitStack() as stack:
        disk = stack.enter_context(Disk(Path(name) / "d"))
        redis = stack.enter_context(RedisServer(disk.folder))
        keys = _fill(redis.url)
        networks = [stack.enter_context(NetworkProxies(redis.port))]
        redis_url = f"redis://127.0.0.1:{networks[0].port}/0"
        servers = [
            stack.enter_context(OwnedDrafterServer(redis_url)) for _ in range(RETRIEVAL_SERVERS)
        ]
        networks += [stack.enter_context(NetworkProxies(server.port)) for server in servers]
        addresses = [f"127.0.0.1:{network.port}" for network in networks[1:]]
        settings = settings_of(
            redis_url, addresses, replicas, stages, model_drafters=model_drafters
        )
        folder = disk.folder / "ray"
        if logs is not None:
            stack.callback(_keep, folder, logs)
        cluster = Cluster(cpus_of(settings), folder, ENVIRONMENT)
        stack.enter_context(cluster)
        environment = cluster.environment | {KEY_VARIABLE: OPERATOR}
        with served(settings, environment, cluster.address) as server:
            yield Setup(
                server=server,
                cluster=cluster,
                redis=redis,
                retrieval=servers,
                networks=networks,
                disk=disk,
                keys=keys,
                logs=folder,
            )
        server.left.extend(_outlived(cluster))


def _outlived(cluster: Cluster) -> list[Process]:
    """What is left of a server that has ended on a cluster that goes on."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while True:
        left = [one for one in tree(*cluster.pids) if one.role.startswith(OWN_ROLES)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def _keep(folder: Path, logs: Path) -> None:
    shutil.copytree(folder, logs, dirs_exist_ok=True, ignore=_no_sockets)


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


def _fill(url: str) -> dict[str, str]:
    """Put the demo's texts into the Redis, and tenants with limits; their keys by name."""
    demo, shared = open_store("demo"), open_store(url)
    for segment_id in demo.manifest().segment_ids("shared"):
        shared.put("shared", demo.get("shared", segment_id))
    tenants = open_tenant_store(url)
    keys = {OPERATOR: OPERATOR}
    for name in TENANTS:
        key = create_tenant(tenants, name, LIMITS)
        assert key is not None
        keys[name] = key.text
    return keys
