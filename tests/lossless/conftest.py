"""Real Ray for the engines whose stages are actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers.ray_cluster import ray_cluster as small_ray


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Ray, for as long as the tests of one file run."""
    with small_ray():
        yield
