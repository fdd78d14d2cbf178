"""The caller of a request, by its key or a trusted gateway's header, and its tenant's limits."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from ....core.errors import RequestError, shortened
from ....core.request.sampling_params import MAX_PRIORITY, RequestOptions
from ....retrieval_store.search.lookup import SHARED
from ...settings.settings import ServerConfig
from ...settings.tenants import TenantConfig, require_distinct
from ..errors import RETRY_AFTER_S, ApiError
from .gate import Gate, TenantLimits, Verdict

# Load balancers and Kubernetes probes come without a key.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/readyz", "/livez"})
TENANT_HEADER = "x-tenant-id"
# As Anthropic's clients send a key.
KEY_HEADER = "x-api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request.

    name       a tenant's, or `shared` for the operator and for a server without tenants
    namespace  whose data and prefixes it shares: mostly the name
    learn      whether drafters may learn from its requests
    min_priority  least priority that its requests may have; those of a lower number go first
    limits     a tenant's settings; None: no limits
    """

    name: str = SHARED
    namespace: str = SHARED
    learn: bool = True
    min_priority: int = 0
    limits: TenantConfig | None = None

    @classmethod
    def of(cls, tenant: TenantConfig) -> Caller:
        """A tenant as caller."""
        return cls(
            name=tenant.name,
            namespace=tenant.space,
            learn=tenant.learn,
            min_priority=tenant.min_priority,
            limits=tenant,
        )

    @property
    def is_tenant(self) -> bool:
        """Whether it is not the operator."""
        return self.limits is not None

    def with_tenant(self, options: RequestOptions) -> RequestOptions:
        """The options of a body with this caller's namespace, learning and drafters.

        Raises `ApiError` 403 for a drafter that it may not use.
        """
        options = replace(
            options,
            namespace=self.namespace,
            tenant=self.name,
            store=options.store and self.learn,
        )
        if self.limits is None:
            return options
        options = replace(options, weight=self.limits.weight)
        allowed = self.limits.drafters
        if allowed is None:
            return options
        for name in options.drafters or ():
            if name not in allowed:
                raise _forbidden("speculative.drafters", name, allowed)
        asked = allowed if options.drafters is None else options.drafters
        return replace(options, drafters=asked, speculative=options.speculative and bool(asked))

    def check_priority(self, priority: int) -> None:
        """Raise `RequestError` for a priority that this caller's requests may not have."""
        if not self.min_priority <= priority <= MAX_PRIORITY:
            raise RequestError(
                "priority",
                f"{shortened(priority)} is not allowed with this key; send a number from "
                f"{self.min_priority} to {MAX_PRIORITY}: requests of a lower one go first",
            )

    def may_use(self, names: Collection[str]) -> bool:
        """Whether it may use the model of these names."""
        allowed = None if self.limits is None else self.limits.models
        return allowed is None or not set(names).isdisjoint(allowed)

    def check_model(self, name: str, names: Collection[str]) -> None:
        """Raise `ApiError` 403 for a model, of these names, that this caller may not use."""
        if not self.may_use(names):
            assert self.limits is not None
            raise _forbidden("model", name, self.limits.models or ())

    def context(self, max_model_len: int) -> int:
        """Most tokens of its requests, of those that the model allows."""
        most = None if self.limits is None else self.limits.max_context
        return max_model_len if most is None else min(most, max_model_len)


def _forbidden(field: str, name: str, allowed: Sequence[str]) -> ApiError:
    known = ", ".join(allowed) or "none"
    return ApiError(
        HTTPStatus.FORBIDDEN,
        f"{field}: {shortened(name)} is not allowed with this key; allowed: {known}",
        param=field,
    )


def caller_of(request: Request) -> Caller:
    """The caller that `Guard` found."""
    return request.scope["state"]["caller"]


def require_operator(request: Request) -> None:
    """Raise `ApiError` 403 for a tenant: totals would reveal other tenants' activity."""
    if caller_of(request).is_tenant:
        raise ApiError(
            HTTPStatus.FORBIDDEN, "this is for the operator; send a key of server.api_keys"
        )


class Callers:
    """All who may send requests: the operator, tenants of the settings, and those of a store.

    is_complete  whether the store, where there is one, has been read
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._networks = [ipaddress.ip_network(text) for text in config.trusted_proxies]
        self.operator = Caller(min_priority=config.min_priority)
        self.is_complete = config.tenant_store is None
        self._use(())

    def use(self, stored: Sequence[TenantConfig]) -> None:
        """Take a store's tenants in place of those it had. Raises `ConfigError`, and changes
        nothing, where one has the name or a key of a tenant of the settings."""
        require_distinct(self._config.api_key_sha256, (*self._config.tenants, *stored))
        self._use(stored)
        self.is_complete = True

    def _use(self, stored: Sequence[TenantConfig]) -> None:
        tenants = (*self._config.tenants, *stored)
        self._by_name = {tenant.name: Caller.of(tenant) for tenant in tenants}
        by_key = dict.fromkeys(self._config.api_key_sha256, self.operator)
        for tenant in tenants:
            by_key |= dict.fromkeys(tenant.key_sha256, self._by_name[tenant.name])
        self._by_key = by_key

    def of(self, scope: Scope) -> Caller:
        """The caller of a request. Raises `ApiError` 400, 401, 403 or 503."""
        headers = Headers(scope=scope)
        named = headers.getlist(TENANT_HEADER) if self._networks else []
        if named:
            return self._named(named, scope)
        key = headers.get(KEY_HEADER, "")
        return self._by_header(headers.get("authorization") or f"Bearer {key}")

    def _by_header(self, header: str) -> Caller:
        scheme, _, key = header.partition(" ")
        # Headers are decoded as Latin-1, whatever bytes they were. Digests are looked up: what the
        # time of that tells of a digest, tells nothing of the key.
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
        caller = self._by_key.get(digest)
        if scheme.lower() == "bearer" and caller is not None:
            return caller
        self._require_complete()
        raise ApiError(
            HTTPStatus.UNAUTHORIZED, "missing or wrong API key; send Authorization: Bearer KEY"
        )

    def _named(self, names: Sequence[str], scope: Scope) -> Caller:
        if not self._is_trusted(scope.get("client")):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                f"{TENANT_HEADER} is believed from gateways of server.trusted_proxies only, and "
                "this connection is from elsewhere; leave it out and send a key",
            )
        if len(names) > 1:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{TENANT_HEADER} is there more than once")
        caller = self._by_name.get(names[0].strip())
        if caller is not None:
            return caller
        self._require_complete()
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"{TENANT_HEADER}: {shortened(names[0])} is no tenant here; draftline tenant create",
        )

    def _is_trusted(self, client: tuple[str, int] | None) -> bool:
        """Whether a peer is a gateway. Port 0 is what servers set that took the address from
        `X-Forwarded-For`, which anybody may send."""
        if client is None or not client[1]:
            return False
        try:
            address = ipaddress.ip_address(client[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)

    def _require_complete(self) -> None:
        if not self.is_complete:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the tenants cannot be read now, please retry",
                retry_after_s=RETRY_AFTER_S,
            )


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
