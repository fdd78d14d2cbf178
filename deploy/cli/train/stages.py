"""The target of `draftline train KIND` over pipeline stages, which `serve` would start alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ....cluster.config import EngineConfig
from ....cluster.engine.assembly import plan_model
from ....cluster.pipeline.hidden_states import HiddenStateReader
from ....training.heads.objectives import NetworkConfig
from ....training.heads.target import state_layers
from ...engine.placement import Placement, ensure_ray, stages_have_gpu
from ...ray_serve.runtime import quiet_libraries
from ..flags import FlagGroup
from ..progress import progress
from .job import HeadJob

STAGE_SETTINGS = (
    "pipeline_parallel_size", "backend", "stage_transport", "cpus_per_stage", "gpus_per_stage",
    "device", "dtype", "quantization", "attention", "compile", "kv_cache_tokens",
)  # fmt: skip
STAGES = FlagGroup(
    title="Target over stages (default: whole, in float32, where the drafter is trained)",
    kind=EngineConfig,
    only=(*STAGE_SETTINGS, "max_num_batched_tokens", "step_timeout_s"),
    names={"pipeline_parallel_size": ("--pipeline-parallel-size", "-pp")},
)
# Nothing else waits for a step, and its prompts have no graphs.
DEFAULTS = {"step_timeout_s": 600.0, "enforce_eager": True, "standby_stages": 0}
STEP_ROWS, MIN_CACHE_TOKENS = 512, 64


def with_stages(job: HeadJob, settings: Mapping[str, Any]) -> HeadJob:
    """The job with its target over stages of these settings, if there are any.

    Raises `ConfigError`.
    """
    if not settings:
        return job
    stages = {**DEFAULTS, "model": job.model, **settings}
    rows = stages.setdefault("max_num_batched_tokens", STEP_ROWS)
    # Enough for a step, as the head may be trained on a GPU of a stage: of the step's texts the
    # first and the last may be cut, and short ones leave much of a block free.
    stages.setdefault("kv_cache_tokens", 2 * (rows + job.window) + MIN_CACHE_TOKENS)
    return replace(job, stages=EngineConfig(**stages))


@contextmanager
def target_stages(stages: EngineConfig, network: NetworkConfig) -> Iterator[HiddenStateReader]:
    """The running stages of a target, which return what a head or a student learns from.

    Raises `ConfigError`, `CheckpointError`, and `StageLost` if they do not start.
    """
    quiet_libraries()
    ensure_ray(stages)
    plan = plan_model(stages, has_gpu=stages_have_gpu(stages))
    layers = state_layers(network.layers_of(plan.info.num_layers), plan.info.num_layers)
    specs = []
    for spec in plan.specs:
        assert spec.options is not None
        specs.append(replace(spec, options=replace(spec.options, feature_layers=layers)))
    placement = Placement(stages, progress=progress)
    reader = HiddenStateReader(
        lambda: placement.make_pipeline(specs),
        layers,
        plan.info.hidden_size,
        block_size=stages.block_size,
        max_rows=stages.max_num_batched_tokens,
        max_texts=stages.max_num_seqs,
        step_timeout_s=stages.step_timeout_s,
    )
    try:
        with reader:
            yield reader
    finally:
        placement.close()
