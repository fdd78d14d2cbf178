"""Settings from files and flags: precedence, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import draftline
import pytest
import torch
import yaml
from draftline.cluster.config import EngineConfig
from draftline.cluster.engine.assembly import plan_model
from draftline.cluster.pipeline.bundle import ANY, replica_bundles
from draftline.core.errors import ConfigError
from draftline.deploy.cli.serve.options import read_speculative_config
from draftline.deploy.ray_serve.deployment_plan import (
    engine_options,
    ingress_options,
    placement_bundles,
)
from draftline.deploy.ray_serve.runtime import PROXY_READY_CHECK, RAY_ENVIRONMENT
from draftline.deploy.settings.settings import (
    build_serve_args,
    merge_settings,
    read_settings,
)
from draftline.deploy.settings.several_models import AppArgs, build_app_args
from draftline.deploy.settings.tenants import key_digest
from draftline.models.stage.gpu_path import GraphOptions
from draftline.models.stage.options import StageOptions
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

DEPLOY = Path(draftline.__file__).parent / "deploy"


def test_a_model_is_named_by_the_last_part_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "Small-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {
        # A folder need not be where the API runs.
        "/elsewhere/Small-1B": "Small-1B", "/elsewhere/Small-1B/": "Small-1B",
        str(tmp_path / "models" / "Small-1B"): "Small-1B", "Small-1B": "Small-1B",
        "./Small-1B": "Small-1B", "../models/Small-1B/": "Small-1B", ".": "models",
        "..": tmp_path.name, "~/models/Small-1B": "Small-1B", "~": tmp_path.name,
        # Names of a hub and of the bundled models.
        "org/Small-1B": "org/Small-1B", "demo": "demo",
    }  # fmt: skip
    assert {model: EngineConfig(model=model).name for model in names} == names
    monkeypatch.chdir(tmp_path)
    # A folder that a hub's name would mean comes first, as where it is loaded.
    assert EngineConfig(model="models/Small-1B").name == "Small-1B"
    given = EngineConfig(model="/elsewhere/Small-1B", served_model_name="own")
    assert given.name == "own"


def test_defaults() -> None:
    args = build_serve_args({})
    assert (args.server.host, args.server.port) == ("127.0.0.1", 8000)
    assert args.model_name == args.engine.model == "demo"
    assert args.server.request_timeout_s == 600
    assert not args.server.has_keys
    assert (
        build_serve_args({"server": {"request_timeout_s": None}}).server.request_timeout_s is None
    )


@pytest.mark.parametrize(("written", "read"), [("on", "on"), ("off", "off"), ("'on'", "on")])
def test_switches_are_read_from_yaml_which_takes_on_for_a_boolean(written: str, read: str) -> None:
    args = build_serve_args(yaml.safe_load(f"batch_invariant: {written}"))
    assert args.engine.batch_invariant == read


@pytest.mark.parametrize("written", ["on", "'on'"])
def test_compile_on_is_refused_by_what_to_use(written: str) -> None:
    with pytest.raises(ConfigError, match="compile: 'on' was removed; use auto"):
        build_serve_args(yaml.safe_load(f"compile: {written}"))


def test_compile_reaches_the_stages() -> None:
    for switch in ("auto", "off"):
        plan = plan_model(EngineConfig(model="demo", compile=switch))
        options = [spec.options for spec in plan.specs]
        assert [each.compile for each in options if each] == [switch]
    assert EngineConfig().compile == "auto"


def test_how_stages_compute_reaches_them() -> None:
    settings = {
        "attention": "sdpa", "kv_cache_dtype": "fp8", "quantization": "int8", "max_num_seqs": 3,
        "batch_invariant": "off",
        "max_model_len": 40, "max_num_batched_tokens": 24,
        "tree_nodes": 4, "pipeline_parallel_size": 2,
    }  # fmt: skip
    # Trees of three flights.
    graphs = GraphOptions(max_rows=24, max_requests=3, max_positions=52, seconds=60)
    options = StageOptions(
        attention="sdpa", kv_cache_dtype="fp8", quantization="int8", gpu_memory_utilization=0.45,
        max_rows=24, max_requests=3, graphs=graphs, compile="auto", batch_invariant="off",
        num_snapshots=3, num_kept_rows=15,
    )  # fmt: skip
    # Stages of one process share what a GPU has, the first taking its part first.
    first, last = plan_model(EngineConfig(model="demo", **settings)).specs
    assert first.options == options
    assert last.options == replace(options, gpu_memory_utilization=0.9)
    remote = plan_model(EngineConfig(model="demo", backend="ray", enforce_eager=True, **settings))
    assert {spec.options for spec in remote.specs} == {
        replace(options, gpu_memory_utilization=0.9, graphs=None)
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are filled")
def test_a_cpu_has_a_small_cache_unless_told() -> None:
    for tokens, num_blocks in ((None, 1024), (640, 40)):
        (spec,) = plan_model(EngineConfig(model="demo", kv_cache_tokens=tokens)).specs
        assert spec.num_blocks == num_blocks


def test_sections() -> None:
    args = build_serve_args(
        {
            "model": "m",
            "served_model_name": "name",
            "server": {"port": 0, "api_keys": ["k"]},
            "deployment": {"num_replicas": 2},
        }
    )
    assert args.model_name == "name"
    assert args.server.api_key_sha256 == (key_digest("k"),)
    assert args.deployment.num_replicas == 2


@pytest.mark.parametrize(
    ("settings", "field", "hint"),
    [
        ({"modl": "m"}, "modl", "did you mean 'model'"),
        ({"serve": {}}, "serve", "did you mean 'server'"),
        ({"server": {"prot": 1}}, "server.prot", "did you mean 'port'"),
        ({"server": {"port": 70000}}, "server.port", "65535"),
        ({"server": {"port": "x"}}, "server.port", "integer"),
        ({"compile": "yes"}, "compile", "'auto' or 'off'"),
        ({"stage_transport": "compiled_graph"}, "stage_transport", "leave stage_transport out"),
        ({"gpus_per_stage": 0.5}, "kv_cache_tokens", "must be given where gpus_per_stage"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization", "less than or equal to 1"),
        ({"server": {"api_keys": [""]}}, "server.api_keys", "empty"),
        ({"server": {"tenants": {"a": {}}}}, "server.tenants", "list of tenants"),
        ({"server": {"tenants": ["a"]}}, "server.tenants[0]", "mapping"),
        ({"server": {"request_timeout_s": 0}}, "server.request_timeout_s", "greater"),
        ({"server": {"max_connections": 0}}, "server.max_connections", "greater"),
        ({"server": {"stream_interval_ms": 0}}, "server.stream_interval_ms", "greater"),
        ({"server": 3}, "server", "mapping"),
        ({"deployment": {"num_replica": 1}}, "deployment.num_replica", "num_replicas"),
        (
            {"deployment": {"placement_group_strategy": "FAR"}},
            "deployment.placement_group_strategy",
            "STRICT_SPREAD",
        ),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size", "8"),
        ({"drafters": [{"knd": "spectra"}]}, "drafters[0].kind", "required"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_serve_args(settings)
    assert caught.value.field == field
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [("a: [", "line 1"), ("- 1", "mapping"), ("\t: 1", "line 1"), ("a: b: c", "line 1")],
)
def test_wrong_files(tmp_path: Path, text: str, hint: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=hint):
        read_settings(file)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_settings(tmp_path / "none.yaml")
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not a text file"):
        read_settings(file)
    file.write_text("")
    assert read_settings(file) == {}


def test_flags_win_over_the_file_and_none_changes_nothing() -> None:
    file = {"model": "m", "dtype": "float32", "server": {"port": 1, "host": "h"}}
    flags = {"model": None, "dtype": "bfloat16", "server": {"port": 2, "host": None}}
    assert merge_settings(file, flags) == {
        "model": "m",
        "dtype": "bfloat16",
        "server": {"port": 2, "host": "h"},
    }


def test_who_says_nothing_of_drafters_gets_the_default_ones() -> None:
    kinds = [one.kind for one in build_serve_args({"model": "m"}).engine.drafters]
    assert kinds == ["suffix", "prompt_lookup"]
    assert not build_serve_args({"model": "m", "drafters": []}).engine.drafters
    [named] = build_serve_args({"model": "m", "drafters": [{"kind": "spectra"}]}).engine.drafters
    assert named.kind == "spectra"
    assert not EngineConfig(model="m").drafters


@pytest.mark.parametrize("name", ["serve.yaml", "pool.yaml", "models.yaml", "70b.yaml"])
@pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported
def test_bundled_applications_wait_for_proxies_as_the_command_does(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    file = yaml.safe_load((DEPLOY / name).read_text())
    options = ServeDeploySchema.model_validate(file).controller_options
    assert options is not None
    assert options.runtime_env == {"env_vars": PROXY_READY_CHECK}
    assert PROXY_READY_CHECK.items() <= RAY_ENVIRONMENT.items()


def test_bundled_files_are_valid() -> None:
    served = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    (application,) = served["applications"]
    assert application["import_path"] == "draftline.deploy.ray_serve.serve_app:build_app"
    assert build_serve_args(application["args"]).engine.backend == "ray"
    several = yaml.safe_load((DEPLOY / "models.yaml").read_text())["applications"]
    models = build_app_args(several[0]["args"]).models
    assert [model.model_name for model in models] == ["demo", "demo-small"]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("[]", {"drafters": []}),
        ('[{"kind": "spectra"}]', {"drafters": [{"kind": "spectra"}]}),
        ('{"tree_nodes": 4}', {"tree_nodes": 4}),
        (
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
            {"drafters": [{"kind": "prompt_lookup", "num_tokens": 5, "max_ngram": 4}]},
        ),
        (
            '{"method": "draft_model", "model": "d"}',
            {"drafters": [{"kind": "model", "model": "d"}]},
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 24, '
            '"suffix_decoding_min_token_prob": 0.2}',
            {"drafters": [{"kind": "suffix", "max_match_len": 24, "min_token_prob": 0.2}]},
        ),
    ],
)
def test_speculative_config(text: str, settings: dict[str, Any]) -> None:
    assert read_speculative_config(text) == settings


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{", "not valid JSON"),
        ("3", "list of drafters"),
        ('{"method": "eagle"}', "'eagle' is not supported"),
        ('{"method": "ngram", "num_speculative_token": 5}', "num_speculative_tokens"),
        ('{"drafter": []}', "did you mean 'drafters'"),
    ],
)
def test_wrong_speculative_config(text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="speculative-config") as caught:
        read_speculative_config(text)
    assert hint in caught.value.message


def test_bundles_hold_every_part_of_a_replica() -> None:
    args = build_serve_args(
        {
            "backend": "ray",
            "device": "cpu",
            "pipeline_parallel_size": 3,
            "drafters": [
                {"kind": "spectra"},
                {"kind": "model", "transport": "grpc"},
                {"kind": "retrieval", "transport": "grpc", "address": "host:1"},
            ],
        }
    )
    bundles = placement_bundles(args.engine, args.deployment)
    assert bundles == [{"CPU": 1.0}] * (1 + 3 + 1)
    gpu = args.engine.model_copy(update={"device": "cuda"})
    assert placement_bundles(gpu, args.deployment)[1] == {"CPU": 1.0, "GPU": 1.0}
    local = args.engine.model_copy(update={"backend": "local"})
    assert placement_bundles(local, args.deployment) == [{"CPU": 1.0}]


def test_every_actor_has_a_bundle_of_its_own() -> None:
    group = PlacementGroup(PlacementGroupID.from_random(), [{"CPU": 1.0}] * 4)
    assert [place.index for place in replica_bundles(group, 2, 1)] == [1, 2, 3]
    assert [place.index for place in replica_bundles(group, 1, 1)] == [ANY, ANY]


def test_autoscaling_replaces_the_number_of_replicas() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3}
    fixed = engine_options(build_serve_args({"max_num_seqs": 4, "max_queued_requests": 6}))
    assert fixed["num_replicas"] == 1
    assert fixed["max_ongoing_requests"] == 10
    scaled = engine_options(build_serve_args({"deployment": {"autoscaling_config": scaling}}))
    assert scaled["autoscaling_config"] == scaling
    assert "num_replicas" not in scaled


def test_what_stops_has_the_time_of_its_requests() -> None:
    args = build_serve_args({"server": {"drain_timeout_s": 7.0, "request_timeout_s": 50.0}})
    assert engine_options(args)["graceful_shutdown_timeout_s"] == 7.0
    # A stream cannot leave the ingress that has it.
    assert ingress_options(AppArgs.of(args))["graceful_shutdown_timeout_s"] > 50.0
    deployment = {"graceful_shutdown_timeout_s": 3.0}
    args = build_serve_args({"server": {"request_timeout_s": None}, "deployment": deployment})
    assert engine_options(args)["graceful_shutdown_timeout_s"] == 3.0
    assert ingress_options(AppArgs.of(args))["graceful_shutdown_timeout_s"] > 600.0
