"""Puts an engine together from its settings: sizes, scheduler, pipeline, drafters, core."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..core.acceptance_rules import COUPLED, LOSSY
from ..core.block_pool import BlockPool
from ..core.budget import NodeBudget
from ..core.engine import EngineCore
from ..core.errors import ConfigError
from ..core.merge import load_kernels
from ..core.scheduler import Scheduler, SchedulerLimits
from ..core.step_trace import StepTrace
from ..core.types import MAX_PROBE_ROWS
from ..models.grammar import GrammarFactory
from ..models.model_info import ModelInfo, read_model_info
from ..models.partition import partition_layers
from ..models.tokenizer import load_tokenizer
from .config import EngineConfig
from .drafter_channel import DrafterLimits
from .drafter_hub import DrafterHub
from .drafter_link import DrafterLink
from .local_pipeline import LocalPipeline
from .pipeline import Pipeline, StageSpec
from .request_factory import RequestFactory
from .stage_spans import wall_clock
from .step_calibration import measure_step_cost
from .trace_file import TraceFile

# Drafters that are started beside the engine load libraries and models; unreachable ones fail fast.
DRAFTERS_START_S = 60.0

logger = logging.getLogger(__name__)

MakePipeline = Callable[[Sequence[StageSpec]], Pipeline]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What follows from the settings and the checkpoint before anything is loaded."""

    config: EngineConfig
    info: ModelInfo
    max_model_len: int
    specs: tuple[StageSpec, ...]

    @property
    def num_blocks(self) -> int:
        """KV blocks of every stage."""
        return self.config.kv_cache_tokens // self.config.block_size

    def request_factory(self) -> RequestFactory:
        """Validates this model's requests."""
        tokenizer = load_tokenizer(self.info.path)
        grammars = GrammarFactory(tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        return RequestFactory(tokenizer, self.info, self.max_model_len, grammars)


def plan_model(config: EngineConfig) -> ModelPlan:
    """Read the checkpoint's sizes and cut its layers. Raises `ConfigError`, `CheckpointError`."""
    info = read_model_info(config.model)
    max_model_len = config.max_model_len or info.max_context_len
    if max_model_len > info.max_context_len:
        raise ConfigError(
            "max_model_len", f"is {max_model_len}; the model's context is {info.max_context_len}"
        )
    device = _device(config)
    specs = tuple(
        StageSpec(
            model_path=str(info.path),
            span=span,
            num_blocks=config.kv_cache_tokens // config.block_size,
            block_size=config.block_size,
            hidden_size=info.hidden_size,
            dtype=_dtype(config, device),
            device=device,
            num_cpus=config.cpus_per_stage,
            num_gpus=1.0 if device == "cuda" else 0.0,
            compile_cache=config.compile_cache if config.compile == "on" else None,
        )
        for span in partition_layers(info.path, config.pipeline_parallel_size)
    )
    return ModelPlan(config, info, max_model_len, specs)


def local_pipeline(specs: Sequence[StageSpec]) -> Pipeline:
    """All stages in this process. Raises `CheckpointError`."""
    return LocalPipeline([spec.build() for spec in specs])


class Assembly:
    """The parts of one engine; made, started, recovered and stopped on the engine's loop."""

    def __init__(
        self, plan: ModelPlan, make_pipeline: MakePipeline, links: Sequence[DrafterLink]
    ) -> None:
        config = plan.config
        self._plan = plan
        self._trace_file = _trace_file(config)
        self._make_pipeline = make_pipeline
        self.hub = DrafterHub(
            links,
            DrafterLimits(vocab_size=plan.info.vocab_size, max_probe_rows=MAX_PROBE_ROWS),
            budget_s=config.draft_deadline_ms / 1000,
        )
        self.pipeline = make_pipeline(plan.specs)
        self.scheduler = Scheduler(
            BlockPool(plan.num_blocks, config.block_size),
            SchedulerLimits(
                max_running=config.max_num_seqs,
                max_waiting=config.max_queued_requests,
                max_step_rows=config.max_num_batched_tokens,
                max_tree_nodes=config.tree_nodes,
                max_probe_rows=MAX_PROBE_ROWS,
                share_prefixes=config.enable_prefix_caching,
                num_groups=self.pipeline.num_stages if self.pipeline.max_in_flight > 1 else 1,
            ),
        )
        # Nodes that were drawn may not be cut by their value.
        is_adaptive = config.node_budget == "adaptive" and config.acceptance == COUPLED
        self.budget = NodeBudget(config.tree_nodes, is_adaptive=is_adaptive)
        trace = StepTrace(wall_clock, self._trace_file.write) if self._trace_file else None
        self.core = EngineCore(
            self.pipeline,
            self.hub,
            self.scheduler,
            self.budget,
            time.monotonic,
            acceptance=config.acceptance,
            trace=trace,
        )
        if config.acceptance in LOSSY:
            logger.warning(
                "acceptance=%s is lossy: answers do not have the target's law", config.acceptance
            )

    async def start(self) -> None:
        """Start the pipeline, measure it, then connect the drafters."""
        await self.pipeline.start()
        await asyncio.to_thread(load_kernels)
        config = self._plan.config
        self.budget.cost = await measure_step_cost(
            self.pipeline,
            min(config.max_num_batched_tokens, config.kv_cache_tokens, self._plan.max_model_len),
            config.block_size,
            time.monotonic,
        )
        await self.hub.start(DRAFTERS_START_S)

    async def recover(self) -> None:
        """Replace a lost pipeline."""
        await self.pipeline.close()
        self.pipeline = self._make_pipeline(self._plan.specs)
        await self.pipeline.start()
        self.core.use_pipeline(self.pipeline)

    async def stop(self) -> None:
        """Stop drafters and stages."""
        await self.hub.stop()
        await self.pipeline.close()
        if self._trace_file is not None:
            self._trace_file.close()


def _trace_file(config: EngineConfig) -> TraceFile | None:
    if config.trace_steps is None:
        return None
    return TraceFile(config.trace_steps, config.trace_steps_max_mb * 1_000_000)


def _device(config: EngineConfig) -> str:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device", "is cuda, but torch sees no GPU; use auto or cpu")
    return "cuda" if has_gpu and config.device != "cpu" else "cpu"


def _dtype(config: EngineConfig, device: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else "bfloat16"
