"""`deploy/kuberay/`: manifests by KubeRay's fields, and what they give to Ray Serve by ours."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draftline
import jsonschema
import pytest
import ray
import yaml
from draftline.deploy.settings.ray_settings import PoolConfig
from draftline.deploy.settings.settings import ServeArgs, build_serve_args
from support.contracts.kuberay_schema import HELM_VALUES, RAY_SERVICE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own
    from ray.serve.schema import ServeDeploySchema

FOLDER = Path(draftline.__file__).parent / "deploy" / "kuberay"


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


@pytest.fixture
def service() -> dict[str, Any]:
    [found] = read("rayservice.yaml")
    return found


def pods(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]["spec"]


def served(
    service: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[PoolConfig, ServeArgs]:
    """The settings of both applications; files of secrets are there in the pods only."""
    schema = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    pool, server = (application.args for application in schema.applications)
    assert schema.http_options.host == "0.0.0.0"
    assert server["server"].pop("api_key_file") == "/run/secrets/draftline/operator"
    monkeypatch.setenv("OPERATOR", "a-key-of-the-test")
    server["server"]["api_key_env"] = "OPERATOR"
    return PoolConfig(**pool), build_serve_args(server)


def test_kuberay_knows_every_field(service: dict[str, Any]) -> None:
    jsonschema.validate(service, RAY_SERVICE)
    [values] = read("helm-values.yaml")
    jsonschema.validate(values, HELM_VALUES)


def test_a_misspelt_field_is_found(service: dict[str, Any]) -> None:
    wrong = copy.deepcopy(service)
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volume"] = []
    with pytest.raises(jsonschema.ValidationError, match="volume"):
        jsonschema.validate(wrong, RAY_SERVICE)


def test_draftline_takes_its_settings(
    service: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, server = served(service, monkeypatch)
    assert server.engine.drafters[0].drafter_pool == "drafters"
    assert pool.target == server.engine.model
    # Pods outlive their requests.
    grace = min(pod.get("terminationGracePeriodSeconds", 10**9) for pod in list(pods(service))[1:2])
    assert grace > server.deployment.graceful_shutdown_timeout_s > server.server.drain_timeout_s
    # A stage, with STRICT_SPREAD, needs a pod of its own.
    stages = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert stages["minReplicas"] >= server.engine.pipeline_parallel_size


def test_versions_are_those_of_this_tree(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    tags = {pod["containers"][0]["image"].rpartition(":")[2] for pod in pods(service)}
    assert tags == {f"{draftline.__version__}-cuda"}
    assert read("helm-values.yaml")[0]["image"]["tag"] in tags


def test_pods_are_confined(service: dict[str, Any]) -> None:
    for pod in pods(service):
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        # What a read-only file system leaves to be written.
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }


def test_the_token_is_asked_for_and_is_no_text(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    assert "secretKeyRef" in cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]
    [values] = read("helm-values.yaml")
    variables = {one["name"]: one for one in values["common"]["containerEnv"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    assert "secretKeyRef" in variables["RAY_AUTH_TOKEN"]["valueFrom"]


def test_the_policy_is_for_the_pods_of_the_service(service: dict[str, Any]) -> None:
    policy, budget = read("network-policy.yaml")
    labels = [
        group["template"]["metadata"]["labels"]
        for group in (
            service["spec"]["rayClusterConfig"]["headGroupSpec"],
            *service["spec"]["rayClusterConfig"]["workerGroupSpecs"],
        )
    ]
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert all(wanted.items() <= one.items() for one in labels)
    wanted = budget["spec"]["selector"]["matchLabels"]
    assert [wanted.items() <= one.items() for one in labels] == [False, True, True]
