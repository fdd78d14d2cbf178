"""A real redis-server of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Runs; the parameter of a test that has one is its command line's options."""
    with RedisServer(tmp_path, *getattr(request, "param", ())) as server:
        yield server
