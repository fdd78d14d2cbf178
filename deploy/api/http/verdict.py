"""Limits of a tenant, the gate's verdict on a request, and its error and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from ...settings.tenants import TenantConfig
from ..errors import RETRY_AFTER_S, ApiError

Kind = Literal["requests", "tokens"]
Reason = Literal["", "requests", "tokens", "concurrency", "unavailable"]

# The tenant's setting of each limit.
SETTINGS = {
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "concurrency": "max_concurrency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: there is none."""

    tenant: str
    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None

    @classmethod
    def of(cls, tenant: TenantConfig) -> TenantLimits:
        """Those of its settings."""
        return cls(
            tenant=tenant.name,
            requests=tenant.requests_per_minute,
            tokens=tenant.tokens_per_minute,
            concurrency=tenant.max_concurrency,
        )

    @property
    def are_any(self) -> bool:
        """Whether anything needs to be counted."""
        return (self.requests, self.tokens, self.concurrency) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The state of one limit of a tenant.

    remaining  of it, now
    reset_s    until all of it is there again
    wait_s     until what was asked for is there; infinite where it is more than the whole limit
    """

    limit: int
    remaining: int
    reset_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request is admitted, and why not.

    rates  state of the tenant's limits, as far as it is known
    limit  that a refused request exceeded
    """

    reason: Reason = ""
    rates: Mapping[str, Rate] = field(default_factory=dict)
    limit: int = 0
    wait_s: float = 0.0

    @property
    def is_allowed(self) -> bool:
        """Whether the request is admitted."""
        return not self.reason

    def error(self) -> ApiError:
        """The error of a refused request."""
        if self.reason == "unavailable":
            return ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the limits of this key cannot be looked up now, please retry",
                retry_after_s=RETRY_AFTER_S,
            )
        setting = SETTINGS[self.reason]
        if math.isinf(self.wait_s):
            return ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the prompt has more tokens than this key may send in a minute ({self.limit}, "
                f"{setting}); send a shorter one",
            )
        seconds = max(math.ceil(self.wait_s), 1)
        what = "requests at once" if self.reason == "concurrency" else f"{self.reason} a minute"
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"this key may have {self.limit} {what} ({setting}); try again in {seconds} s",
            retry_after_s=seconds,
        )

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*`, by OpenAI's names and forms."""
        headers = {}
        for kind, rate in self.rates.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(rate.reset_s)
        return headers


ALLOWED = Verdict()


def duration(seconds: float) -> str:
    """As OpenAI writes times: `120ms`, `7.66s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
