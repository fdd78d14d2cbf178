"""The server of a soak: its settings, its tenants, and the data that it draws on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....deploy.tenants.changes import create_tenant
from ....deploy.tenants.store import open_tenant_store
from ....retrieval_store.serving.open_store import open_store
from ..on_ray.server import Server, served
from .plan import TENANTS
from .redis_server import RedisServer

OPERATOR = "operator"
# A request that takes longer ends with an error; a client waits somewhat longer for that.
REQUEST_TIMEOUT_S = 150.0
DEADLINE_S = REQUEST_TIMEOUT_S + 30.0
# Limits that are counted, and that nobody meets.
LIMITS: Mapping[str, Any] = {
    "requests_per_minute": 10_000,
    "tokens_per_minute": 10_000_000,
    "max_concurrency": 200,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A server that runs. `keys`: by the names of their owners; `logs`: the folder of Ray's."""

    server: Server
    redis: RedisServer
    keys: Mapping[str, str]
    logs: Path

    def headers(self, name: str) -> dict[str, str]:
        """Those that a request of this tenant, or of the operator, has."""
        return {"Authorization": f"Bearer {self.keys[name]}"}


def settings_of(redis_url: str, replicas: int, stages: int) -> dict[str, Any]:
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
            {"kind": "retrieval", "store": redis_url},
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
            "coordinator_cpus": 0.5,
            "ingress_cpus": 0.5,
        },
    }


@contextmanager
def set_up(replicas: int, stages: int, logs: Path | None) -> Iterator[Setup]:
    """A Redis with tenants and texts, and a server that uses it.

    logs  the folder that Ray's are left in; None: nobody wants them
    """
    # Ray's sockets lie in it, whose names must be short.
    with TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with RedisServer(folder) as redis:
            keys = _fill(redis.url)
            environment = {
                "DRAFTLINE_API_KEY": OPERATOR,
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": name,
            }
            with served(settings_of(redis.url, replicas, stages), environment) as server:
                yield Setup(server, redis, keys, folder)
            if logs is not None:
                shutil.copytree(folder / "ray", logs, dirs_exist_ok=True, ignore=_no_sockets)


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
