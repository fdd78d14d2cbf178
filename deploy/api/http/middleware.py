"""What happens around every route: request ids, limits on bodies, draining, CORS, the log.

The log has a line for each HTTP request and one for each answer: times, counts, ids, never text.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import SAFELISTED_HEADERS, CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....core.request.output import FinishReason, RequestMetrics
from ...observe.log_format import request_id
from ...settings.settings import ServerConfig
from ..errors import RETRY_AFTER_S, ApiError
from .callers import Admission, Caller, Callers, OnRefused
from .gate import Gate, TenantLimits

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LEN = 128
# Below the package's own logger, so that it has a level of its own.
logger = logging.getLogger("draftline.requests")
# A path that is no route may be any text.
OTHER_PATH = "other"
CLIENT_LEFT = 499
ASKED = "access-control-request-headers"
# What routes that browsers may call are called with.
ALLOWED_METHODS = ("GET", "POST")
# Headers that pages of other sites may send: those of OpenAI's and Anthropic's clients.
ALLOWED_HEADERS = (
    "authorization", "content-type", "user-agent", "openai-*", "x-stainless-*",
    "x-api-key", "anthropic-*",
)  # fmt: skip
# Time for a body to arrive; then a 408.
BODY_TIMEOUT_S = 60.0


class RequestIds:
    """Names each request, and logs it when its answer has ended.

    makes_ids  the client's `x-request-id` is echoed, or one is made; handlers find it in
               `scope["state"]`. False: a proxy before the app does so
    paths      that the log names, every other one is `other`; None: requests are not logged
    """

    def __init__(self, app: ASGIApp, *, makes_ids: bool, paths: Collection[str] | None) -> None:
        self._app = app
        self._makes_ids = makes_ids
        self._paths = paths
        if paths is not None:
            logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        own = given if given.isascii() and given.isprintable() and " " not in given else ""
        if self._makes_ids:
            own = _usable(given) or uuid.uuid4().hex
            scope.setdefault("state", {})["request_id"] = own
        status, began = CLIENT_LEFT, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._makes_ids:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = own
            await send(message)

        token = request_id.set(own)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._paths is not None:
                path = scope["path"] if scope["path"] in self._paths else OTHER_PATH
                logger.info(
                    "event=request request_id=%s method=%s path=%s status=%d seconds=%.6f",
                    own, scope["method"], path, status, time.monotonic() - began,
                )  # fmt: skip
            request_id.reset(token)


def _usable(value: str | None) -> str | None:
    """The client's id if it can stand in a header and a log line."""
    if not value or len(value) > MAX_REQUEST_ID_LEN:
        return None
    return value if value.isascii() and value.isprintable() else None


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises `ApiError` 413 when it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _announced_bytes(headers: Headers) -> int:
    value = headers.get("content-length", "")
    # What is no number was refused when the request was parsed; 20 digits are always too many.
    return int(value[:20]) if value.isascii() and value.isdigit() else 0


def _too_large(limit: int) -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {limit} bytes")


class Drain:
    """Counts the requests that run and knows whether new ones are taken. One event loop uses it."""

    def __init__(self) -> None:
        self.num_running = 0
        self._begun = asyncio.Event()
        # Set when there is nothing more to wait for.
        self._over = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Refuse new requests; called again, wait no longer for those that run."""
        if self.is_draining or not self.num_running:
            self._over.set()
        self._begun.set()

    def enter(self) -> None:
        """A request begins."""
        self.num_running += 1

    def leave(self) -> None:
        """A request has been answered, or its client has left."""
        self.num_running -= 1
        if self.is_draining and not self.num_running:
            self._over.set()

    async def begun(self) -> None:
        """Wait for `begin`."""
        await self._begun.wait()

    async def finish(self, timeout_s: float) -> bool:
        """Wait until no request runs, `begin` is called again or the time is over.

        False if requests run still.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
        return not self.num_running

    def refusal(self) -> ApiError:
        """The error for a request that comes too late."""
        return ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server is shutting down, please retry",
            retry_after_s=RETRY_AFTER_S,
        )


class Guard:
    """Lets requests in: finds their callers, and refuses what may not or cannot be answered.

    is_open         whether all are served as the operator, since there are no keys
    open_paths      that need no key
    counted_paths   whose POST requests count for the limits of tenants
    on_refused      called for each request that a tenant's limit refuses
    max_body_bytes  more than this in `Content-Length`: 413, without reading any
    body_timeout_s  most time to read a body; then reading it raises `ApiError` 408
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        drain: Drain,
        gate: Gate,
        *,
        is_open: bool,
        open_paths: Collection[str],
        counted_paths: Collection[str],
        on_refused: OnRefused,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._app = app
        self._callers, self._drain, self._gate = callers, drain, gate
        self._is_open, self._open_paths = is_open, frozenset(open_paths)
        self._counted_paths, self._on_refused = counted_paths, on_refused
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_known = self._is_open or scope["path"] in self._open_paths
        try:
            caller = self._callers.operator if is_known else self._callers.of(scope)
        except ApiError as error:
            await _answer(error, scope, receive, send)
            return
        # A new mapping: the server may hand the same one to every request.
        scope = {**scope, "state": {**scope.get("state", {}), "caller": caller}}
        # Requests that only read are answered while the server drains.
        if scope["method"] != "POST":
            await self._bounded(scope, receive, send)
            return
        if self._drain.is_draining:
            # A connection that is kept would lead the client here again.
            closing = {"Connection": "close"}
            await _answer(self._drain.refusal(), scope, receive, send, closing)
            return
        self._drain.enter()
        try:
            await self._counted(caller, scope, receive, send)
        finally:
            self._drain.leave()

    async def _counted(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request of a tenant with limits; 429 for one too many."""
        tenant = caller.limits if scope["path"] in self._counted_paths else None
        limits = None if tenant is None else TenantLimits.of(tenant)
        if limits is None or not limits.are_any:
            await self._bounded(scope, receive, send)
            return
        # Not the client's own id, which others may have too.
        request_id = uuid.uuid4().hex
        admission = Admission(self._gate, limits, self._on_refused)
        verdict = await self._gate.enter(limits, request_id)
        if not verdict.is_allowed:
            self._on_refused(limits.tenant, verdict.reason)
            await _answer(verdict.error(), scope, receive, send, verdict.headers())
            return
        admission.check(verdict)
        scope["state"]["admission"] = admission

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(admission.headers)
            await send(message)

        try:
            await self._bounded(scope, receive, send_with_rates)
        finally:
            self._gate.leave(limits, request_id)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Bound the size of a body, and the time that it may take to come."""
        if _announced_bytes(Headers(scope=scope)) > self._max_body_bytes:
            await _answer(_too_large(self._max_body_bytes), scope, receive, send)
            return
        await self._app(scope, self._timed(receive), send)

    def _timed(self, receive: Receive) -> Receive:
        deadline: float | None = None
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal deadline, is_whole
            if is_whole:
                # What comes after a body is that the client leaves, at any time.
                return await receive()
            deadline = deadline or asyncio.get_running_loop().time() + self._body_timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the body took longer than {self._body_timeout_s:g} s",
                ) from None
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return receive_in_time


async def _answer(
    error: ApiError,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    response = JSONResponse(
        error.body_for(scope), error.status, {**error.headers, **(headers or {})}
    )
    await response(scope, receive, send)


class AllowedOrigins(CORSMiddleware):
    """Starlette's CORS, with names of headers that may end in `*`.

    A client's headers are a family, to which its next version adds one: `x-stainless-*`.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, *, exposed: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=config.cors_allow_origins,
            allow_methods=ALLOWED_METHODS,
            # Answers name the headers that were asked for, which are checked here.
            allow_headers=("*",),
            expose_headers=exposed,
        )
        names = {name.lower() for name in (*SAFELISTED_HEADERS, *ALLOWED_HEADERS)}
        self._names = {name for name in names if not name.endswith("*")}
        self._prefixes = tuple(name[:-1] for name in names if name.endswith("*"))

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks what a page may send."""
        asked = (name.strip().lower() for name in request_headers.get(ASKED, "").split(","))
        refused = [
            name
            for name in asked
            if name and name not in self._names and not name.startswith(self._prefixes)
        ]
        if refused:
            return PlainTextResponse(
                f"pages of other sites may not send the headers {', '.join(refused)}", 400
            )
        return super().preflight_response(request_headers)


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
