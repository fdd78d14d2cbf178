"""What `Engine` and `AsyncEngine` share: an engine with its thread, and checked requests for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import Assembly, MakePipeline, ModelPlan, plan_model
from ...cluster.engine.engine_thread import EngineThread, Health
from ...cluster.engine.engine_time import REAL_TIME, EngineTime
from ...cluster.engine.request_factory import Prompt, RequestFactory
from ...cluster.links.pool import AnyLink
from ...core.errors import RequestError, shortened
from ...core.progress import Progress, unseen
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.request.stop import StopRule
from ...core.verify.rules import COUPLED
from ...models.text.grammar import GrammarConstraint
from .delta_queue import MAX_UNREAD_BYTES
from .placement import Placement, stages_have_gpu
from .shadow import Shadow
from .stats import EngineStats, FinishRate
from .usage_log import UsageLog

if TYPE_CHECKING:
    from ...actors.kept_actors import KeeperClient


# To look at so many ids takes well under a millisecond, as long as handing the work over.
LIGHT_TOKENS = 2_000


class Replica:
    """One engine with its thread."""

    def __init__(  # noqa: PLR0913 - most are keywords with defaults
        self,
        config: EngineConfig,
        *,
        engine_id: str = "0",
        keeper: KeeperClient | None = None,
        pipelines: Callable[[MakePipeline], MakePipeline] | None = None,
        links: Callable[[Sequence[AnyLink]], Sequence[AnyLink]] | None = None,
        engine_time: EngineTime = REAL_TIME,
        on_failure: Callable[[str], object] = lambda _reason: None,
        max_unread_bytes: int | None = None,
        usage_log: str | None = None,
        progress: Progress = unseen,
    ) -> None:
        """What is not said by `config`.

        keeper            of stages and drafters on Ray; without one they end with this process
        pipelines         takes what makes the pipeline of `config`, gives what makes the one used
        links             takes the links to the drafters of `config`, gives those that are used
        engine_time       by which it lives, if not the machine's
        on_failure        called once, from any thread, with the reason when the engine cannot go on
        max_unread_bytes  what may wait for the reader of a stream; more ends the request. None:
                          8 MiB
        usage_log         file or redis:// URL for a record of each request that ends
        progress          shows how far the weights of stages in this process are
        """
        self.config = config
        self.engine_id = engine_id
        self._plan: ModelPlan = plan_model(config, has_gpu=stages_have_gpu(config))
        self._placement = Placement(config, keeper, progress)
        make_pipeline = self._placement.make_pipeline
        self._make_pipeline: MakePipeline = (
            make_pipeline if pipelines is None else pipelines(make_pipeline)
        )
        self._changed_links = links
        self._time = engine_time
        self._factory: RequestFactory = self._plan.request_factory()
        self._thread = EngineThread(
            self._build,
            recovery_timeout_s=config.recovery_timeout_s,
            engine_time=engine_time,
            on_failure=on_failure,
        )
        self._assembly: Assembly | None = None
        self._usage = None if usage_log is None else UsageLog(usage_log, config.name)
        self._max_unread_bytes = max_unread_bytes or MAX_UNREAD_BYTES
        self._rate = FinishRate()
        self._shadow = Shadow(
            config.shadow_rate,
            partial(self._add, constraint=None),
            lambda: not self.stats().num_waiting,
            is_float32=self._plan.specs[0].dtype == "float32",
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens."""
        return self._plan.max_model_len

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self._factory.tokenizer

    def is_healthy(self) -> bool:
        """Whether requests can be served now."""
        return self._thread.is_healthy

    def health(self) -> Health:
        """What the engine is doing (`cluster/engine/engine_thread.py`)."""
        return self._thread.health

    def stats(self) -> EngineStats:
        """A snapshot; read without waiting for the step that runs."""
        assert self._assembly is not None, "the engine is not started"
        scheduler = self._assembly.scheduler
        core = self._assembly.core
        return EngineStats(
            engine_id=self.engine_id,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.kv_usage,
            num_steps=core.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_not_finite=core.num_not_finite,
            num_recoveries=self._thread.num_recoveries,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            wasted_by_source=dict(core.ended.wasted_by_source),
            by_tenant={name: replace(sums) for name, sums in core.ended.by_tenant.items()},
            usage_dropped=0 if self._usage is None else self._usage.num_dropped,
            streaming=replace(core.streaming.counts),
            shadow=replace(self._shadow.counts),
            step_times=core.deadline.times,
            drafters=self._assembly.hub.stats(),
        )

    async def _build(self) -> Assembly:
        links: Sequence[AnyLink] = await self._placement.make_links()
        if self._changed_links is not None:
            links = self._changed_links(links)
        self._assembly = Assembly(self._plan, self._make_pipeline, links, self._time)
        if self._usage is not None:
            self._assembly.core.ended.on_end = self._usage.note
        return self._assembly

    def _start(self) -> None:
        try:
            self._thread.start()
        except BaseException:
            self._placement.close()
            raise

    def _stop(self) -> None:
        self._shadow.close()
        self._thread.close()
        if self._usage is not None:
            self._usage.close()
        self._factory.grammars.close()
        self._placement.close()

    def _add(  # noqa: PLR0917 - the parts of a request
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        constraint: GrammarConstraint | None,
    ) -> tuple[int, ...]:
        """Queue a request without waiting for that; its prompt's token ids.

        Raises `RequestError`; `sink` gets what is wrong later, as `CapacityError`.
        """
        request, stop = self._prepare(request_id, prompt, params, sink, options, constraint)
        self._thread.enqueue(request, stop)
        return tuple(request.prompt_ids.tolist())

    def _constraint(self, params: SamplingParams) -> Future[GrammarConstraint] | None:
        """Begin to prepare the form of an answer. Raises `RequestError`."""
        if self.config.acceptance != COUPLED and params.structured_output is not None:
            raise RequestError(
                "structured_output",
                f"needs acceptance: coupled; this engine has {self.config.acceptance}",
            )
        return self._factory.constraint(params)

    def _prepare(  # noqa: PLR0913, PLR0917 - the parts of a request
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        constraint: GrammarConstraint | None,
        *,
        with_text: bool = True,
    ) -> tuple[Request, StopRule]:
        """A request that this engine can run. Raises `RequestError`."""
        self._check_drafters(options)
        return self._factory.build(
            request_id,
            prompt,
            params,
            sink,
            options,
            constraint=constraint,
            num_kv_slots=self._num_kv_slots,
            with_text=with_text,
        )

    @property
    def _num_kv_slots(self) -> int | None:
        """Tokens whose KV the engine can hold; None before it has started."""
        return None if self._assembly is None else self._assembly.scheduler.num_slots

    def _check_drafters(self, options: RequestOptions) -> None:
        known = [drafter.source for drafter in self.config.drafters]
        for name in options.drafters or ():
            if name not in known:
                names = ", ".join(known) or "none"
                raise RequestError(
                    "speculative.drafters",
                    f"{shortened(name)} is no drafter of this engine; known: {names}",
                )


def is_light(prompt: Prompt, params: SamplingParams, answered: Sequence[int] = ()) -> bool:
    """Whether a request takes so little time to prepare that a loop may do it."""
    listed = (
        params.allowed_token_ids, params.banned_token_ids, params.logit_bias, params.bad_words,
        params.stop_token_ids,
    )  # fmt: skip
    if isinstance(prompt, str) or any(listed):
        return False
    return len(prompt) + len(answered) <= LIGHT_TOKENS
