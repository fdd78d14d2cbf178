"""What a pipeline of stages is, wherever they run: how a stage is built, runs a step, and fails."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from ...core.arrays import Span
from ...core.errors import CapacityError, DeviceLost, StageError, StageLost, place_of
from ...core.interfaces import StageMemory
from ...core.progress import Progress, unseen
from ...core.steps import StepInput, StepOutput

if TYPE_CHECKING:
    import torch

    from ...drafters.heads.last_stage import LastStageHeadSpec
    from ...models.load.partition import LayerSpan
    from ...models.stage.options import StageOptions
    from ...models.stage.stage import PendingOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What becomes of a step at a stage.
StageResult = StepOutput | StageError | StageLost
# The clock of all stages and of the engine's trace: equal for all processes of one host, and on
# several hosts as equal as their clocks are kept.
wall_clock = time.time


# One span a stage that worked on the step so far.
Spans = tuple[Span, ...]
# cudaErrorMemoryAllocation (hipErrorOutOfMemory is the same): the one code that leaves a device
# well.
OUT_OF_MEMORY = 2
# Exit status of a process whose device is lost; nothing else ends one with it.
DEVICE_LOST_STATUS = 76


class StageRunner(Protocol):
    """A contiguous span of target layers with its own KV cache (`models/stage/stage.py`)."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache."""
        ...

    @property
    def memory(self) -> StageMemory:
        """Bytes of its weights, KV cache and states."""
        ...

    @property
    def decodes_several(self) -> bool:
        """Whether it takes steps of several tokens a request (`StepInput.multi_step`)."""
        ...

    def reset(self) -> None:
        """Forget all steps: the KV cache is empty again."""
        ...

    def launch(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | PendingOutput:
        """Begin one step: hidden states [rows, hidden size], or the answer on the last stage.

        `hidden` is the previous stage's result, None on the first stage. A device that computes
        by itself may still do so afterwards, until the hidden states are read or the answer is
        called; more steps may be launched meanwhile.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What a worker needs to build its stage; picklable.

    num_blocks   KV blocks of the stage's cache, each of `block_size` slots; None: what fits
    hidden_size  columns of the model's hidden states
    options      how it computes; None: by default
    heads        that draft there, of the last stage
    num_cpus, num_gpus  Ray resources that the stage's actor reserves
    """

    model_path: str
    span: LayerSpan
    num_blocks: int | None
    block_size: int
    hidden_size: int
    dtype: str = "float32"
    device: str = "cpu"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    options: StageOptions | None = None
    heads: tuple[LastStageHeadSpec, ...] = ()

    @property
    def input_size(self) -> int:
        """Columns of the hidden states that it takes from the stage before."""
        return self._carried_size(self.span.first)

    @property
    def output_size(self) -> int:
        """Columns of the hidden states that it hands on."""
        return self._carried_size(self.span.last)

    def _carried_size(self, before: int) -> int:
        options = self.options
        if options is None or not options.feature_layers:
            return self.hidden_size
        # As in `build`.
        from ...models.stage.options import carried_sizes  # noqa: PLC0415

        layers = options.feature_layers
        return sum(carried_sizes(layers, before, self.span.num_layers, self.hidden_size))

    @property
    def computes_apart(self) -> bool:
        """Whether its device computes by itself, while the host goes on."""
        return self.device != "cpu"

    def build(self, progress: Progress = unseen) -> StageRunner:
        """Load the stage with its heads; `progress` shows how far its weights are.

        Raises `CheckpointError`; `ConfigError` where it cannot be compiled.
        """
        # Workers build their stage; the coordinator that sends specs never loads the model code.
        from ...models.stage.load_stage import load_stage  # noqa: PLC0415

        make_heads = None
        if self.heads:
            from ...drafters.heads.last_stage import load_last_stage_heads  # noqa: PLC0415

            make_heads = partial(load_last_stage_heads, self.heads)
        return load_stage(
            self.model_path,
            self.span,
            self.num_blocks,
            self.block_size,
            dtype=self.dtype,
            device=self.device,
            options=self.options,
            make_heads=make_heads,
            progress=progress,
        )


class Pipeline(Protocol):
    """Runs steps through all stages in the order of submission.

    One event loop uses a pipeline. After a `StageLost` nothing but `close` is of use.
    """

    @property
    def num_stages(self) -> int:
        """How many stages a step passes."""
        ...

    @property
    def max_in_flight(self) -> int:
        """How many steps may be submitted and not yet answered."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks of the stage that has fewest; known once the pipeline is started."""
        ...

    @property
    def memory(self) -> Sequence[StageMemory]:
        """What each stage keeps; known once the pipeline is started."""
        ...

    @property
    def decodes_several(self) -> bool:
        """Whether steps may ask for several tokens a request now (`StepInput.multi_step`)."""
        ...

    async def start(self) -> None:
        """Build the stages and connect them; steps may be submitted when it returns.

        Raises `StageLost` if a stage does not come up, and leaves nothing running then.
        """
        ...

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step; the awaitable, used at most once, gives its answer.

        The awaitable raises `StageError` if a stage failed on this step (other steps go on), and
        `StageLost` if a stage is dead or the pipeline is not open: as `DeviceLost` where its device
        failed and a new process must take its place. `submit` itself raises
        `CapacityError`, and sends nothing, when `max_in_flight` steps are unanswered.
        """
        ...

    async def restart(self) -> tuple[int, ...]:
        """End unanswered steps and replace what is lost, with empty KV caches; the stages that were
        replaced.

        Raises `StageLost` if it does not come up, and leaves nothing running then; `DeviceLost`
        where only another process can go on.
        """
        ...

    async def close(self) -> None:
        """Stop all stages and free what they hold, in bounded time; twice is once."""
        ...


class InFlightSteps:
    """Futures of the unanswered steps, by sequence number. Used on one event loop only.

    One object serves from a start of the stages to their end, so that late messages of stages
    that are gone never reach the steps of the stages that follow them.
    """

    def __init__(self, limit: int) -> None:
        self.lost = asyncio.Event()
        self._limit = limit
        self._futures: dict[int, asyncio.Future[StepOutput]] = {}
        self._next = 0
        self._reason = ""
        self._kind: type[StageLost] = StageLost

    def add(self) -> tuple[int, asyncio.Future[StepOutput]]:
        """The sequence number and the future of a new step. Raises `CapacityError`."""
        if len(self._futures) >= self._limit:
            raise CapacityError(f"{self._limit} steps are in flight; wait for an answer first")
        sequence, self._next = self._next, self._next + 1
        future = asyncio.get_running_loop().create_future()
        self._futures[sequence] = future
        return sequence, future

    def answer(self, sequence: int, answer: StageResult) -> None:
        """Settle a step; the second answer to it and answers after a loss are ignored.

        A `StageLost` in the place of an answer is of no step: see `lose`.
        """
        if isinstance(answer, StageLost):
            self.lose(str(answer))
            return
        future = self._futures.pop(sequence, None)
        if future is None or future.done():
            return
        if isinstance(answer, StageError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def lose(self, reason: str, kind: type[StageLost] = StageLost) -> None:
        """Fail every unanswered step with an error of this kind; the first reason stays."""
        if self.lost.is_set():
            return
        logger.info("event=stage_lost in_flight=%d reason=%r", len(self._futures), reason)
        self.end(reason, kind)

    def end(self, reason: str, kind: type[StageLost] = StageLost) -> None:
        """As `lose`, where nothing went wrong: the pipeline was closed."""
        if not self._reason:
            self._reason, self._kind = reason, kind
        self.lost.set()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(self.error())
                # All steps fail together; asyncio must not warn about futures without a reader.
                future.exception()

    def error(self) -> StageLost:
        """Why steps cannot be sent now."""
        return self._kind(self._reason or "the pipeline is not open")


def launch_stage(
    index: int, stage: StageRunner, step: StepInput, hidden: torch.Tensor | None
) -> torch.Tensor | PendingOutput:
    """Launch a step.

    Whatever that or its answer raises is logged, and raised as `StageError`, or as `DeviceLost`
    where the stage's device failed for good.
    """
    result = guarded(index, step, lambda: stage.launch(step, hidden))
    return (lambda: guarded(index, step, result)) if callable(result) else result


def guarded(index: int, step: StepInput, work: Callable[[], T]) -> T:
    """The result of `work`; raises as `launch_stage` says."""
    try:
        return work()
    except Exception as error:
        # Its message may quote what a request holds, so only the place is logged.
        place = place_of(error)
        logger.error("event=stage_failed stage=%d step_id=%d error=%s", index, step.step_id, place)
        logger.debug("event=stage_failed stage=%d", index, exc_info=True)
        raise stage_failure(index, step.step_id, error) from error


def run_stage(
    index: int, stage: StageRunner, step: StepInput, hidden: torch.Tensor | None
) -> torch.Tensor | StepOutput:
    """Launch a step and wait for its answer; raises as `launch_stage` says."""
    result = launch_stage(index, stage, step, hidden)
    return result() if callable(result) else result


def run_traced(
    index: int, stage: StageRunner, step: StepInput, hidden: torch.Tensor | None, spans: Spans
) -> tuple[torch.Tensor | StepOutput, Spans]:
    """Run a traced step; its result, and its span behind those of the stages before it.

    An answer carries them all.
    """
    begin = wall_clock()
    result = run_stage(index, stage, step, hidden)
    if not isinstance(result, StepOutput):
        hidden_states = result
        # What the device met before it finishes is the step's failure, too.
        guarded(index, step, lambda: _finish(hidden_states))
    spans = (*spans, (begin, wall_clock()))
    if isinstance(result, StepOutput):
        result = replace(result, stage_spans=spans)
    return result, spans


def _finish(hidden: torch.Tensor) -> None:
    """Wait for a device that computes on its own; without this its time would be the next one's."""
    if getattr(hidden, "is_cuda", False):
        import torch  # noqa: PLC0415 - here already, and not needed on a CPU

        torch.cuda.synchronize(hidden.device)


def stage_failure(index: int, step_id: int, error: Exception) -> StageError | DeviceLost:
    """The error of a step that stage `index` failed on.

    `DeviceLost` after an error that every later call of the device would meet again; memory that
    ran out is the step's own error.
    """
    reason = f"stage {index} failed on step {step_id}: {type(error).__name__}: {error}"
    if is_device_lost(error):
        return DeviceLost(f"{reason}; its device is of no use to this process any more")
    return StageError(reason)


def is_device_lost(error: BaseException) -> bool:
    """Whether this error says that only a new process can use the device again."""
    if "torch" not in sys.modules:
        # Whoever raised it has no device; importing it takes seconds.
        return False
    import torch  # noqa: PLC0415 - as above

    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    # Libraries report what a device met in errors of their own: the device itself is asked.
    return isinstance(error, RuntimeError) and _device_refuses()


def end_process() -> NoReturn:
    """End this process at once: clean-up would call the lost device and might never return."""
    logger.error("event=device_lost ending_process=%d", os.getpid())
    os._exit(DEVICE_LOST_STATUS)


def _device_refuses() -> bool:
    import torch  # noqa: PLC0415 - as above

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    return False
