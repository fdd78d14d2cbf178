"""A pool of drafter servers on a small Ray Serve without HTTP, for tests and engines in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from draftline import DrafterConfig
from support.servers.processes import pool_server_pids
from support.servers.ray_cluster import ray_cluster

POOL = "drafters"
# Ray Serve hears of the servers' work so often, where it would every ten seconds. And servers start
# as quickly as this process would: Ray gives its workers what others leave.
RAY_VARIABLES = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_worker_niceness": "0",
}
DRAFTER = DrafterConfig(kind="prompt_lookup", name="far", transport="grpc", drafter_pool=POOL)


@contextmanager
def drafter_pool(**settings: Any) -> Iterator[None]:
    """A pool of prompt lookup with these settings beside its own; quick to grow and to shrink."""
    variables = mock.patch.dict(os.environ, RAY_VARIABLES)
    with variables, ray_cluster(num_cpus=4), serving_pool(**settings):
        yield


@contextmanager
def serving_pool(**settings: Any) -> Iterator[None]:
    """The same on a Ray that runs already, started with `RAY_VARIABLES`."""
    # Ray Serve warns when it is imported: in tests that expect it.
    from draftline.deploy.ray_serve import drafter_pool as pool_module
    from ray import serve

    given = {
        "target": "demo",
        "drafter": {"kind": "prompt_lookup", "name": "far"},
        "cpus_per_drafter": 0.2,
        **settings,
    }
    serve.start(proxy_location="Disabled")
    try:
        with mock.patch.multiple(
            pool_module, LOOK_BACK_S=2.0, UPSCALE_DELAY_S=0.5, DOWNSCALE_DELAY_S=1.0
        ):
            application = pool_module.build_pool(given)
        serve.run(application, name=POOL, route_prefix=None)
        yield
    finally:
        serve.shutdown()


def pool_pids() -> list[int]:
    """Processes of the pool's servers, oldest first."""
    return pool_server_pids(POOL)
