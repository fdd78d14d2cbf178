"""Hubs over drafters, and one small Ray for all tests of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers.hub_fixtures import make_hub, serve
from support.servers.ray_cluster import ray_cluster

__all__ = ["cluster", "make_hub", "serve"]


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Ray, for as long as the tests of this folder run."""
    with ray_cluster():
        yield
