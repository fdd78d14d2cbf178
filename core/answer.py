"""Collects one request's deltas into its whole answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .errors import DraftlineError
from .request.output import Delta, RequestOutput


@dataclass(slots=True)
class Answer:
    """A sink (`core/request/request.py`): the engine's thread fills it, another waits for it."""

    request_id: str
    prompt_ids: tuple[int, ...] = ()
    deltas: list[Delta] = field(default_factory=list)
    error: DraftlineError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_output(self, event: Delta | DraftlineError) -> None:
        """Take the next delta, or the error that ends the request."""
        if isinstance(event, DraftlineError):
            self.error = event
        else:
            self.deltas.append(event)
        if self.error is not None or self.deltas[-1].finish_reason is not None:
            self.done.set()

    def wait(self) -> RequestOutput:
        """The whole answer, when it is there. Raises the error that ended the request."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        last = self.deltas[-1]
        assert last.finish_reason is not None
        assert last.metrics is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_ids,
            token_ids=tuple(token for delta in self.deltas for token in delta.token_ids),
            sources=tuple(source for delta in self.deltas for source in delta.sources),
            text="".join(delta.text for delta in self.deltas),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            log_probs=tuple(one for delta in self.deltas for one in delta.log_probs),
            prompt_log_probs=self.deltas[0].prompt_log_probs,
            stop_reason=last.stop_reason,
        )
