"""`deploy/clusters/`: what `ray up` reads, by Ray's own schema and command line; `observe.sh`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import draftline
import pytest
import ray
import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE
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


def test_all_that_is_mounted_is_there() -> None:
    for name in ALL:
        for source in read(name)["file_mounts"].values():
            # Made before: the token, the wheel.
            assert source in ("~/.ray/auth_token", "dist") or (FOLDER.parents[1] / source).exists()


STAND_IN = """#!/bin/bash
env > "$0.env"
printf '%s\\n' "$0" "$@" > "$0.begun"
mv "$0.begun" "$0.told"
exec -a "$0" sleep 60
"""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Path]:
    """The home of a head after `ray up`, with stand-ins for what `observe.sh` would fetch."""
    for target, source in read("local")["file_mounts"].items():
        path, given = tmp_path / target.removeprefix("~/"), FOLDER.parents[1] / source
        if given.is_dir() and "observability" in target:
            shutil.copytree(given, path)
        elif target.endswith(".sh"):
            # Ray's files of the session that runs here, if one does, stay as they are.
            path.write_text(given.read_text().replace("/tmp/ray", f"{tmp_path}/ray"))
    (tmp_path / "ray" / "session_latest" / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    for program in ("prometheus/prometheus", "grafana/bin/grafana"):
        path = tmp_path / ".cache" / "draftline-observe" / program
        path.parent.mkdir(parents=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    yield tmp_path
    for file in tmp_path.rglob("*.pid"):
        os.kill(int(file.read_text()), signal.SIGKILL)


def observe(home: Path, *arguments: str) -> None:
    subprocess.run(
        ["bash", home / "observe.sh", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        check=True,
        timeout=60,
    )


def told(home: Path, program: str) -> list[str]:
    """What a stand-in was called with, once it was."""
    file = home / ".cache" / "draftline-observe" / f"{program}.told"
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return file.read_text().splitlines()[1:]


def test_prometheus_and_grafana_start_on_the_loopback_of_the_head(head: Path) -> None:
    (head / "operator").write_text("a-key\nanother\n")
    observe(head, str(head / "operator"))
    options = dict(one.split("=", 1) for one in told(head, "prometheus/prometheus"))
    assert options["--web.listen-address"] == "127.0.0.1:9090"
    config = Path(options["--config.file"])
    settings = yaml.safe_load(config.read_text("utf-8"))
    assert all((config.parent / file).is_file() for file in settings["rule_files"])
    ours, rays = settings["scrape_configs"]
    key = config.parent / ours["authorization"]["credentials_file"]
    assert key.read_text() == "a-key\n"
    assert key.stat().st_mode & 0o077 == 0
    # Where Ray's head says which nodes there are.
    [listed] = rays["file_sd_configs"][0]["files"]
    assert listed == f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"

    _, home, ini = told(head, "grafana/bin/grafana")
    assert home == f"--homepath={head}/.cache/draftline-observe/grafana"
    assert ini == f"--config={head}/ray/session_latest/metrics/grafana/grafana.ini"
    variables = (head / ".cache/draftline-observe/grafana/bin/grafana.env").read_text()
    assert "GF_SERVER_HTTP_ADDR=127.0.0.1\n" in variables
    shown = head / "ray/session_latest/metrics/grafana/dashboards/draftline.json"
    assert json.loads(shown.read_text("utf-8"))["uid"] == "draftline"


def test_without_keys_no_key_is_sent(head: Path) -> None:
    observe(head)
    assert (head / "observability" / "draftline-key").read_text() == ""


def test_versions_are_those_of_compose() -> None:
    services = yaml.safe_load((FOLDER.parent / "docker" / "compose.yaml").read_text("utf-8"))
    script = (FOLDER / "observe.sh").read_text("utf-8")
    for name in ("prometheus", "grafana"):
        image = services["services"][name]["image"]
        [version] = re.findall(rf"^{name.upper()}=(.+)$", script, re.MULTILINE)
        assert image.rpartition(":")[2].removeprefix("v") == version


def test_a_wrong_file_would_be_seen() -> None:
    config = read("aws")
    config["available_nodes"] = {}
    with pytest.raises(Exception, match="available_nodes"):
        validate_config(prepare_config(config))
    with pytest.raises(click.UsageError, match="no-such-option"):
        start.make_context("start", ["--head", "--no-such-option"])
