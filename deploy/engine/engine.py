"""`Engine`, for scripts: blocking calls, whole answers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Self

from transformers import PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.engine.engine_thread import Health
from ...cluster.engine.request_factory import Prompt
from ...core.errors import RequestError
from ...core.request.output import OutputCollector, RequestOutput
from ...core.request.sampling_params import RequestOptions, SamplingParams
from .async_engine import AsyncEngine
from .stats import EngineStats


class Engine:
    """An engine for scripts. A context manager.

    Raises `ConfigError`, `CheckpointError` or `StoreError` when it cannot start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._engine = AsyncEngine(config)
        self._engine.load()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Answers of all prompts, in order; they run together.

        params: of all prompts, or of each. `RequestOptions(speculative=False)` decodes plainly; the
        answers are the same. Raises `RequestError` if a prompt does not fit or there are not as
        many parameters as prompts, `CapacityError` if there are more than the queue holds,
        `StageLost`, `EngineClosed`.
        """
        if isinstance(prompts, str):
            # A text is a sequence, too: of its letters.
            raise RequestError("prompts", "must be a list of prompts; write [prompt]")
        options = options or RequestOptions()
        answers: list[OutputCollector] = []
        try:
            for prompt, own in zip(prompts, _of_each(params, len(prompts)), strict=True):
                answer = OutputCollector(f"request-{uuid.uuid4().hex}")
                answer.prompt_ids = self._engine.enqueue(
                    answer.request_id, prompt, own, answer.on_output, options
                )
                answers.append(answer)
            self._engine.take_enqueued()
            # Refusals are raised before the others are waited for.
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
            return [answer.wait() for answer in answers]
        except BaseException:
            for answer in answers:
                self._engine.cancel(answer.request_id)
            raise

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._engine.max_model_len

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return self._engine.stats()

    def health(self) -> Health:
        """What the engine is doing: `ready` where requests can be served now."""
        return self._engine.health()

    def close(self) -> None:
        """End all requests and free everything; a second call does nothing."""
        self._engine.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            "params", f"must be one for all prompts or one for each of {count}, not {len(params)}"
        )
    return params
