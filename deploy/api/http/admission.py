"""Where requests pass the gate: before anything of a body is read, and with the prompt's tokens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .gate import Gate
from .verdict import TenantLimits, Verdict

# Called for a refused request, with the tenant and the reason.
OnRefused = Callable[[str, str], object]


class Admission:
    """The limits of one request's tenant, and the rate headers of its answer."""

    def __init__(self, gate: Gate, limits: TenantLimits, on_refused: OnRefused) -> None:
        self._gate = gate
        self._limits = limits
        self._on_refused = on_refused
        self.headers: dict[str, str] = {}

    def check(self, verdict: Verdict) -> None:
        """Add the verdict's headers to the answer's. Raises `ApiError` 429 or 503."""
        self.headers |= verdict.headers()
        if not verdict.is_allowed:
            self._on_refused(self._limits.tenant, verdict.reason)
            raise verdict.error()

    async def take_tokens(self, count: int) -> None:
        """Count a prompt's tokens. Raises `ApiError` 429 or 503."""
        self.check(await self._gate.take_tokens(self._limits, count))

    def charge(self, count: int) -> None:
        """Count tokens that were generated."""
        self._gate.charge(self._limits, count)


def admission_of(request: Request) -> Admission | None:
    """That of a request whose tenant has limits."""
    return request.scope["state"].get("admission")


class RateLimits:
    """Counts POST requests of tenants with limits; 429 for one too many.

    paths       that are counted
    on_refused  called for each refused request
    """

    def __init__(
        self, app: ASGIApp, gate: Gate, paths: Collection[str], on_refused: OnRefused
    ) -> None:
        self._app = app
        self._gate = gate
        self._paths = paths
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        is_counted = scope["type"] == "http" and scope["method"] == "POST"
        tenant = scope["state"]["caller"].limits if is_counted else None
        if tenant is None or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        limits = TenantLimits.of(tenant)
        if not limits.are_any:
            await self._app(scope, receive, send)
            return
        await self._limited(limits, scope, receive, send)

    async def _limited(
        self, limits: TenantLimits, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # Not the client's own id, which others may have too.
        request_id = uuid.uuid4().hex
        admission = Admission(self._gate, limits, self._on_refused)
        verdict = await self._gate.enter(limits, request_id)
        if not verdict.is_allowed:
            self._on_refused(limits.tenant, verdict.reason)
            error = verdict.error()
            headers = error.headers | verdict.headers()
            await JSONResponse(error.body_at(scope["path"]), error.status, headers)(
                scope, receive, send
            )
            return
        admission.check(verdict)
        scope["state"]["admission"] = admission

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(admission.headers)
            await send(message)

        try:
            await self._app(scope, receive, send_with_rates)
        finally:
            self._gate.leave(limits, request_id)
