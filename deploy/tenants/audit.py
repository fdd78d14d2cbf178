"""What is written down of a change of keys or tenants: who did what when, and never a key."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

# Of a digest: enough to tell keys apart, and of no use for finding one.
PREFIX_LEN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change.

    time     UTC, ISO 8601
    user     of the system, by the process's own id
    action   create, rotate, revoke or set
    added    first digits of the digests of new keys
    removed  the same of keys that work no more
    changed  names of settings that were given another value
    """

    time: str
    user: str
    host: str
    action: str
    tenant: str
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Sequence[str] = ()

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def audit_entry(
    action: str,
    tenant: str,
    *,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    changed: Sequence[str] = (),
) -> AuditEntry:
    """The entry of a change that is made now by this process; `added`, `removed`: digests."""
    return AuditEntry(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        user=_user(),
        host=socket.gethostname(),
        action=action,
        tenant=tenant,
        added=[digest[:PREFIX_LEN] for digest in added],
        removed=[digest[:PREFIX_LEN] for digest in removed],
        changed=list(changed),
    )


def _user() -> str:
    # Not of the environment, which anybody may set.
    uid = os.getuid()
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"({uid})"
