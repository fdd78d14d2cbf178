"""Settings of a server of several models."""

from __future__ import annotations

from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.settings.settings import build_serve_args
from draftline.deploy.settings.several_models import build_app_args

SHARED = {
    "backend": "ray",
    "cpus_per_stage": 0.5,
    "drafters": [{"kind": "suffix"}],
    "server": {"api_keys": ["secret"], "reasoning_parser": "qwen3"},
    "deployment": {"ingress_cpus": 0.25, "num_ingress_replicas": 2, "coordinator_cpus": 0.5},
}


def models(*entries: Any, **shared: Any) -> dict[str, Any]:
    return SHARED | shared | {"models": list(entries)}


def test_what_stands_beside_the_models_is_every_model_s() -> None:
    app = build_app_args(
        models(
            {"model": "demo", "served_model_name": "large", "pipeline_parallel_size": 2},
            {
                "model": "demo-drafter",
                "drafters": [],
                "server": {"reasoning_parser": "none"},
                "deployment": {"autoscaling_config": {"max_replicas": 3}},
            },
        )
    )
    large, small = app.models
    assert (large.model_name, small.model_name) == ("large", "demo-drafter")
    assert [app.engine_name(model) for model in app.models] == [
        "engine-large",
        "engine-demo-drafter",
    ]
    assert {model.engine.cpus_per_stage for model in app.models} == {0.5}
    assert [len(model.engine.drafters) for model in app.models] == [1, 0]
    assert [model.engine.pipeline_parallel_size for model in app.models] == [2, 1]
    assert small.deployment.autoscaling_config == {"max_replicas": 3}
    assert large.deployment.autoscaling_config is None
    assert {model.deployment.coordinator_cpus for model in app.models} == {0.5}
    assert (app.deployment.num_ingress_replicas, app.deployment.ingress_cpus) == (2, 0.25)
    # Parsers are a model's, all else is the server's.
    assert [model.server.reasoning_parser for model in app.models] == ["qwen3", "none"]
    assert {model.server.api_key_sha256 for model in app.models} == {app.server.api_key_sha256}
    assert app.server.api_key_sha256


def test_one_model_is_as_ever() -> None:
    app = build_app_args(SHARED | {"model": "demo"})
    assert [model.model_name for model in app.models] == ["demo"]
    assert app.engine_name(app.models[0]) == "engine"
    assert app.server is app.models[0].server


def test_names_of_deployments_have_no_strange_characters() -> None:
    app = build_app_args(models({"model": "org/a#b", "served_model_name": None}, {"model": "c"}))
    assert app.engine_name(app.models[0]) == "engine-org-a-b"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (models(), "models"),
        (SHARED | {"models": {"demo": {}}}, "models"),
        (models("demo"), r"models\[0\]\.model"),
        (models({"served_model_name": "a"}), r"models\[0\]\.model"),
        (models({"model": "a"}, model="b"), "model"),
        (models({"model": "a"}, {"model": "a"}), r"models\[1\]\.served_model_name"),
        (models({"model": "a/b"}, {"model": "a-b"}), r"models\[1\]\.served_model_name"),
        (models({"model": "a"}, {"model": "b", "backnd": 1}), r"models\[1\]\.backnd"),
        (models({"model": "a", "server": {"port": 1}}), r"models\[0\]\.server\.port"),
        (
            models({"model": "a", "server": {"reasoning_parser": "x"}}),
            r"models\[0\]\.server\.reasoning_parser",
        ),
        (
            models({"model": "a", "deployment": {"ingress_cpus": 1}}),
            r"models\[0\]\.deployment\.ingress_cpus",
        ),
        (models({"model": "a", "deployment": 3}), r"models\[0\]\.deployment"),
        (models({"model": "a", "pools": {}}), r"models\[0\]\.pools"),
        (
            models({"model": "a"}, {"model": "b"}, trace_steps="steps.jsonl"),
            r"models\[1\]\.trace_steps",
        ),
        (models({"model": "a"}, server={"prot": 1}), r"server\.prot"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}:"):
        build_app_args(settings)


def test_a_server_of_one_model_says_where_several_go() -> None:
    with pytest.raises(ConfigError, match=r"serve run deploy/models\.yaml"):
        build_serve_args(models({"model": "a"}))
