"""Steps and hidden states over the channels of a Ray Compiled Graph."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.dag import InputNode
from ray.exceptions import RayError

from ...core.errors import ProtocolError
from ...core.steps import StepInput
from ..loop_calls import call_on_loop, in_daemon_thread
from .in_flight import InFlightSteps
from .messages import StepWriter, decode_result, new_epoch
from .stage_worker import WARM_UP

logger = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 60.0
TEARDOWN_TIMEOUT_S = 5.0


class CompiledGraphTransport:
    """The coordinator's side: it writes steps, one thread reads the answers in order.

    buffer_bytes  first size of each channel buffer; a channel has `max_in_flight + 1` of them, and
                  Ray makes larger ones where a message does not fit
    """

    def __init__(self, buffer_bytes: int, max_in_flight: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._max_in_flight = max_in_flight
        self._graph: Any = None
        self._reader: threading.Thread | None = None
        self._sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = StepWriter(new_epoch())

    @property
    def leaves_stages_idle(self) -> bool:
        """Never: the loop that a graph starts in a stage ends with its process."""
        return False

    async def meet(self, stages: Sequence[ActorHandle], seconds: float) -> None:
        """See `StageTransport`: the graph connects them, once they are built."""

    async def open(self, stages: Sequence[ActorHandle], steps: InFlightSteps) -> None:
        """See `StageTransport`. Warms the graph up: its first run takes seconds."""
        loop = asyncio.get_running_loop()
        await in_daemon_thread(lambda: self._compile(stages))
        self._steps = steps
        self._stages = tuple(stages)
        self._reader = threading.Thread(target=self._read, args=(loop, steps), daemon=True)
        self._reader.start()

    def send(self, sequence: int, step: StepInput) -> None:
        """See `StageTransport`."""
        # A graph has one input, which all stages read in the memory of their node.
        payload = self._writer.write(sequence, step).whole
        try:
            self._sent.put(self._graph.execute(payload))
        except RayError as error:
            self._steps.lose(f"the compiled graph takes no more steps: {error}")

    async def close(self) -> None:
        """See `StageTransport`. A teardown that hangs is left to its daemon thread."""
        self._sent.put(None)
        try:
            await asyncio.wait_for(in_daemon_thread(self._tear_down), TEARDOWN_TIMEOUT_S)
        except TimeoutError:
            logger.warning("event=teardown_timeout seconds=%s", TEARDOWN_TIMEOUT_S)

    def _tear_down(self) -> None:
        if self._graph is None:
            return
        self._graph.teardown()
        if self._reader is not None:
            self._reader.join()
        self._graph = None
        # Ray keeps a process for each graph until the graph, a cycle of references, is collected.
        gc.collect()

    def _compile(self, stages: Sequence[ActorHandle]) -> None:
        # Ray logs a stack trace for every actor that is gone when a graph is torn down. They are
        # gone by intent, or `InFlightSteps` reports it.
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)
        with InputNode() as payload:
            node = stages[0].run_payload.bind(payload)
            for stage in stages[1:]:
                node = stage.run_payload.bind(payload, node)
        self._graph = node.experimental_compile(
            _submit_timeout=SUBMIT_TIMEOUT_S,
            _buffer_size_bytes=self._buffer_bytes,
            _max_inflight_executions=self._max_in_flight + 1,
        )
        self._graph.execute(WARM_UP).get(timeout=-1)

    def _read(self, loop: asyncio.AbstractEventLoop, steps: InFlightSteps) -> None:
        while (reference := self._sent.get()) is not None:
            try:
                sequence, answer = decode_result(reference.get(timeout=-1))
            except RayError as error:
                call_on_loop(loop, steps.lose, self._reason(error))
                return
            except ProtocolError as error:
                call_on_loop(loop, steps.lose, f"the last stage sent what is no answer: {error}")
                return
            call_on_loop(loop, steps.answer, sequence, answer)

    def _reason(self, error: RayError) -> str:
        """Which stage is dead, as the watch of the stages says it, where Ray tells."""
        dead = getattr(error, "actor_id", None)
        for index, stage in enumerate(self._stages):
            if stage._actor_id.hex() == dead:  # noqa: SLF001 - a handle tells its id no other way
                return f"stage {index} is dead: {type(error).__name__}"
        return f"a stage of the compiled graph is dead: {error}"
