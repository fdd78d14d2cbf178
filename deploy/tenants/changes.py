"""What `draftline tenant` changes in a store, and the audit log, which never holds a key."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...core.errors import ConfigError
from ..settings.tenants import key_digest
from .store import Record, TenantStore, checked_tenants

# Digits of a digest in the log: enough to distinguish keys, too few to find one.
PREFIX_LEN = 12


def audit_line(
    action: str,
    tenant: str,
    *,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    changed: Sequence[str] = (),
) -> str:
    """A change that this process makes now, as one line of JSON.

    action          create, rotate, revoke or set
    added, removed  digests of keys; the line holds their first digits
    changed         names of the settings with a new value
    """
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "user": _user(),
        "host": socket.gethostname(),
        "action": action,
        "tenant": tenant,
        "added": [digest[:PREFIX_LEN] for digest in added],
        "removed": [digest[:PREFIX_LEN] for digest in removed],
        "changed": list(changed),
    }
    return json.dumps(entry)


def _user() -> str:
    # Not from the environment, which the user may set.
    uid = os.getuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"({uid})"


# Prefix of a key, by which a leaked one is recognised.
KEY_PREFIX = "dl-"
KEY_BYTES = 32
# Of a digest, to name a key by.
MIN_DIGITS = 4


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key; its `text` is shown once and never stored."""

    text: str

    @property
    def digest(self) -> str:
        """Its digest, which is stored."""
        return key_digest(self.text)


def new_key() -> NewKey:
    """A key of 256 random bits."""
    return NewKey(KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES))


def create_tenant(
    store: TenantStore, name: str, settings: Mapping[str, Any], *, with_key: bool = True
) -> NewKey | None:
    """Add a tenant; its key. Raises `ConfigError` where there is one of that name."""
    key = new_key() if with_key else None
    digests = [] if key is None else [key.digest]

    def change(records: Sequence[Record]) -> tuple[Sequence[Record], str]:
        if any(record.get("name") == name for record in records):
            raise ConfigError("name", f"{name!r} is there already; tenant set changes it")
        after = [*records, {"name": name, "key_sha256": digests, **settings}]
        return _checked(after), audit_line("create", name, added=digests, changed=sorted(settings))

    store.change(change)
    return key


def rotate_key(store: TenantStore, name: str, *, keep_old: bool) -> NewKey:
    """Give a tenant a new key; `keep_old`: its others work until they are revoked."""
    key = new_key()

    def change(records: Sequence[Record]) -> tuple[Sequence[Record], str]:
        old = _digests(_find(records, name))
        kept = old if keep_old else []
        after = _with(records, name, {"key_sha256": [*kept, key.digest]})
        removed = [] if keep_old else old
        return _checked(after), audit_line("rotate", name, added=[key.digest], removed=removed)

    store.change(change)
    return key


def revoke_key(store: TenantStore, name: str, digits: str | None) -> list[str]:
    """Revoke a key, named by the first digits of its digest, or the tenant with all of its keys.

    Returns the digests of the keys that work no more.
    """
    removed: list[str] = []

    def change(records: Sequence[Record]) -> tuple[Sequence[Record], str]:
        old = _digests(_find(records, name))
        removed[:] = old if digits is None else [_named(old, digits)]
        if digits is None:
            after = [record for record in records if record.get("name") != name]
        else:
            kept = [digest for digest in old if digest not in removed]
            after = _with(records, name, {"key_sha256": kept})
        return after, audit_line("revoke", name, removed=removed)

    store.change(change)
    return removed


def set_tenant(
    store: TenantStore, name: str, settings: Mapping[str, Any], unset: Sequence[str] = ()
) -> None:
    """Give settings of a tenant other values, and those of `unset` their defaults."""

    def change(records: Sequence[Record]) -> tuple[Sequence[Record], str]:
        _find(records, name)
        after = _with(records, name, settings, unset)
        return _checked(after), audit_line("set", name, changed=sorted({*settings, *unset}))

    store.change(change)


def _find(records: Sequence[Record], name: str) -> Record:
    for record in records:
        if record.get("name") == name:
            return record
    known = ", ".join(sorted(str(record.get("name")) for record in records)) or "none"
    raise ConfigError("name", f"there is no tenant {name!r}; known: {known}")


def _with(
    records: Sequence[Record], name: str, settings: Mapping[str, Any], unset: Sequence[str] = ()
) -> list[Record]:
    return [
        {key: value for key, value in {**record, **settings}.items() if key not in unset}
        if record.get("name") == name
        else record
        for record in records
    ]


def _checked(records: Sequence[Record]) -> Sequence[Record]:
    checked_tenants(records, "the tenants would be wrong then")
    return records


def _digests(record: Record) -> list[str]:
    """A record written by hand may have one digest as a text."""
    value = record.get("key_sha256") or []
    return [value] if isinstance(value, str) else list(value)


def _named(digests: Sequence[str], digits: str) -> str:
    found = [digest for digest in digests if digest.startswith(digits.lower())]
    if len(digits) < MIN_DIGITS or len(found) != 1:
        raise ConfigError(
            "key",
            f"must be the first {MIN_DIGITS} or more digits of one key's digest; tenant list "
            f"shows them ({len(found)} begin so)",
        )
    return found[0]
