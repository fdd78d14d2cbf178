"""Starts and stops Ray and Ray Serve quietly, around one application."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .settings import ServeArgs

APP_NAME = "draftline"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Ray reads these when it is imported or started. Each silences a line that is of no use to users.
QUIET_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


def quiet_libraries() -> None:
    """Keep what libraries print at start off the terminal; before Ray is imported."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"ray(\.|$)")
    for name in ("ray", "ray.serve", "transformers", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def serve_on_ray(args: ServeArgs, address: str | None = None) -> Iterator[None]:
    """Deploys the application and keeps it for as long as the context lasts.

    `address` names a running cluster (`auto`: the one of this machine); None starts one here, which
    ends with the context. Raises `ConfigError` and what deploying raises.
    """
    quiet_libraries()
    # Ray takes seconds to import, which `draftline --help` must not wait for.
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    quiet_libraries()
    _start_ray(args, address)
    try:
        from .serve_app import build_app  # noqa: PLC0415

        logs = LoggingConfig(log_level="ERROR", enable_access_log=False)
        http = {"host": args.server.host, "port": args.server.port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=logs)
        quiet_libraries()
        serve.run(build_app(args), name=APP_NAME, logging_config=logs)
        yield
        serve.delete(APP_NAME)
    finally:
        ray.shutdown()


def _start_ray(args: ServeArgs, address: str | None) -> None:
    import ray  # noqa: PLC0415

    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return
    from .serve_app import placement_bundles  # noqa: PLC0415

    bundles = placement_bundles(args.engine, args.deployment)
    needed = sum(bundle["CPU"] for bundle in bundles) * args.deployment.num_replicas
    ingress = args.deployment.num_ingress_replicas
    # Logical CPUs: on a small machine the parts take turns, which is slow but works.
    num_cpus = max(os.cpu_count() or 1, math.ceil(needed) + ingress)
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )
