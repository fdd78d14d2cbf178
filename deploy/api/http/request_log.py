"""A line for each HTTP request, and one for each answer: times, counts and ids, never text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....core.request.output import FinishReason, RequestMetrics
from ...observe.log_format import request_id

# Below the package's own logger, so that it has a level of its own.
logger = logging.getLogger("draftline.requests")
# A path that is no route may be any text.
OTHER_PATH = "other"
CLIENT_LEFT = 499


class RequestLog:
    """Logs each HTTP request when its answer has ended.

    paths  that are named; every other one is `other`
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._clock = clock
        logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The header of a gateway, if a proxy before the app adds ids.
        own = scope.get("state", {}).get("request_id") or _printable(
            Headers(scope=scope).get("x-request-id", "")
        )
        token = request_id.set(own)
        status, began = CLIENT_LEFT, self._clock()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else OTHER_PATH
            logger.info(
                "event=request request_id=%s method=%s path=%s status=%d seconds=%.6f",
                own, scope["method"], path, status, self._clock() - began,
            )  # fmt: skip
            request_id.reset(token)


def log_answer(response_id: str, reason: FinishReason, metrics: RequestMetrics) -> None:
    """Log a finished answer, where requests are logged."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        "event=answer request_id=%s response_id=%s finish_reason=%s prompt_tokens=%d "
        "cached_tokens=%d tokens=%d steps=%d tau=%.3f drafted=%d accepted=%d queue_s=%.6f "
        "first_token_s=%.6f seconds=%.6f",
        request_id.get(), response_id, reason, metrics.prompt_tokens, metrics.cached_tokens,
        metrics.generated_tokens, metrics.num_steps, metrics.acceptance_length,
        metrics.num_draft_tokens, metrics.num_accepted_tokens,
        metrics.start_time - metrics.arrival_time,
        metrics.first_token_time - metrics.arrival_time,
        metrics.finish_time - metrics.arrival_time,
    )  # fmt: skip


def _printable(text: str) -> str:
    return text if text.isascii() and text.isprintable() and " " not in text else ""
