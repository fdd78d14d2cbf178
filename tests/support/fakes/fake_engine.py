"""An engine of the same shape as `deploy.engine.async_engine.AsyncEngine`, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from draftline.cluster.drafting.replies import DrafterStats
from draftline.core.errors import CapacityError, RequestError
from draftline.core.fair_share import TenantTotals
from draftline.core.interfaces import StageMemory
from draftline.core.pipelined.drafting import TreeChunkCounts
from draftline.core.request.output import (
    TARGET_SOURCE,
    Delta,
    FinishReason,
    RequestMetrics,
    StepTiming,
    TokenLogProb,
    VerifiedTree,
)
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.core.step.in_flight import StepTimes
from draftline.deploy.engine.stats import EngineStats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Token ids are the bytes of the text, in an order of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = CHAT_TEMPLATE if chat else None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def log_probs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogProb, ...]:
    """-0.25 for every token, and falling values for the first tokens of the vocabulary."""
    if num_top is None:
        return ()
    top = tuple(range(num_top))
    values = tuple(-1.0 - token for token in top)
    return tuple(TokenLogProb(token, -0.25, top, values) for token in tokens)


def engine_stats(engine_id: str = "0", num_running: int = 0, num_steps: int = 0) -> EngineStats:
    """Stats of an engine with one drafter; no two of its figures are equal."""
    drafter = DrafterStats(
        name="spectra", connected=True, servers=12, circuit_open=False, messages=40, proposals=30,
        late=9, late_used=5, dropped=7, errors=3, reconnects=2, latency_sum_s=1.5, latency_count=35,
        learning={"learned": 13, "off": 6, "credited": 8, "damaged": 2, "made up": 1},
    )  # fmt: skip
    return EngineStats(
        engine_id=engine_id, num_running=num_running, num_waiting=0, kv_usage=0.25,
        num_steps=num_steps, num_recoveries=19, num_preemptions=4, num_prefix_queries=100,
        num_prefix_hits=64, wasted_by_source={"spectra": 11}, drafters=(drafter,),
        stage_memory=(StageMemory(1001, 5), StageMemory(1002, 6, 7)),
        by_tenant={"acme": TenantTotals(requests=3, nodes_verified=31, nodes_wasted=23)},
        tree_chunks=TreeChunkCounts(chunks=17, nodes=90, pruned_nodes=21, idle_turns=14),
        step_times=StepTimes((0, 15, 3, *[0] * 10, 1), 12.5),
    )  # fmt: skip


def fake_tree(pair: Sequence[int]) -> VerifiedTree:
    """Three nodes, of which the second is right where two tokens were committed."""
    return VerifiedTree(
        root_id=5,
        token_ids=(7, pair[0], 9),
        parents=(-1, -1, 1),
        sources=("suffix", "spectra", "spectra"),
        values=(0.25, 0.5, 1 / 3),
        path=(1,)[: len(pair) - 1],
        num_left_out=0,
        timing=StepTiming(("suffix", "spectra"), 11.0, 0.25, 11.75, 0.5, 11.875),
    )


class FakeEngine:
    """Answers every prompt with `answer`, two tokens a delta, one from a drafter and one not.

    hold       deltas after the first wait for this event, where it is given
    error      raised instead of delta number `error_at`
    calls      parameters of every request, in order
    arrivals   request ids, in order, to wait for
    cancelled  request ids whose stream was closed early
    """

    def __init__(
        self,
        answer: str = "def f(x):\n    return x\n",
        *,
        chat: bool = True,
        hold: asyncio.Event | None = None,
        error: Exception | None = None,
        error_at: int = 0,
        max_running: int = 64,
        stop_reason: str | int | None = None,
    ) -> None:
        self._stop_reason = stop_reason
        self.max_model_len = 128
        self.tokenizer = byte_tokenizer(chat=chat)
        self.calls: list[tuple[tuple[int, ...], SamplingParams, RequestOptions]] = []
        self.arrivals: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: list[str] = []
        self.healthy = True
        self.started = self.closed = False
        self._answer = tuple(self.tokenizer.encode(answer))
        self._hold = hold
        self._error = error
        self._error_at = error_at
        self._max_running = max_running
        self._running: set[str] = set()

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.closed = True

    def is_healthy(self) -> bool:
        return self.healthy

    def stats(self) -> EngineStats:
        return engine_stats(num_running=len(self._running))

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        assert not isinstance(prompt, str)
        assert request_id is not None
        if any(token_id >= len(self.tokenizer) for token_id in prompt):
            raise RequestError("prompt", "holds a token id outside the vocabulary")
        if len(self._running) >= self._max_running:
            raise CapacityError("the queue is full")
        self.calls.append((tuple(prompt), params, options))
        self._running.add(request_id)
        self.arrivals.put_nowait(request_id)
        finished = False
        try:
            for index, delta in enumerate(self._deltas(prompt, params, options, request_id)):
                if self._error is not None and index == self._error_at:
                    raise self._error
                if index and self._hold is not None:
                    await self._hold.wait()
                await asyncio.sleep(0)
                yield delta
            finished = True
        finally:
            self._running.discard(request_id)
            if not finished:
                self.cancelled.append(request_id)

    def _deltas(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
    ) -> list[Delta]:
        limit = len(self._answer) if params.max_tokens is None else params.max_tokens
        tokens = self._answer[:limit]
        reason: FinishReason = "length" if len(tokens) == params.max_tokens else "stop"
        pairs = [tokens[start : start + 2] for start in range(0, len(tokens), 2)] or [()]
        accepted = tuple(len(pair) - 1 for pair in pairs[1:])
        metrics = RequestMetrics(
            prompt_tokens=len(prompt),
            generated_tokens=len(tokens),
            num_steps=len(accepted),
            num_draft_tokens=3 * len(accepted),
            drafted_by_source={"spectra": 3 * len(accepted)},
            accepted_by_source={"spectra": sum(accepted)},
            accepted_lengths=accepted,
            arrival_time=10.0,
            start_time=10.25,
            first_token_time=10.5,
            finish_time=12.0,
        )
        return [
            Delta(
                request_id=request_id,
                token_ids=pair,
                sources=("spectra", TARGET_SOURCE)[2 - len(pair) :],
                text=self.tokenizer.decode(pair),
                finish_reason=reason if index == len(pairs) - 1 else None,
                stop_reason=self._stop_reason if index == len(pairs) - 1 else None,
                metrics=metrics if index == len(pairs) - 1 else None,
                log_probs=log_probs(pair, params.logprobs),
                prompt_log_probs=None
                if index or params.prompt_logprobs is None
                else (None, *log_probs(prompt[1:], params.prompt_logprobs)),
                trees=(fake_tree(pair),) if options.explain and index else (),
            )
            for index, pair in enumerate(pairs)
        ]


def roomy(answer: str) -> FakeEngine:
    """An engine whose context has room for tools."""
    engine = FakeEngine(answer)
    engine.max_model_len = 4096
    return engine
