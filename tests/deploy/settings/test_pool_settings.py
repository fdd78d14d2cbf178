"""Settings of a pool, and of the drafters that use one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from draftline.cluster.config import DrafterConfig
from draftline.core.errors import ConfigError
from draftline.deploy.cli.serve.command import run_server
from draftline.deploy.settings.ray_settings import PoolConfig
from draftline.deploy.settings.settings import build_serve_args
from rich.console import Console

GIVEN: dict[str, Any] = {"target": "demo", "drafter": {"kind": "suffix"}}
ROOT = Path(__file__).parents[3]


def test_its_drafter_is_built_for_the_target_s_engines_on_ray() -> None:
    config = PoolConfig(**GIVEN, gpus_per_drafter=2)
    assert config.drafter.transport == "grpc"
    assert (config.engine.model, config.engine.backend) == ("demo", "ray")
    assert config.engine.gpus_per_drafter == 1


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_replicas": 1, "min_replicas": 2}, "max_replicas"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"target_open_requests": 0}, "target_open_requests"),
        ({"replicas": 2}, "replicas"),
        ({"drafter": "suffix"}, "drafter"),
        ({"drafter": {"kind": "suffix", "servers": 2}}, r"drafter\.servers"),
        ({"drafter": {"kind": "suffix", "address": "a:1"}}, r"drafter\.address"),
        ({"drafter": {"kind": "suffix", "max_nodes": 0}}, r"drafter\.max_nodes"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        PoolConfig(**{**GIVEN, **given})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"transport": "inproc"}, "drafter_pool"),
        ({"address": "a:1"}, "drafter_pool"),
        ({"servers": 2}, "servers"),
        ({"drafter_pool": ""}, "drafter_pool"),
        ({"token_env": "TOKEN"}, "token_env"),
    ],
)
def test_drafters_that_cannot_use_a_pool_are_refused(given: dict[str, Any], field: str) -> None:
    values = {"kind": "suffix", "transport": "grpc", "drafter_pool": "drafters", **given}
    with pytest.raises(ConfigError, match=f"^{field}:"):
        DrafterConfig(**values)


def test_the_engine_starts_no_server_where_a_pool_is_named() -> None:
    config = DrafterConfig(
        kind="suffix", transport="grpc", drafter_pool="drafters", tls_ca="ca.pem"
    )
    assert not config.is_spawned


def test_a_server_s_pools_are_for_its_model() -> None:
    pools = {"drafters": {"drafter": {"kind": "suffix"}, "max_replicas": 2}}
    args = build_serve_args({"backend": "ray", "model": "demo", "pools": pools})
    assert [(name, pool.target) for name, pool in args.pools.items()] == [("drafters", "demo")]
    assert args.pools["drafters"].max_replicas == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"backend": "local", "pools": {"p": GIVEN}}, r"pools\.p"),
        ({"pools": {"draftline": GIVEN}}, r"pools\.draftline"),
        ({"pools": {"p": "suffix"}}, r"pools\.p"),
        ({"pools": {"p": {}}}, r"pools\.p\.drafter"),
        ({"pools": {"p": {"drafter": {"kind": "suffix", "name": 3}}}}, r"pools\.p\.drafter\.name"),
        ({"pools": ["p"]}, "pools"),
    ],
)
def test_pools_that_cannot_be_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}:"):
        build_serve_args({"backend": "ray", **given})


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
def test_a_cluster_of_the_command_s_own_has_only_the_pools_that_it_starts() -> None:
    drafter = {"kind": "suffix", "transport": "grpc", "drafter_pool": "far"}
    settings = {"model": "demo", "backend": "ray", "drafters": [drafter]}
    with pytest.raises(
        ConfigError, match=r"^drafters\[0\]\.drafter_pool: 'far' is not under pools"
    ):
        run_server(settings, None, Console(quiet=True))


def test_the_example_names_its_own_pool() -> None:
    file = yaml.safe_load((ROOT / "deploy" / "pool.yaml").read_text("utf-8"))
    pool, server = file["applications"]
    PoolConfig(**pool["args"])
    args = build_serve_args(server["args"])
    assert [one.drafter_pool for one in args.engine.drafters] == [pool["name"], None, None]
