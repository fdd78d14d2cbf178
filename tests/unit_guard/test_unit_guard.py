"""The guard of tests/conftest.py really closes the ways out, and opens them for marked tests."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
import ray
import redis
import redis.asyncio

REFUSED = "in a unit test"


@pytest.mark.cluster
def test_tests_that_start_ray_share_a_worker(request: pytest.FixtureRequest) -> None:
    """By the suffix that xdist goes by: it is silent where it finds none."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    assert request.node.nodeid.endswith("@cluster") == is_worker


def test_ray_cannot_start() -> None:
    with pytest.raises(AssertionError, match=REFUSED):
        ray.init()


@pytest.mark.parametrize("method", ["bind", "connect", "connect_ex"])
def test_sockets_cannot_be_used(method: str) -> None:
    with socket.socket() as sock, pytest.raises(AssertionError, match=REFUSED):
        getattr(sock, method)(("127.0.0.1", 0))


@pytest.mark.parametrize("module", [grpc, grpc.aio])
def test_grpc_channels_cannot_be_made(module: Any) -> None:
    with pytest.raises(AssertionError, match=REFUSED):
        module.insecure_channel("127.0.0.1:1")


def test_redis_cannot_be_reached() -> None:
    with pytest.raises(AssertionError, match=REFUSED):
        redis.Redis().ping()


async def test_redis_cannot_be_reached_from_a_loop() -> None:
    with pytest.raises(AssertionError, match=REFUSED):
        await redis.asyncio.Redis().ping()


async def test_event_loops_still_work() -> None:
    assert await asyncio.to_thread(lambda: 7) == 7


@pytest.mark.net
def test_marked_tests_may_use_sockets() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert sock.getsockname()[1] > 0


def test_one_thread_each() -> None:
    import torch

    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
