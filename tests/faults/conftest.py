"""Real Ray and a real redis-server, to be killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.ray_cluster import ray_cluster as small_ray
from support.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Ray, for as long as the tests of one file run."""
    with small_ray():
        yield


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server that runs."""
    with RedisServer(tmp_path) as server:
        yield server
