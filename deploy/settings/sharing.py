"""Settings of a server that tenants share: where they are listed, who may name them, and where
what they do is counted and recorded.
"""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from ...cluster.checked_settings import Settings
from ...core.errors import ConfigError

REDIS_SCHEMES = ("redis://", "rediss://")


class SharingSettings(Settings):
    """The part of `ServerConfig` that is about tenants beside the list of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant_store: str | None = Field(
        default=None,
        description="file or redis:// URL of further tenants, as draftline tenant keeps them; "
        "changes apply within about a second",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="networks of gateways that may name the tenant in x-tenant-id, such as "
        "10.0.0.0/8; from elsewhere the header is refused",
    )
    rate_limit_store: str | None = Field(
        default=None,
        description="redis:// URL that counts rates and concurrency of tenants for several "
        "replicas; default: in memory",
    )
    rate_limit_on_failure: Literal["open", "closed"] = Field(
        default="open",
        description="what tenants with limits get while that Redis does not answer; open: no "
        "limits, closed: 503",
    )
    usage_log: str | None = Field(
        default=None,
        description="file (JSON lines) or redis:// URL (a stream) for a record of each request "
        "that ends: tenant and counts, no text",
    )

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ConfigError("trusted_proxies", f"{text!r} is no network: {error}") from error
        return value

    @field_validator("rate_limit_store")
    @classmethod
    def _check_redis(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(REDIS_SCHEMES):
            raise ConfigError("rate_limit_store", "must be a redis:// or rediss:// URL")
        return value
