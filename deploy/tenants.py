"""Stores of tenants, in a file or in Redis: what `draftline tenant` changes and servers follow.

The audit log of changes never holds a key.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import pwd
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
import yaml

from ..core.errors import ConfigError, StoreError
from ..retrieval_store.redis_store.client import as_text, connect, reported, shown_url
from .settings.settings import REDIS_SCHEMES, ServerConfig
from .settings.tenants import TenantConfig, key_digest, read_tenants, require_distinct

# As plain values; a key is its digest, in `key_sha256`.
Record = Mapping[str, Any]
# Fields that a store never holds: files and variables of the server, and plain keys.
FORBIDDEN = ("key_env", "key_file")


# Takes all records; returns the new ones, and the line of the audit log.
Change = Callable[[Sequence[Record]], tuple[Sequence[Record], str]]


def open_tenant_store(url: str) -> TenantStore:
    """The store at a path or a Redis URL; it need not be there yet. Raises `ConfigError`."""
    if url.startswith(REDIS_SCHEMES):
        return RedisTenants(url)
    if "://" in url:
        raise ConfigError("tenant_store", "must be the path of a file or a redis:// URL")
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


AUDIT_SUFFIX = ".audit.jsonl"
# Digests are no keys, but others do not need them.
MODE = 0o600


class TenantFile:
    """Tenants and the audit log of their changes in one file, with a mapping `tenants`, a list.

    It is replaced as a whole, never written in place. Calls block, for seconds at most.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def where(self) -> str:
        """The file."""
        return str(self._path)

    def version(self) -> tuple[int, ...]:
        """Another value after each change: device, inode, time and size. Raises `StoreError` where
        there is no file."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size

    def read(self) -> Sequence[Record]:
        """All records. Raises `StoreError`."""
        try:
            text = self._path.read_text(encoding="utf-8")
            data = yaml.safe_load(text)
        except OSError as error:
            raise self._unreadable(error) from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            # The parser's message may quote the file.
            mark = getattr(error, "problem_mark", None)
            place = f" line {mark.line + 1}" if mark else ""
            raise StoreError(f"{self.where}{place}: is neither YAML nor JSON") from error
        return _records(data, self.where)

    def change(self, change: Change) -> None:
        """Apply a change to what is there, as a whole and one at a time, and note it in the log.

        Raises `StoreError`, and what `change` raises: nothing is changed then.
        """
        try:
            with self._locked():
                before = self.read() if self._path.exists() else []
                after, entry = change(before)
                # First, so that no change goes unlogged.
                self._note(entry)
                self._replace({"tenants": [dict(record) for record in after]})
        except OSError as error:
            raise StoreError(f"{self.where}: cannot be written: {error.strerror}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _note(self, line: str) -> None:
        path = f"{self._path}{AUDIT_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)
        with os.fdopen(descriptor, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")
            log.flush()
            os.fsync(log.fileno())

    def _replace(self, data: dict[str, Any]) -> None:
        """The file with this content, whole or not at all, with its owner's mode."""
        is_json = self._path.suffix == ".json"
        text = json.dumps(data, indent=2) if is_json else yaml.safe_dump(data, sort_keys=False)
        mode = self._path.stat().st_mode & 0o777 if self._path.exists() else MODE
        # A link stays a link; its target is replaced.
        target = self._path.resolve()
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(f"{text}\n" if is_json else text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(mode)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(f"{self.where}: cannot be read: {error.strerror}")


def _records(data: object, where: str) -> Sequence[Record]:
    tenants = data.get("tenants") if isinstance(data, Mapping) else None
    if not isinstance(tenants, list) or not all(isinstance(one, dict) for one in tenants):
        raise StoreError(f"{where}: must hold tenants: a list of tenants, each with a name")
    return tenants


# One hash tag: they change together, also in a Redis Cluster.
TENANTS = "{draftline:tenants}"
VERSION = f"{TENANTS}:version"
AUDIT = f"{TENANTS}:audit"
# How long one command may take.
TIMEOUT_S = 2.0
# Changes of others that may come between reading and writing.
MAX_TRIES = 20


class RedisTenants:
    """The same in one Redis database."""

    def __init__(self, url: str) -> None:
        """Connects on use. Raises `ConfigError` for a malformed URL."""
        self._client = connect(url, TIMEOUT_S)
        self._where = shown_url(url)

    @property
    def where(self) -> str:
        """The address, without a password."""
        return self._where

    def version(self) -> object:
        """The number of changes. Raises `StoreError`."""
        with reported(self._where):
            return self._client.get(VERSION)

    def read(self) -> Sequence[Record]:
        """All records, by name. Raises `StoreError`."""
        with reported(self._where):
            return self._records(self._client.hgetall(TENANTS))

    def change(self, change: Change) -> None:
        """Apply a change and note it. Raises `StoreError` and what `change` raises."""
        with reported(self._where), self._client.pipeline() as pipe:
            for _ in range(MAX_TRIES):
                pipe.watch(VERSION, TENANTS)
                before = self._records(pipe.hgetall(TENANTS))
                after, entry = change(before)
                pipe.multi()
                pipe.delete(TENANTS)
                for record in after:
                    pipe.hset(TENANTS, str(record["name"]), json.dumps(dict(record)))
                pipe.incr(VERSION)
                pipe.xadd(AUDIT, {"entry": entry})
                try:
                    pipe.execute()
                except redis.WatchError:
                    continue
                return
        raise StoreError(f"{self._where}: others change the tenants all the time; try again")

    def _records(self, found: object) -> Sequence[Record]:
        fields: dict[bytes | str, bytes | str] = found  # pyright: ignore[reportAssignmentType]
        records = []
        for name in sorted(map(as_text, fields)):
            text = as_text(fields.get(name.encode(), fields.get(name, b"")))
            try:
                records.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise StoreError(f"{self._where}: tenant {name!r} is no JSON") from error
        return records


TenantStore = TenantFile | RedisTenants


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


logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Period of a repeated warning.
LOG_PERIOD_S = 60.0


class TenantWatch:
    """Polls a store once a second. One event loop uses it; reading does not block it.

    on_tenants  gets the tenants after each change; what it raises (`ConfigError`) is taken as the
                store's fault, and the state before stays
    on_failure  called for each look that failed
    """

    def __init__(
        self,
        store: TenantStore,
        on_tenants: Callable[[Sequence[TenantConfig]], object],
        on_failure: Callable[[], object],
    ) -> None:
        self._store = store
        self._on_tenants = on_tenants
        self._on_failure = on_failure
        self._version: object = None
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        self._complained_at = 0.0
        # Whether the store could be read once: until then its tenants are unknown.
        self.is_known = False

    async def start(self) -> None:
        """Poll once, then regularly."""
        await self.look()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Poll once."""
        try:
            found = await asyncio.to_thread(self._read)
            if found is None:
                return
            version, tenants = found
            self._on_tenants(tenants)
        except (StoreError, ConfigError) as error:
            self._on_failure()
            self._complain(str(error))
            return
        if self.is_known or self._complaint:
            logger.info(
                "event=tenants_changed store=%s tenants=%d", self._store.where, len(tenants)
            )
        self._version, self.is_known, self._complaint = version, True, ""

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    def _read(self) -> tuple[object, tuple[TenantConfig, ...]] | None:
        """The tenants with their version; None where it is the known one."""
        # Before the content: a change in between is found by the next look.
        version = self._store.version()
        if self.is_known and version == self._version and not self._complaint:
            return None
        return version, checked_tenants(self._store.read(), self._store.where)

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if reason == self._complaint and now - self._complained_at < LOG_PERIOD_S:
            return
        self._complaint, self._complained_at = reason, now
        kept = "the last good state stays" if self.is_known else "its tenants get 503"
        logger.error("event=tenant_store_failed reason=%r consequence=%r", reason, kept)
