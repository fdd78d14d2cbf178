"""`deploy/kuberay/`: manifests by KubeRay's fields, and what they give to Ray Serve by ours."""

from __future__ import annotations

import copy
import json
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draftline
import jsonschema
import pytest
import ray
import yaml
from support.contracts.kuberay_schema import (
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    HELM_VALUES,
    NETWORK_POLICY,
    POD_MONITOR,
    PROMETHEUS_RULE,
    RAY_SERVICE,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own
    from ray.serve.schema import ServeDeploySchema

FOLDER = Path(draftline.__file__).parent / "deploy" / "kuberay"
OBSERVABILITY = FOLDER.parent / "assets" / "observability"
WHOLE = FOLDER.parent / "70b.yaml"


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


def served(service: dict[str, Any]) -> dict[str, Any]:
    """What Ray Serve is told."""
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def test_kuberay_knows_every_field(service: dict[str, Any]) -> None:
    jsonschema.validate(service, RAY_SERVICE)
    [values] = read("helm-values.yaml")
    jsonschema.validate(values, HELM_VALUES)
    policy, budget = read("network-policy.yaml")
    jsonschema.validate(policy, NETWORK_POLICY)
    jsonschema.validate(budget, DISRUPTION_BUDGET)


def test_a_misspelt_field_is_found(service: dict[str, Any]) -> None:
    wrong = copy.deepcopy(service)
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volume"] = []
    with pytest.raises(jsonschema.ValidationError, match="volume"):
        jsonschema.validate(wrong, RAY_SERVICE)


def test_its_applications_are_those_of_70b_yaml(service: dict[str, Any]) -> None:
    """But for where they listen and how often: `test_70b.py` looks at the rest."""
    ServeDeploySchema.model_validate(served(service))
    ours, theirs = served(service), yaml.safe_load(WHOLE.read_text("utf-8"))
    assert ours["http_options"].pop("host") == "0.0.0.0"
    assert theirs["http_options"].pop("host") == "127.0.0.1"
    for config, count in ((ours, 2), (theirs, 1)):
        assert config["applications"][-1]["args"]["deployment"].pop("num_ingress_replicas") == count
    # What a busy laptop needs.
    del theirs["controller_options"]
    assert ours == theirs


def test_pods_outlive_their_requests_and_each_stage_has_one(service: dict[str, Any]) -> None:
    args = served(service)["applications"][-1]["args"]
    grace = min(pod.get("terminationGracePeriodSeconds", 10**9) for pod in list(pods(service))[1:2])
    stopping = args["deployment"]["graceful_shutdown_timeout_s"]
    assert grace > stopping > args["server"]["drain_timeout_s"]
    stages = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert stages["minReplicas"] >= args["pipeline_parallel_size"]


def test_its_secrets_are_where_the_applications_look(service: dict[str, Any]) -> None:
    [keys] = [one for one in list(pods(service))[1]["volumes"] if one["name"] == "keys"]
    operator, redis = (one["secret"] for one in keys["projected"]["sources"])
    assert operator["name"] == "draftline-keys"
    assert redis["items"] == [{"key": "password", "path": "redis_password"}]
    [mount] = [
        one for one in list(pods(service))[1]["containers"][0]["volumeMounts"]
        if one["name"] == "keys"
    ]  # fmt: skip
    variables = served(service)["x-variables"]
    assert variables["operator_key"] == f"{mount['mountPath']}/operator"
    assert variables["redis"].endswith(f"?password_file={mount['mountPath']}/redis_password")


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


@pytest.fixture
def monitoring() -> list[dict[str, Any]]:
    """What `monitoring.sh` prints."""
    done = subprocess.run(
        [FOLDER / "monitoring.sh"], check=True, capture_output=True, text=True, timeout=60
    )
    return list(yaml.safe_load_all(done.stdout))


def test_monitors_scrape_ports_of_pods_with_the_key(
    service: dict[str, Any], monitoring: list[dict[str, Any]]
) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    ours, rays = monitoring[:2]
    scraped = []
    for monitor in (ours, rays):
        jsonschema.validate(monitor, POD_MONITOR)
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        templates = [group["template"] for group in groups]
        chosen = [one for one in templates if wanted <= one["metadata"]["labels"].items()]
        for template in chosen:
            [container] = template["spec"]["containers"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            scraped.append(ports[endpoint["port"]])
    # The API of one pod, and what Ray exports of every one.
    assert scraped == [served(service)["http_options"]["port"], 8080, 8080, 8080]
    policy, _ = read("network-policy.yaml")
    [opened] = [
        {port["port"] for port in rule["ports"]}
        for rule in policy["spec"]["ingress"]
        if "monitoring" in str(rule["from"])
    ]
    assert set(scraped) == opened
    [endpoint] = ours["spec"]["podMetricsEndpoints"]
    # The Secret that the applications take the operator's key from.
    [keys] = [one for one in next(pods(service))["volumes"] if one["name"] == "keys"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == keys["projected"]["sources"][0]["secret"]["name"]
    operator = served(service)["x-variables"]["operator_key"]
    assert operator.endswith(f"/{credentials['key']}")
    # What an alert asks for by job.
    assert ours["spec"]["jobLabel"] == "app.kubernetes.io/name"
    name = groups[0]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    assert f'up{{job="{name}"}}' in (OBSERVABILITY / "alerts.yaml").read_text("utf-8")


def test_alerts_and_dashboard_are_printed_with_the_monitors(
    monitoring: list[dict[str, Any]],
) -> None:
    _, _, rules, dashboard = monitoring
    jsonschema.validate(rules, PROMETHEUS_RULE)
    jsonschema.validate(dashboard, CONFIG_MAP)
    alerts = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text("utf-8"))
    assert rules["spec"] == alerts
    [text] = dashboard["data"].values()
    file = (OBSERVABILITY / "grafana-dashboard.json").read_text("utf-8")
    assert json.loads(text) == json.loads(file)
    # Beyond it `kubectl apply` has no room for its note of what was applied.
    assert len(text) < 200_000
