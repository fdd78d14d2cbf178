"""OpenTelemetry spans of a request: queue, prefill, decode, and in it the parts of each step.

A request's spans are made when it ends, from times of the engine's clock. The smallest observed
distance between that clock and this host's converts them. A request that is not sampled costs
nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from ...core.request.output import Delta, RequestMetrics, VerifiedTree

# Steps of an answer that have spans; a long answer has thousands of steps.
MAX_STEPS = 128
SECOND_NS = 1_000_000_000

Attributes = Mapping[str, AttributeValue]


class HeaderGetter(Getter[Headers]):
    """Reads the headers of a request for a propagator."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        """The values of a header."""
        return carrier.getlist(key) or None

    def keys(self, carrier: Headers) -> list[str]:
        """The names of all headers."""
        return list(carrier.keys())


class RequestTracer:
    """Starts the spans of requests.

    now_ns  this host's clock, nanoseconds since 1970
    close   sends what has not been sent
    """

    def __init__(
        self,
        tracer: Tracer,
        close: Callable[[], None] = lambda: None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.close = close
        self._tracer = tracer
        self._now_ns = now_ns
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Headers, attributes: Attributes) -> RequestSpans | None:
        """The spans of a request, in the trace that its headers name; None: it is not sampled."""
        context = self._propagator.extract(headers, getter=HeaderGetter())
        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, attributes, start_time=self._now_ns()
        )
        if not span.is_recording():
            return None
        return RequestSpans(self._tracer, span, self._now_ns)


class RequestSpans:
    """The spans of one request, whose end is the end of the `with` block."""

    def __init__(self, tracer: Tracer, span: Span, now_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._now_ns = now_ns
        self._offset_ns: int | None = None
        self._steps: dict[int, list[VerifiedTree]] = {}
        self._num_steps: Counter[int] = Counter()
        self._finished: dict[int, RequestMetrics] = {}

    def note(self, index: int, delta: Delta) -> None:
        """A delta of answer number `index` has come."""
        kept = self._steps.setdefault(index, [])
        for tree in delta.trees:
            self._num_steps[index] += 1
            if len(kept) < MAX_STEPS:
                kept.append(tree)
            self._note_clock(tree.timing.committed_at)
        if delta.metrics is not None:
            self._finished[index] = delta.metrics
            self._note_clock(delta.metrics.finish_time)

    def __enter__(self) -> RequestSpans:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the request's span. Of an error only its class: the message may quote the client."""
        for index, metrics in self._finished.items():
            self._add_answer(index, metrics)
        finished = self._finished.values()
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in finished),
                "gen_ai.usage.output_tokens": sum(one.generated_tokens for one in finished),
            }
        )
        if kind is not None and not issubclass(kind, GeneratorExit):
            self._span.set_attribute("error.type", kind.__name__)
            self._span.set_status(Status(StatusCode.ERROR))
        elif not finished:
            self._span.set_attribute("draftline.client_left", True)
        self._span.end(self._now_ns())

    def _note_clock(self, seconds: float) -> None:
        offset = self._now_ns() - int(seconds * SECOND_NS)
        self._offset_ns = offset if self._offset_ns is None else min(offset, self._offset_ns)

    def _add_answer(self, index: int, metrics: RequestMetrics) -> None:
        own = {"draftline.answer": index}
        self._add("queue", metrics.arrival_time, metrics.start_time, own)
        prefill = {"draftline.cached_tokens": metrics.cached_tokens, **own}
        self._add("prefill", metrics.start_time, metrics.first_token_time, prefill)
        shown = self._steps.get(index, ())
        decode = {
            "draftline.tau": metrics.acceptance_length,
            "draftline.steps": metrics.num_steps,
            "draftline.steps_without_spans": self._num_steps[index] - len(shown),
            "draftline.verified": metrics.num_draft_tokens,
            "draftline.accepted": metrics.num_accepted_tokens,
            "draftline.preemptions": metrics.num_preemptions,
            **own,
        }
        span = self._start("decode", metrics.first_token_time, decode)
        self._add_steps(span, shown)
        span.end(self._ns(metrics.finish_time))

    def _add_steps(self, decode: Span, steps: Sequence[VerifiedTree]) -> None:
        """Drafters of a step are waited for together, so the spans of all have one length."""
        for number, tree in enumerate(steps):
            step, timing = {"draftline.step": number}, tree.timing
            nodes = Counter(tree.sources)
            accepted = Counter(tree.sources[node] for node in tree.path)
            for source in timing.asked:
                draft = {
                    "draftline.source": source,
                    "draftline.verified": nodes[source],
                    "draftline.accepted": accepted[source],
                    **step,
                }
                end = timing.drafted_at + timing.draft_s
                self._add("draft", timing.drafted_at, end, draft, decode)
            verify = {
                "draftline.verified": len(tree.sources) + tree.num_left_out,
                "draftline.accepted": len(tree.path),
                **step,
            }
            began = timing.finished_at - timing.verify_s
            self._add("verify", began, timing.finished_at, verify, decode)
            self._add("commit", timing.finished_at, timing.committed_at, step, decode)

    def _add(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes,
        parent: Span | None = None,
    ) -> None:
        self._start(name, start, attributes, parent).end(self._ns(end))

    def _start(
        self, name: str, start: float, attributes: Attributes, parent: Span | None = None
    ) -> Span:
        context = self._context if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._ns(start)
        )

    def _ns(self, seconds: float) -> int:
        assert self._offset_ns is not None, "no time of the engine's has come"
        return int(seconds * SECOND_NS) + self._offset_ns
