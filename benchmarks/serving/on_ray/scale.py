"""One to four replicas on Ray Serve: what the request router finds cached, and what scaling costs.

    python -m draftline.benchmarks.serving.on_ray.scale [--replicas 1 --replicas 2 --replicas 4]

Serves the demo model on a Ray of its own, one process a replica, each with less KV than all
conversations take. First `--conversations` of some hundred tokens go on for `--turns` turns, in
shuffled order, once a router and number of replicas: `/metrics` tells which share of the prompt
tokens was cached, the system which CPU time the replicas took. Then the number of replicas follows
the load, up and down, while requests are sent without a pause, and every answer is compared with
that of the same body before. Prints tables, writes JSON. The clients run on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ....deploy.cli.serve.listening import free_port
from ....deploy.ray_serve.runtime import START_ATTEMPTS, quiet_libraries
from ....deploy.settings.settings import APP_NAME, ServerConfig
from ....measure.records.record import machine
from .conversations import Load, conversations
from .scaling import measure_scaling

RESULTS = Path(__file__).parents[2] / "results" / "scale_on_ray.json"
ROUTERS = ("prefix", "balanced")
# Of one replica: about half of what all conversations take.
KV_TOKENS = 8192
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Logical ones: replicas take turns on the machine's.
NUM_CPUS = 8


def main(
    *,
    replicas: Annotated[list[int], typer.Option(help="Numbers of replicas.")] = [1, 2, 4],  # noqa: B006
    conversations_count: Annotated[
        int, typer.Option("--conversations", help="Conversations that go on at once.")
    ] = 16,
    turns: Annotated[int, typer.Option(help="Requests of each.")] = 6,
    clients: Annotated[int, typer.Option(help="Requests under way at once.")] = 4,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure routers over fixed numbers of replicas, and replicas that follow the load."""
    load_before = os.getloadavg()
    bodies = conversations(conversations_count, turns)
    with ray_serve() as url:
        rows = [
            _routed(url, router, count, bodies, clients)
            for count in replicas
            for router in (ROUTERS if count > 1 else ROUTERS[:1])
        ]
        with deployed(_settings("prefix", {"autoscaling_config": AUTOSCALING})):
            scaling = measure_scaling(url, [body for turn in bodies for body in turn])
    content = {
        "machine": machine().fields(),
        "load_average_before": load_before,
        "kv_tokens_a_replica": KV_TOKENS,
        "conversations": conversations_count,
        "turns": turns,
        "clients": clients,
        "routers": rows,
        "scaling": scaling,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")
    _print(rows, scaling)
    if scaling["failed"] or scaling["other_texts"]:
        raise typer.Exit(1)


AUTOSCALING = {
    "min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 1.5, "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0, "look_back_period_s": 3.0, "metrics_interval_s": 0.5,
}  # fmt: skip


@contextmanager
def ray_serve() -> Iterator[str]:
    """The URL of a Ray Serve without applications, on a Ray of its own."""
    quiet_libraries()
    # Ray reads its environment when it is imported.
    import ray  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415

    port = free_port(ServerConfig(port=0))
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                num_cpus=NUM_CPUS,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=OBJECT_STORE_BYTES,
            )
            break
        except Exception:  # Ray itself raises no narrower class
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                raise
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def deployed(settings: Mapping[str, Any]) -> Iterator[None]:
    """An application with these settings, and nothing in its caches."""
    from ray import serve  # noqa: PLC0415
    from ray.serve.schema import LoggingConfig  # noqa: PLC0415

    from ....deploy.ray_serve.serve_app import build_app  # noqa: PLC0415

    logs = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.run(build_app(settings), name=APP_NAME, logging_config=logs)
    try:
        yield
    finally:
        serve.delete(APP_NAME)


def _settings(router: str, deployment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": "demo",
        "backend": "local",
        "kv_cache_tokens": KV_TOKENS,
        "drafters": [{"kind": "suffix"}, {"kind": "prompt_lookup"}],
        "deployment": {
            "request_router": router, "coordinator_cpus": 0.5, "ingress_cpus": 0.5,
            "max_surge_percent": 100, **deployment,
        },
    }  # fmt: skip


def _routed(
    url: str, router: str, count: int, bodies: Sequence[Sequence[dict[str, Any]]], clients: int
) -> dict[str, Any]:
    """What one router makes of all conversations."""
    with deployed(_settings(router, {"num_replicas": count})):
        began = time.perf_counter()
        load = Load(url)
        totals = asyncio.run(load.run(bodies, clients))
        seconds = time.perf_counter() - began
    return {
        "router": router if count > 1 else "none",
        "replicas": count,
        "requests": totals.requests,
        "cached_share": round(totals.cached_tokens / totals.prompt_tokens, 4),
        "busiest_share": round(max(totals.requests_by_replica) / totals.requests, 4),
        "requests_per_s": round(totals.requests / seconds, 3),
        "first_token_p50_ms": round(1e3 * totals.first_token_s(50), 1),
        "first_token_p90_ms": round(1e3 * totals.first_token_s(90), 1),
        "cpu_ms_a_request": round(1e3 * totals.cpu_s / totals.requests, 1),
        "cpus_used": round(totals.cpu_s / seconds, 3),
    }


def _print(rows: Sequence[Mapping[str, Any]], scaling: Mapping[str, Any]) -> None:
    console = Console(width=120)
    columns = (
        "replicas", "router", "cached_share", "busiest_share", "requests_per_s",
        "first_token_p50_ms", "first_token_p90_ms", "cpu_ms_a_request", "cpus_used",
    )  # fmt: skip
    table = Table(*(name.replace("_", " ") for name in columns), box=None)
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    console.print(table)
    console.print_json(data=scaling)
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
