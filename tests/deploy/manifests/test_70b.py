"""`deploy/70b.yaml`: what it tells Ray Serve and draftline.

`tests/faults/test_whole_deployment.py` starts it.
"""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftline.deploy.settings.ray_settings import PoolConfig
from draftline.deploy.settings.settings import build_serve_args
from support.servers.whole_deployment import FILE, stood_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own
    from ray.serve.schema import ServeDeploySchema

REDIS = "redis://127.0.0.1:6379/0"


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "operator").write_text("a-key-of-the-test")
    return stood_in(redis=REDIS, operator_key=str(tmp_path / "operator"))


def test_ray_serve_takes_it() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text("utf-8")))
    names = [application.name for application in schema.applications]
    assert names == ["drafters", "retrieval", "draftline"]
    assert schema.http_options.host == "127.0.0.1"


def test_draftline_takes_its_settings(stand_ins: dict[str, Any]) -> None:
    *pools, server = (application["args"] for application in stand_ins["applications"])
    model, retrieval = (PoolConfig(**pool) for pool in pools)
    args = build_serve_args(server)
    # Whatever drafts is there, each where it belongs.
    drafters = {one.kind: one for one in args.engine.drafters}
    assert list(drafters) == ["head", "spectra", "suffix", "prompt_lookup", "model", "retrieval"]
    assert drafters["model"].drafter_pool == stand_ins["applications"][0]["name"]
    assert drafters["retrieval"].drafter_pool == stand_ins["applications"][1]["name"]
    assert model.target == retrieval.target == args.engine.model == "demo"
    assert retrieval.min_replicas == 2
    # What engines hand over at the end of a request is learned by the pool.
    assert drafters["retrieval"].options["learn"] is True
    assert retrieval.drafter.options == {"store": REDIS, "learn": True}
    assert args.server.tenant_store == args.server.rate_limit_store == args.server.usage_log
    assert args.engine.pipeline_parallel_size == 2


def test_start_md_makes_the_same_of_it(tmp_path: Path) -> None:
    page = (FILE.parents[1] / "docs" / "start.md").read_text("utf-8")
    [command] = re.findall(r"^sed -e .*?deploy/70b\.yaml > everything\.yaml$", page, re.M | re.S)
    command = command.replace("deploy/70b.yaml", str(FILE))
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    made = yaml.safe_load((tmp_path / "everything.yaml").read_text("utf-8"))
    assert made == stood_in(redis=REDIS, operator_key=str(tmp_path / "operator.key"))


def test_on_two_cores_the_stand_ins_have_room(stand_ins: dict[str, Any]) -> None:
    model, retrieval, server = (one["args"] for one in stand_ins["applications"])
    deployment = server["deployment"]
    replica = deployment["coordinator_cpus"]
    replica += server["pipeline_parallel_size"] * server["cpus_per_stage"]
    most = deployment["autoscaling_config"]["max_replicas"] * replica
    most += deployment["num_ingress_replicas"] * deployment["ingress_cpus"]
    most += sum(pool["max_replicas"] * pool["cpus_per_drafter"] for pool in (model, retrieval))
    assert most <= 2.0
