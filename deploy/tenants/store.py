"""A list of tenants outside a server's settings: a file, or keys in Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ...core.errors import ConfigError, StoreError
from ..settings.settings import ServerConfig
from ..settings.sharing import REDIS_SCHEMES
from ..settings.tenants import TenantConfig, read_tenants, require_distinct

# As plain values; a key is its digest, in `key_sha256`.
Record = Mapping[str, Any]
# What a store never holds: it would be read where the server runs, or be a key itself.
FORBIDDEN = ("key_env", "key_file")


class AuditEntry(Protocol):
    """What is written down of a change: `audit.AuditEntry`."""

    def as_json(self) -> str:
        """One line, without any key."""
        ...


# Takes all records, gives them as they shall be, and what is to be written down of that.
Change = Callable[[Sequence[Record]], tuple[Sequence[Record], AuditEntry]]


class TenantStore(Protocol):
    """Tenants and the audit log of their changes. Calls block; each takes seconds at most."""

    @property
    def where(self) -> str:
        """The file or the address, without a password."""
        ...

    def version(self) -> object:
        """Another value after each change; cheap. Raises `StoreError`."""
        ...

    def read(self) -> Sequence[Record]:
        """All records. Raises `StoreError` where they cannot be read."""
        ...

    def change(self, change: Change) -> None:
        """Apply a change to what is there, as a whole and one at a time, and note it in the log.

        Raises `StoreError`, and what `change` raises: nothing is changed then.
        """
        ...


def open_tenant_store(url: str) -> TenantStore:
    """The store at a path or a Redis URL; it need not be there yet. Raises `ConfigError`."""
    # Each is needed by few.
    if url.startswith(REDIS_SCHEMES):
        from .redis_store import RedisTenants  # noqa: PLC0415

        return RedisTenants(url)
    if "://" in url:
        raise ConfigError("tenant_store", "must be the path of a file or a redis:// URL")
    from .file_store import TenantFile  # noqa: PLC0415

    return TenantFile(url)


def checked_tenants(records: Sequence[Record], where: str) -> tuple[TenantConfig, ...]:
    """The tenants of a store's records. Raises `StoreError` naming the tenant and its field."""
    try:
        for index, record in enumerate(records):
            for field in FORBIDDEN:
                if isinstance(record, Mapping) and record.get(field):
                    raise ConfigError(
                        f"tenants[{index}].{field}", "is for settings; a store has key_sha256 only"
                    )
        tenants = read_tenants(list(records))
        require_distinct((), tenants)
    except ConfigError as error:
        raise StoreError(f"{where}: {error}") from error
    return tenants


def check_tenant_store(config: ServerConfig) -> None:
    """Raise `ConfigError` where a file of tenants is missing or wrong. Redis may be away for a
    while when a server starts: its tenants are served from when it is back."""
    if config.tenant_store is None:
        return
    store = open_tenant_store(config.tenant_store)
    try:
        tenants = checked_tenants(store.read(), store.where)
    except StoreError as error:
        if config.tenant_store.startswith(REDIS_SCHEMES):
            return
        raise ConfigError(
            "server.tenant_store", f"{error}; draftline tenant create makes one"
        ) from error
    require_distinct(config.api_key_sha256, (*config.tenants, *tenants))
