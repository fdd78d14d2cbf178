"""A small Ray on this machine, for tests."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from draftline.deploy.cli.serve.listening import free_port
from draftline.deploy.ray_serve.runtime import RAY_ENVIRONMENT
from draftline.deploy.settings.settings import ServerConfig
from ray.cluster_utils import Cluster

TESTS = Path(__file__).parents[2]


@contextmanager
def ray_cluster(num_cpus: int = 4) -> Iterator[None]:
    """Ray with this many logical CPUs; its workers can import `support`."""
    with _tests_in_path():
        try:
            _start(num_cpus)
            yield
        finally:
            ray.shutdown()


class RayNodes:
    """A head and further nodes of a Ray cluster on this machine."""

    def __init__(self, addresses: Sequence[str], num_cpus: float) -> None:
        """`addresses` of the further ones; the head has the machine's. `num_cpus` of each."""
        self._cluster = Cluster()
        self._num_cpus = num_cpus
        self._add()
        self._nodes = {address: self._add(node_ip_address=address) for address in addresses}
        self.address = self._cluster.address

    def _add(self, **options: Any) -> Any:
        return self._cluster.add_node(
            num_cpus=self._num_cpus,
            include_dashboard=False,
            object_store_memory=100_000_000,
            **options,
        )

    def lose(self, address: str) -> None:
        """End a node with all that runs there, at once."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def end(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def ray_nodes(addresses: Sequence[str], num_cpus: float = 1) -> Iterator[RayNodes]:
    """A Ray cluster of a head, which this process uses, and nodes with these addresses; each node
    has so many logical CPUs."""
    with _tests_in_path():
        # An engine on Ray that some test made leaves the Ray that it started.
        ray.shutdown()
        nodes = RayNodes(addresses, num_cpus)
        try:
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            nodes.end()


@contextmanager
def ray_serve(cluster: AbstractContextManager[object]) -> Iterator[str]:
    """The URL of a Ray Serve without applications, on a cluster that begins here."""
    # Its modules warn when they are imported, so tests import it under filters of their own.
    from ray import serve

    port = free_port(ServerConfig(port=0))
    with mock.patch.dict(os.environ, RAY_ENVIRONMENT), cluster:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


@contextmanager
def _tests_in_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _start(num_cpus: int) -> None:
    """Ray gives itself 30 s to start, which is short on a busy machine: try three times."""
    for attempt in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ray.init(
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=100_000_000,
                )
                return
            except Exception:  # Ray itself raises no narrower class
                ray.shutdown()
                # What the attempt left warns when it is collected: here, not in some test.
                gc.collect()
                if attempt == 2:
                    raise


async def no_actors_left(class_name: str | None = None) -> bool:
    """Whether all actors, or all of a class, are dead or soon are: Ray hears of it late."""
    for _ in range(200):
        if not living_actors(class_name):
            return True
        await asyncio.sleep(0.1)
    return False


def living_actors(class_name: str | None = None) -> list[str]:
    """The classes of all actors, or those of one class, that are not known to be dead."""
    actors = ray._private.state.actors().values()
    names = [actor["ActorClassName"] for actor in actors if actor["State"] != "DEAD"]
    return [name for name in names if class_name in (None, name)]
