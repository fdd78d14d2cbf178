"""What a pipeline of stages is, wherever its stages run, and what a worker needs to build one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...core.errors import place_of
from ...core.progress import Progress, unseen
from ...core.steps import StepInput, StepOutput
from .stage_failure import stage_failure

if TYPE_CHECKING:
    import torch

    from ...drafters.heads.last_stage import LastStageHeadSpec
    from ...models.load.partition import LayerSpan
    from ...models.stage.options import StageOptions
    from ...models.stage.pending_output import PendingOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StageRunner(Protocol):
    """A contiguous span of target layers with its own KV cache (`models/stage/stage.py`)."""

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache."""
        ...

    @property
    def decodes_several(self) -> bool:
        """Whether it takes steps of several tokens a request (`StepInput.num_decode_steps`)."""
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
        from ...models.stage.feature_taps import carried_sizes  # noqa: PLC0415

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
        from ...models.stage.stage import load_stage  # noqa: PLC0415

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
    def decodes_several(self) -> bool:
        """Whether steps may ask for several tokens a request now (`StepInput.num_decode_steps`)."""
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
