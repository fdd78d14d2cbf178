"""The Ray Serve application of a pool: drafter servers that engines of the same cluster share.

`serve run deploy/pool.yaml` deploys one beside an application that drafts with it, and `draftline
serve` those under `pools` of its settings. Drafts do not pass Ray Serve: each server has a port of
its own, which engines learn of by the application's name (`actors/pool_members.py`), and Ray Serve
starts, watches and scales the servers (`autoscaling.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from ...actors.pool_members import SERVER_NAME, PoolMember
from ..observe.log_format import set_up_logs
from ..settings.ray_settings import PoolConfig
from .autoscaling import BUSY, OPEN_REQUESTS, WAITING, PoolPolicy
from .deployment_plan import HEALTH_CHECK_PERIOD_S, HEALTH_CHECK_TIMEOUT_S

POLICY = f"{PoolPolicy.__module__}:{PoolPolicy.__qualname__}"
# Engines notice within a second that a server which Ray Serve stops has left the pool. It goes on
# for so long, and then drains.
NOTICE_S = 2.0
# Each engine asks each server for its address every second: not worth a log line.
QUIET = {"log_level": "WARNING", "enable_access_log": False}
# A server that stops goes on so long for requests that it still has.
DRAIN_S = 10.0
# Share of the time that a server should work; waiting messages count as work.
TARGET_UTILIZATION = 0.7
# Open requests and work are means over so long.
LOOK_BACK_S = 30.0
# Servers start, or stop, after they were needed, or not needed, for so long.
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 10.0, 120.0
# Beyond the time of its requests: what it takes to end the rest.
STOP_SLACK_S = 5.0


def build_pool(args: Mapping[str, Any] | PoolConfig) -> Application:
    """The application for `serve run` and `serve deploy`; `args` are the fields of `PoolConfig`.

    Raises `ConfigError` naming the field.
    """
    config = args if isinstance(args, PoolConfig) else PoolConfig(**args)
    return PoolServer.options(**pool_options(config)).bind(config)


def pool_options(config: PoolConfig) -> dict[str, Any]:
    """Options of the deployment, by Ray Serve's names."""
    targets = {
        "target_open_requests": config.target_open_requests,
        "target_utilization": TARGET_UTILIZATION,
    }
    return {
        "ray_actor_options": {
            "num_cpus": config.cpus_per_drafter,
            "num_gpus": config.gpus_per_drafter,
        },
        "autoscaling_config": {
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": UPSCALE_DELAY_S,
            "downscale_delay_s": DOWNSCALE_DELAY_S,
            "policy": {"policy_function": POLICY, "policy_kwargs": targets},
        },
        "logging_config": QUIET,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": NOTICE_S,
        "graceful_shutdown_timeout_s": NOTICE_S + DRAIN_S + STOP_SLACK_S,
    }


@serve.deployment(name=SERVER_NAME, max_constructor_retry_count=2)
class PoolServer:
    """One drafter server, with a token of its own that Ray hands to the engines."""

    async def __init__(self, config: PoolConfig) -> None:
        set_up_logs(logging.WARNING, "text")
        # The process that deploys it needs none of these.
        from ...actors.drafter_actor import actor_tls  # noqa: PLC0415
        from ...actors.drafter_server import DrafterServer  # noqa: PLC0415
        from ...cluster.drafting.factory import build_drafter  # noqa: PLC0415
        from ...cluster.links.access import Access, new_token  # noqa: PLC0415
        from ...cluster.transport.stage_spec import end_process  # noqa: PLC0415

        self._drain_s = DRAIN_S
        self._key = serve.get_replica_context().replica_id.unique_id
        self._token = new_token()
        drafter = await asyncio.to_thread(build_drafter, config.drafter, config.engine)
        host = ray.util.get_node_ip_address()
        server = DrafterServer(
            drafter,
            host,
            tls=actor_tls(config.drafter),
            access=Access(self._token),
            # Ray Serve starts another.
            on_device_lost=end_process,
        )
        self._address = f"{host}:{await server.start()}"
        self._server = server

    async def member(self) -> PoolMember:
        """Its address, token and load."""
        return PoolMember(self._key, self._address, self._token, self._server.num_open)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for `PoolPolicy`; Ray Serve calls it regularly."""
        work = self._server.read_work()
        return {OPEN_REQUESTS: self._server.num_open, BUSY: work.busy, WAITING: work.waiting}

    async def __del__(self) -> None:
        """Ray Serve calls and awaits it when the server stops: its requests move first."""
        if hasattr(self, "_server"):
            await self._server.stop(self._drain_s)
