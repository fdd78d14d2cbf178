"""Who sent a request, by its key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ....core.errors import RequestError, shortened
from ....core.request.sampling_params import MAX_PRIORITY, RequestOptions
from ....retrieval_store.search.lookup import SHARED
from ...settings.settings import ServerConfig
from ..errors import ApiError

# Load balancers and Kubernetes probes come without a key.
OPEN_PATHS = frozenset({"/health", "/ping"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request.

    namespace  a tenant's name, or `shared` for the operator and for a server without tenants
    learn      whether drafters may learn from its requests
    min_priority  least priority that its requests may have; those of a lower number go first
    """

    namespace: str = SHARED
    learn: bool = True
    min_priority: int = 0

    @property
    def is_tenant(self) -> bool:
        """Whether it has a namespace of its own."""
        return self.namespace != SHARED

    def with_tenant(self, options: RequestOptions) -> RequestOptions:
        """The options of a body with this caller's namespace and right to be learned from."""
        return replace(options, namespace=self.namespace, store=options.store and self.learn)

    def check_priority(self, priority: int) -> None:
        """Raise `RequestError` for a priority that this caller's requests may not have."""
        if not self.min_priority <= priority <= MAX_PRIORITY:
            raise RequestError(
                "priority",
                f"{shortened(priority)} is not allowed with this key; send a number from "
                f"{self.min_priority} to {MAX_PRIORITY}: requests of a lower one go first",
            )


def caller_of(request: Request) -> Caller:
    """The caller that `ApiKeys` found; a request that did not pass it has none, and fails."""
    return request.scope["state"]["caller"]


def require_operator(request: Request) -> None:
    """Raise `ApiError` 403 for a tenant: what all do together would tell each of the others."""
    if caller_of(request).is_tenant:
        raise ApiError(
            HTTPStatus.FORBIDDEN, "this is for the operator; send a key of server.api_keys"
        )


def operator_of(config: ServerConfig) -> Caller:
    """Who sends requests with the operator's keys, and all requests where there are no keys."""
    return Caller(min_priority=config.min_priority)


def callers_by_key(config: ServerConfig) -> dict[str, Caller]:
    """SHA-256 of each key -> its owner."""
    callers = dict.fromkeys(config.api_key_sha256, operator_of(config))
    for tenant in config.tenants:
        caller = Caller(namespace=tenant.name, learn=tenant.learn, min_priority=tenant.min_priority)
        callers |= dict.fromkeys(tenant.key_sha256, caller)
    return callers


class ApiKeys:
    """Finds the caller by the bearer token; 401 for an unknown one.

    callers    as of `callers_by_key`; without any, everything is open, and all are `anonymous`
    anonymous  who comes without a key where none is needed
    open_paths whose answers are for everybody
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Mapping[str, Caller],
        anonymous: Caller = Caller(),
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._anonymous = anonymous
        self._callers = [(digest.encode(), caller) for digest, caller in callers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._anonymous
        if self._callers and scope["path"] not in self._open_paths:
            try:
                caller = self._find(Headers(scope=scope).get("authorization", ""))
            except ApiError as error:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
                return
        # A new mapping: the server may hand the same one to every request.
        scope_with_caller = {**scope, "state": {**scope.get("state", {}), "caller": caller}}
        await self._app(scope_with_caller, receive, send)

    def _find(self, header: str) -> Caller:
        scheme, _, key = header.partition(" ")
        # Headers are decoded as Latin-1, whatever bytes they were.
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest().encode()
        # All keys are compared, each in constant time.
        matches = [
            caller for known, caller in self._callers if secrets.compare_digest(digest, known)
        ]
        if scheme.lower() == "bearer" and matches:
            return matches[0]
        raise ApiError(
            HTTPStatus.UNAUTHORIZED, "missing or wrong API key; send Authorization: Bearer KEY"
        )
