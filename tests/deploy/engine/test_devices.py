"""Where stages and drafters compute, as settings, torch and Ray have it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.cluster.engine.assembly import plan_model
from draftline.core.errors import ConfigError
from draftline.deploy.engine.placement import stages_have_gpu
from draftline.deploy.ray_serve.deployment_plan import (
    engine_options,
    placement_bundles,
    with_device,
)
from draftline.deploy.settings.settings import build_serve_args
from draftline.drafters.model import drafter as model_drafter
from draftline.models.device import choose_dtype
from draftline.models.load.model_info import ModelInfo, read_model_info
from draftline.models.stage.stage import Stage


def see(
    monkeypatch: pytest.MonkeyPatch, *, by_torch: bool, by_ray: bool, has_ray: bool = True
) -> None:
    """GPUs of this machine and of the cluster."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: by_torch)
    monkeypatch.setattr(ray, "is_initialized", lambda: has_ray)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0 * by_ray})


@pytest.mark.parametrize(
    ("backend", "wanted", "by_torch", "by_ray", "device"),
    [
        ("local", "auto", True, False, "cuda"),
        ("local", "auto", False, True, "cpu"),
        ("local", "cpu", True, True, "cpu"),
        # A coordinator on a node without GPUs, and the other way round.
        ("ray", "auto", False, True, "cuda"),
        ("ray", "auto", True, False, "cpu"),
        ("ray", "cuda", False, False, "cuda"),
        ("ray", "cpu", True, True, "cpu"),
    ],
)
def test_stages_go_where_the_gpus_are(
    backend: str, wanted: str, by_torch: bool, by_ray: bool, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    see(monkeypatch, by_torch=by_torch, by_ray=by_ray)
    config = EngineConfig(model="demo", backend=backend, device=wanted, gpus_per_stage=1.0)
    (spec,) = plan_model(config, has_gpu=stages_have_gpu(config)).specs
    assert (spec.device, spec.num_gpus) == (device, 1.0 if device == "cuda" else 0.0)


def test_before_ray_runs_this_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_torch, device in ((True, "cuda"), (False, "cpu")):
        see(monkeypatch, by_torch=by_torch, by_ray=False, has_ray=False)
        config = EngineConfig(model="demo", backend="ray", kv_cache_tokens=160)
        assert stages_have_gpu(config) is None
        assert plan_model(config).specs[0].device == device


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, by_torch=False, by_ray=False)
    with pytest.raises(ConfigError, match="device: is cuda, but torch sees no GPU"):
        plan_model(EngineConfig(model="demo", device="cuda"))


def test_arithmetic_is_the_checkpoints_own_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = read_model_info("demo").dtype
    assert own == "bfloat16"
    assert choose_dtype("auto", "cpu", own) == "float32"
    assert choose_dtype("auto", "cuda", "float16") == "float16"
    assert choose_dtype("auto", "cuda", "float32") == "bfloat16"
    assert choose_dtype("float32", "cuda", "float16") == "float32"
    see(monkeypatch, by_torch=True, by_ray=False)
    (spec,) = plan_model(EngineConfig(model="demo", kv_cache_tokens=160)).specs
    assert spec.dtype == "bfloat16"


def test_what_is_reserved_is_what_stages_ask_for() -> None:
    drafter = {"kind": "model", "transport": "grpc"}
    given = build_serve_args(
        {
            "backend": "ray",
            "pipeline_parallel_size": 2,
            "gpus_per_drafter": 0.5,
            "drafters": [drafter],
        }
    )
    for has_gpus, device, gpus in ((True, "cuda", {"GPU": 1.0}), (False, "cpu", {})):
        args = with_device(given, has_gpus=has_gpus)
        assert args.engine.device == device
        assert placement_bundles(args.engine, args.deployment) == [
            {"CPU": 1.0}, *[{"CPU": 1.0} | gpus] * 2, {"CPU": 1.0, "GPU": 0.5},
        ]  # fmt: skip
        assert engine_options(args)["ray_actor_options"] == {"num_cpus": 1.0}
    told = build_serve_args({"backend": "ray", "device": "cpu"})
    assert with_device(told, has_gpus=True) is told


def test_a_coordinator_that_computes_reserves_the_gpu() -> None:
    args = with_device(build_serve_args({"backend": "local"}), has_gpus=True)
    options = engine_options(args)
    assert options["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}]
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}


@pytest.mark.parametrize(
    ("engine", "wanted", "device"),
    [
        ({"backend": "local"}, {}, "auto"),
        ({"backend": "local", "device": "cpu"}, {}, "cpu"),
        ({"backend": "ray"}, {}, "cpu"),
        ({"backend": "ray", "gpus_per_drafter": 0.5}, {"transport": "grpc"}, "auto"),
        ({"backend": "ray", "gpus_per_drafter": 0.5}, {}, "cpu"),
        ({"backend": "ray"}, {"device": "cuda"}, "cuda"),
    ],
)
def test_drafters_keep_off_gpus_that_are_not_theirs(
    engine: dict[str, object], wanted: dict[str, object], device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[str] = []

    def load(model: Path, name: str, options: SimpleNamespace, target: ModelInfo) -> Stage:
        asked.append(options.device)
        raise ConfigError("model", "enough is known")

    monkeypatch.setattr(model_drafter, "load_model_drafter", load)
    config = DrafterConfig(kind="model", model="demo-drafter", **wanted)
    with pytest.raises(ConfigError, match="enough"):
        build_drafter(config, EngineConfig(model="demo", **engine))
    assert asked == [device]
