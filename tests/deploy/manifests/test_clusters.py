"""`deploy/clusters/`: what `ray up` reads, by Ray's own schema and command line."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import click
import draftline
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

with warnings.catch_warnings():
    # Ray Serve's own. Were they errors, it would be imported halfway, and broken for later tests.
    warnings.simplefilter("ignore")
    from ray.scripts.scripts import start

FOLDER = Path(draftline.__file__).parent / "deploy" / "clusters"
CLOUDS = ("aws", "azure", "gcp")
ALL = (*CLOUDS, "local")
# Where a shell of the nodes' user starts; in the containers it is Ray's.
HOME = {"local": "~"} | dict.fromkeys(CLOUDS, "/home/ray")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", ALL)
def test_ray_takes_it(name: str) -> None:
    config = prepare_config(read(name))
    validate_config(config)
    assert config["provider"]["type"] == name


def test_all_files_are_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_ray_takes_the_arguments_of_its_start(name: str) -> None:
    config = read(name)
    for kind in ("head", "worker"):
        stop, run = config[f"{kind}_start_ray_commands"]
        assert stop.endswith("ray stop")
        words = shlex.split(run.replace(";", " ; "))
        arguments = words[words.index("start") + 1 :]
        with start.make_context("start", list(arguments)) as context:
            assert context.params["head"] == (kind == "head")
            # The nodes' own ports are fixed, so that a firewall can name them.
            assert context.params["object_manager_port"] == 8076


@pytest.mark.parametrize("name", ALL)
def test_every_node_has_the_token_and_asks_for_it(name: str) -> None:
    config = read(name)
    assert config["file_mounts"][f"{HOME[name]}/.ray/auth_token"] == "~/.ray/auth_token"
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    options = config.get("docker", {}).get("run_options", [])
    asked = ["RAY_AUTH_MODE=token" in one for one in commands if "ray start" in one]
    assert all(asked) or "--env RAY_AUTH_MODE=token" in options


@pytest.mark.parametrize("name", ALL)
def test_only_the_api_may_be_reached_from_outside(name: str) -> None:
    config = read(name)
    for command in config["head_start_ray_commands"]:
        assert "0.0.0.0" not in command
    rules = config["provider"].get("security_group", {}).get("IpPermissions", [])
    for rule in rules:
        assert (rule["FromPort"], rule["ToPort"]) == (8000, 8000)
        assert "0.0.0.0/0" not in json.dumps(rule)


@pytest.mark.parametrize("name", CLOUDS)
def test_images_are_of_the_ray_that_runs_here(name: str) -> None:
    image = read(name)["docker"]["image"]
    major, minor, _ = ray.__version__.split(".")
    assert re.fullmatch(rf"rayproject/ray:{major}\.{minor}\.\d+-py3\d\d-gpu", image)


@pytest.mark.parametrize("name", CLOUDS)
def test_head_and_workers_have_gpus(name: str) -> None:
    types = read(name)["available_node_types"]
    assert set(types) == {"head", "stage", "drafter"}
    if name != "aws":  # whose provider looks them up
        assert all(one["resources"]["GPU"] == 1 for one in types.values())


def test_azures_template_has_all_parameters() -> None:
    folder = Path(ray.__file__).parent / "autoscaler" / "_private" / "_azure"
    known = json.loads((folder / "azure-vm-template.json").read_text("utf-8"))["parameters"]
    for one in read("azure")["available_node_types"].values():
        assert set(one["node_config"]["azure_arm_parameters"]) <= {*known, "availability_zone"}


def test_a_wrong_file_would_be_seen() -> None:
    config = read("aws")
    config["available_nodes"] = {}
    with pytest.raises(Exception, match="available_nodes"):
        validate_config(prepare_config(config))
    with pytest.raises(click.UsageError, match="no-such-option"):
        start.make_context("start", ["--head", "--no-such-option"])
