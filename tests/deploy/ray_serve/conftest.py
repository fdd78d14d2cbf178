"""A Ray Serve for the tests that deploy applications."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.servers.ray_cluster import ray_cluster, ray_serve


@pytest.fixture
def ray_serve_url() -> Iterator[str]:
    """The URL of a Ray Serve without applications."""
    with ray_serve(ray_cluster(num_cpus=4)) as url:
        yield url
