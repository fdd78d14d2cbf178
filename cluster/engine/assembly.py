"""Puts an engine together from its settings: sizes, scheduler, pipeline, drafters, core."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.engine import EngineCore
from ...core.errors import ConfigError
from ...core.kv_cache import BlockPool
from ...core.progress import Progress, unseen
from ...core.proposals import MAX_PROBE_ROWS, MAX_PROBE_ROWS_OF_ALL
from ...core.scheduler import PrefillShare, Scheduler, SchedulerLimits
from ...core.speculation.multi_step import MultiStep
from ...core.speculation.policy import SpeculationPolicy, load_policy
from ...core.speculation.step_cost import StepCost
from ...core.step.builder import load_kernels
from ...core.step.trace import StepTrace
from ...core.steps import prompt_step
from ...core.verify.rules import COUPLED, LOSSY
from ...models.device import choose_device, choose_dtype
from ...models.load.model_info import ModelInfo, read_model_info
from ...models.load.partition import partition_layers
from ...models.stage.options import GraphOptions, StageOptions
from ...models.text.grammar import GrammarFactory
from ...models.text.tokenizer import TokenBytes, load_tokenizer
from ..config import EngineConfig
from ..drafting.head_watch import head_origins
from ..drafting.hub import AnyDrafter, DrafterHub
from ..drafting.options import feature_layers_of, last_stage_heads
from ..drafting.replies import DrafterLimits
from ..pipeline.local_pipeline import LocalPipeline
from ..transport.stage_spec import Pipeline, StageSpec
from .engine_thread import REAL_TIME, EngineTime
from .request_factory import RequestFactory
from .trace_file import MAX_TRACE_BYTES, TraceFile

# Drafters that are started beside the engine load libraries and models; unreachable ones fail fast.
DRAFTERS_START_S = 60.0
CPU_CACHE_TOKENS = 16384
# Largest share of a step's time for prompts of more than two steps while answers are generated.
PREFILL_SHARE = 0.35
# How long CUDA graphs are captured at a start; steps of a missing size use the next larger one.
GRAPH_CAPTURE_S = 60.0

logger = logging.getLogger(__name__)

MakePipeline = Callable[[Sequence[StageSpec]], Pipeline]
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)
# The first pass of a shape may still allocate or compile.
ROUNDS = 3
# Seconds that are measured for at least.
MEASURED_S = 0.15


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What follows from the settings and the checkpoint before anything is loaded."""

    config: EngineConfig
    info: ModelInfo
    max_model_len: int
    specs: tuple[StageSpec, ...]

    def request_factory(self) -> RequestFactory:
        """Validates this model's requests."""
        tokenizer = load_tokenizer(self.info.path)
        grammars = GrammarFactory(tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        block_size = self.config.block_size if self.config.enable_prefix_caching else None
        return RequestFactory(
            tokenizer, TokenBytes(tokenizer), self.info, self.max_model_len, grammars, block_size
        )


def plan_model(config: EngineConfig, *, has_gpu: bool | None = None) -> ModelPlan:
    """Read the checkpoint's sizes and cut its layers. Raises `ConfigError`, `CheckpointError`.

    has_gpu  whether there is one where the stages will run; by default, whether torch sees one here
    """
    info = read_model_info(config.model)
    max_model_len = config.max_model_len or info.max_context_len
    if max_model_len > info.max_context_len:
        raise ConfigError(
            "max_model_len", f"is {max_model_len}; the model's context is {info.max_context_len}"
        )
    device = choose_device(config.device, has_gpu=has_gpu)
    num_stages = config.pipeline_parallel_size
    spans = partition_layers(info.path, num_stages)
    layers = feature_layers_of(config, info)
    heads = last_stage_heads(config, info, layers)
    specs = tuple(
        StageSpec(
            model_path=str(info.path),
            span=span,
            num_blocks=_num_blocks(config, device),
            block_size=config.block_size,
            hidden_size=info.hidden_size,
            dtype=choose_dtype(config.dtype, device, info.dtype),
            device=device,
            num_cpus=config.cpus_per_stage,
            num_gpus=config.gpus_per_stage if device == "cuda" else 0.0,
            options=replace(
                _stage_options(config, max_model_len, (index + 1) / num_stages),
                feature_layers=layers,
            ),
            heads=heads if span.is_last else (),
        )
        for index, span in enumerate(spans)
    )
    return ModelPlan(config, info, max_model_len, specs)


def local_pipeline(specs: Sequence[StageSpec], progress: Progress = unseen) -> Pipeline:
    """All stages in this process. Raises `CheckpointError`."""
    return LocalPipeline([spec.build(progress) for spec in specs])


class Assembly:
    """The parts of one engine; made, started, recovered and stopped on the engine's loop."""

    def __init__(
        self,
        plan: ModelPlan,
        make_pipeline: MakePipeline,
        drafters: Sequence[AnyDrafter],
        engine_time: EngineTime = REAL_TIME,
    ) -> None:
        config = plan.config
        self._plan = plan
        self._clock = engine_time.clock
        self._trace_file = _trace_file(config)
        trace = None
        if self._trace_file is not None:
            trace = StepTrace(engine_time.wall_clock, self._trace_file)
        self.hub = DrafterHub(
            drafters,
            DrafterLimits(vocab_size=plan.info.vocab_size, max_probe_rows=MAX_PROBE_ROWS),
            budget_s=config.draft_deadline_ms / 1000,
            clock=self._clock,
            origins=head_origins(config),
            trace=trace,
        )
        self.pipeline = make_pipeline(plan.specs)
        # Stages that size their own caches report the size once they have started.
        self._pool = BlockPool(plan.specs[0].num_blocks or 1, config.block_size)
        # Nodes that were drawn may not be cut by their value.
        is_adaptive = config.node_budget == "adaptive" and config.acceptance == COUPLED
        multi_step = MultiStep(config.multi_step_ms / 1000, lambda: self.pipeline.decodes_several)
        self.policy = SpeculationPolicy(
            is_adaptive=is_adaptive,
            is_ordered=config.node_budget == "ordered",
            multi_step=multi_step,
        )
        self.scheduler = Scheduler(
            self._pool,
            _scheduler_limits(config, plan.info, self.pipeline.max_in_flight),
            PrefillShare(PREFILL_SHARE, self._step_s, self.pipeline.num_stages),
        )
        self.core = EngineCore(
            self.pipeline,
            self.hub,
            self.scheduler,
            self.policy,
            self._clock,
            acceptance=config.acceptance,
            trace=trace,
            step_timeout_s=config.step_timeout_s,
            pipelined_trees=config.pipelined_trees,
        )
        info = plan.info
        if info.composite_type is not None:
            logger.warning(
                "event=text_part_served model=%s model_type=%s serves=%s: no images, no audio",
                info.path.name, info.composite_type, info.model_type,
            )  # fmt: skip
        if config.acceptance in LOSSY:
            logger.warning(
                "acceptance=%s is lossy: answers do not have the target's distribution",
                config.acceptance,
            )

    async def start(self) -> None:
        """Start the pipeline, measure it, then connect the drafters."""
        await self.pipeline.start()
        if self._plan.specs[0].num_blocks is None:
            self._pool.resize(self.pipeline.num_blocks)
        weights = " ".join(f"{kept.weights / 2**20:.1f}" for kept in self.pipeline.memory)
        logger.info("event=stages_loaded weight_mib=%r", weights)
        await asyncio.to_thread(load_kernels)
        await asyncio.to_thread(load_policy)
        config = self._plan.config
        num_slots = self._pool.num_blocks * config.block_size
        self.policy.cost = await measure_step_cost(
            self.pipeline,
            min(config.max_num_batched_tokens, num_slots, self._plan.max_model_len),
            config.block_size,
            self._clock,
        )
        await self.hub.start(DRAFTERS_START_S)

    def _step_s(self, num_rows: int) -> float:
        return float(self.policy.cost.seconds(1, num_rows))

    async def recover(self) -> tuple[int, ...]:
        """Replace what of the pipeline is lost; these stages. Drafters stay connected."""
        replaced = await self.pipeline.restart()
        self.core.use_pipeline(self.pipeline)
        return replaced

    async def stop(self) -> None:
        """Stop drafters and stages."""
        await self.hub.stop()
        await self.pipeline.close()
        if self._trace_file is not None:
            self._trace_file.close()


def _scheduler_limits(config: EngineConfig, info: ModelInfo, num_groups: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=config.max_num_seqs,
        max_waiting=config.max_queued_requests,
        max_step_rows=config.max_num_batched_tokens,
        max_tree_nodes=config.tree_nodes,
        max_probe_rows=MAX_PROBE_ROWS_OF_ALL,
        share_prefixes=config.enable_prefix_caching,
        num_groups=num_groups,
        keeps_states=info.keeps_states,
        num_snapshots=_num_snapshots(config),
    )


def _num_snapshots(config: EngineConfig) -> int:
    """Of states that layers keep: as many as requests that run."""
    return config.max_num_seqs if config.enable_prefix_caching else 0


def num_states(config: EngineConfig) -> tuple[int, int]:
    """Where layers keep states: slots of these, and rows that what they leave is kept of."""
    rows = config.max_num_batched_tokens + _num_kept_rows(config)
    return config.max_num_seqs + _num_snapshots(config), rows


def _num_kept_rows(config: EngineConfig) -> int:
    """The last trees of all requests."""
    return config.max_num_seqs * (config.tree_nodes + 1)


def _trace_file(config: EngineConfig) -> TraceFile | None:
    if config.trace_steps is None:
        return None
    engine = f"draftline {Path(config.model).name}"
    return TraceFile(config.trace_steps, MAX_TRACE_BYTES, engine)


def _num_blocks(config: EngineConfig, device: str) -> int | None:
    """KV blocks of every stage; None: as many as its GPU has room for."""
    if config.kv_cache_tokens is None and device != "cpu":
        return None
    return (config.kv_cache_tokens or CPU_CACHE_TOKENS) // config.block_size


def _stage_options(config: EngineConfig, max_model_len: int, share: float) -> StageOptions:
    """How a stage computes; `share` of what stages of one process may use is for it and those
    before it."""
    max_rows = config.max_num_batched_tokens
    graphs = GraphOptions(
        max_rows=max_rows,
        max_requests=config.max_num_seqs,
        # Trees may reach beyond the last token that will be kept, those in slices with all that are
        # in flight.
        max_positions=max_model_len + config.tree_nodes * _most_flights(config),
        seconds=GRAPH_CAPTURE_S,
    )
    in_one_process = config.backend == "local"
    return StageOptions(
        attention=config.attention,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        gpu_memory_utilization=config.gpu_memory_utilization * (share if in_one_process else 1),
        max_rows=max_rows,
        max_requests=config.max_num_seqs,
        num_snapshots=_num_snapshots(config),
        num_kept_rows=_num_kept_rows(config),
        compile=config.compile,
        batch_invariant=config.batch_invariant,
        graphs=None if config.enforce_eager else graphs,
    )


def _most_flights(config: EngineConfig) -> int:
    """Steps of one request that may be on their way."""
    stages = config.pipeline_parallel_size
    return stages + 1 if stages > 1 and config.pipelined_trees != "off" else 1


async def measure_step_cost(
    pipeline: Pipeline, max_rows: int, block_size: int, clock: Callable[[], float]
) -> StepCost:
    """The cost curve of an idle pipeline; its KV slots are free still. Raises `StageLost`."""
    rows = [count for count in ROWS if count <= max_rows]
    seconds = [math.inf] * len(rows)
    num_rounds, began_at = 0, clock()
    # Round by round, so that a pause of the machine does not make some numbers of rows dear.
    while num_rounds < ROUNDS or clock() - began_at < MEASURED_S:
        for index, count in enumerate(rows):
            start = clock()
            await pipeline.submit(prompt_step(count, block_size))
            seconds[index] = min(seconds[index], clock() - start)
        num_rounds += 1
    return StepCost(rows, seconds)
