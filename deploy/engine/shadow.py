"""Repeats a share of live requests without drafts, at the lowest priority, and compares.

Under `coupled` speculation changes no token, so every difference has a cause: scores that nearly
tie and round differently in steps of another shape, or a fault. Repetitions share
KV with each other only, so a damaged prefix cache shows as a difference, too. No text is kept or
logged.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...core.errors import DraftlineError
from ...core.proposals import LogitsParams
from ...core.request.output import Delta, TokenLogProb
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import MAX_PRIORITY, RequestOptions, SamplingParams
from ...core.sampling import gumbel

logger = logging.getLogger(__name__)

# same      every token
# near_tie  the first other token's score is within rounding of the expected one's
# differs   it is not
# unknown   scores cannot tell: parameters change them, or the token is not among the best and its
#           noise may make up for that
# skipped   others were waiting, or a repetition was running
# failed    the repetition ended with an error
ShadowResult = Literal["same", "near_tie", "differs", "unknown", "skipped", "failed"]
# Log-probabilities of the repetition beside each token.
NUM_TOP = 8
# Scores of two step shapes differ by less: of float32, and of 16 bits or fewer.
NEAR_TIE, NEAR_TIE_16_BITS = 1e-3, 0.15
CACHE_SALT = "lossless shadow"
# The tenant of repetitions, which no tenant asked for.
SHARED = RequestOptions().tenant
# Parameters that change logits, so that the target's log-probabilities decide nothing.
_UNCHANGED = LogitsParams()
_CHANGING = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "banned_token_ids", "min_tokens",
)  # fmt: skip


@dataclass(slots=True)
class ShadowCounts:
    """Repeated requests by outcome."""

    same: int = 0
    near_tie: int = 0
    differs: int = 0
    unknown: int = 0
    skipped: int = 0
    failed: int = 0


# Queues a request: its id, prompt, parameters, sink and options.
Add = Callable[[str, Sequence[int], SamplingParams, Sink, RequestOptions], object]


class Shadow:
    """Chooses requests, repeats one at a time, and counts."""

    def __init__(
        self,
        rate: float,
        add: Add,
        has_room: Callable[[], bool],
        *,
        is_float32: bool = True,
        chance: Callable[[], float] | None = None,
    ) -> None:
        """`rate`: share of requests; `has_room`: whether no request waits."""
        self._rate = rate
        self._add = add
        self._has_room = has_room
        self._near_tie = NEAR_TIE if is_float32 else NEAR_TIE_16_BITS
        self._chance = chance or random.Random().random
        self._is_running = threading.Lock()
        # Requests are made outside of the engine's thread, whose steps must not wait for it.
        self._worker = ThreadPoolExecutor(1, "lossless-shadow")
        self.counts = ShadowCounts()

    def watch(
        self, params: SamplingParams, options: RequestOptions, sink: Sink
    ) -> WatchedAnswer | None:
        """The sink to use for the request: a watching one if the request is chosen."""
        can_differ = options.speculative and params.structured_output is None
        # Only the rest of a resumed answer comes through here.
        can_differ = can_differ and not options.answered
        if not can_differ or self._chance() >= self._rate:
            return None
        return WatchedAnswer(sink, params, options, self._repeat)

    def close(self) -> None:
        """Stop repeating."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _repeat(self, watched: WatchedAnswer) -> None:
        """Called in the engine's thread."""
        if not (self._has_room() and self._is_running.acquire(blocking=False)):
            self.counts.skipped += 1
            return
        try:
            self._worker.submit(self._start, watched)
        except RuntimeError:
            # The engine is being closed.
            self._end("skipped")

    def _start(self, watched: WatchedAnswer) -> None:
        request, served = watched.request, watched.tokens
        assert request is not None
        # To the same length; stop texts do not count.
        params = replace(
            watched.params, seed=request.seed, max_tokens=len(served), stop=(), logprobs=NUM_TOP,
            min_tokens=min(watched.params.min_tokens, len(served)), prompt_logprobs=None,
        )  # fmt: skip
        options = replace(
            watched.options, speculative=False, priority=MAX_PRIORITY, store=False, drafters=None,
            pipelined_trees="off", cache_salt=CACHE_SALT, namespace=SHARED, tenant=SHARED,
            weight=1.0,
        )  # fmt: skip
        answer = _PlainAnswer(lambda found: self._compare(watched, request, found))
        name = f"shadow-{request.request_id}"
        try:
            self._add(name, request.prompt_ids.tolist(), params, answer.on_output, options)
        except DraftlineError:
            self._end("failed")

    def _compare(
        self, watched: WatchedAnswer, request: Request, expected: Sequence[TokenLogProb] | None
    ) -> None:
        if expected is None:
            self._end("failed")
            return
        served = watched.tokens
        pairs = zip(served, expected, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b.token_id), None)
        if place is None:
            # A repetition that ended earlier is no near-tie.
            self._end("same" if len(expected) == len(served) else "differs")
            return
        gap = self._gap(watched.params, request, place, served[place], expected[place])
        result: ShadowResult = "unknown"
        if gap is not None:
            result = "near_tie" if gap < self._near_tie else "differs"
        if result != "near_tie":
            logger.warning(
                "event=shadow_difference request_id=%s token=%d gap=%s result=%s",
                request.request_id, place, gap, result,
            )  # fmt: skip
        self._end(result)

    @staticmethod
    def _gap(
        params: SamplingParams, request: Request, place: int, served: int, expected: TokenLogProb
    ) -> float | None:
        """How far the scores of the expected and the served token are apart, at least; None: they
        cannot tell."""
        is_changed = any(getattr(params, key) != getattr(_UNCHANGED, key) for key in _CHANGING)
        if is_changed or params.bad_words:
            return None
        known = dict(expected.top)
        # A token that is not listed scores at most as much as the last listed one.
        rival = known.get(served, min(known.values(), default=0.0))
        ids = np.array([expected.token_id, served], dtype=np.int64)
        scores = np.array([expected.log_prob, rival])
        if params.temperature > 0:
            seeds = np.array([request.seed], dtype=np.int64)
            position = np.array([len(request.prompt_ids) + place], dtype=np.int64)
            scores = scores / params.temperature + gumbel(seeds, position, ids)
        gap = float(scores[0] - scores[1])
        if served not in known:
            return gap if gap > 0 else None
        return abs(gap)

    def _end(self, result: ShadowResult) -> None:
        setattr(self.counts, result, getattr(self.counts, result) + 1)
        self._is_running.release()


class WatchedAnswer:
    """A sink before another that remembers the tokens of an answer.

    request  that it answers; set before any output
    """

    def __init__(
        self,
        sink: Sink,
        params: SamplingParams,
        options: RequestOptions,
        repeat: Callable[[WatchedAnswer], None],
    ) -> None:
        self.params, self.options = params, options
        self.request: Request | None = None
        self.tokens: list[int] = []
        self._sink, self._repeat = sink, repeat

    def on_output(self, event: Delta | DraftlineError) -> None:
        """Pass the event on; at a regular end, repeat the request."""
        self._sink(event)
        if isinstance(event, Delta):
            self.tokens += event.token_ids
            if event.finish_reason in ("stop", "length") and self.tokens:
                self._repeat(self)


class _PlainAnswer:
    """The sink of a repetition; reports its tokens, or None if it failed."""

    def __init__(self, tell: Callable[[Sequence[TokenLogProb] | None], None]) -> None:
        self._tell = tell
        self._found: list[TokenLogProb] = []

    def on_output(self, event: Delta | DraftlineError) -> None:
        if not isinstance(event, Delta):
            self._tell(None)
            return
        self._found += event.log_probs
        if event.finish_reason is not None:
            self._tell(None if event.finish_reason == "cancelled" else self._found)
