"""Connections to Redis, a client with the names of a store's keys, and notifications of changes.

Handles URL, TLS, user and password; errors contain no secret. In a cluster it connects to the node
that holds the keys.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, parse_qsl, quote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.client import PubSub
from redis.exceptions import MovedError, NoPermissionError, OutOfMemoryError
from redis.retry import Retry

from ...core.errors import ConfigError, DamagedError, StoreError

# The server's message, or the client's for one command of a pipeline.
WRONG_TYPE = re.compile("(?:^|caused error: )WRONGTYPE ")
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
PASSWORD_FILE = "password_file"
TIMEOUT_S = 2.0
logger = logging.getLogger(__name__)
# Redis's allocator rounds a block of up to 4 MiB up by at most this.
ROUNDING_BYTES = 2**20
# Seconds after which a subscription is renewed, since a connection may die silently.
SUBSCRIPTION_SECONDS = 60.0


def connect(url: str, timeout: float) -> redis.Redis:
    """A client that connects on use, and again after a loss.

    url      `redis://[user:password@]host:port/db`, `unix://[user:password@]path?db=0`, or
             `rediss://` for TLS with `?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE`; a
             password may stand in a file, see `with_password`
    timeout  seconds; holds for each round trip

    Raises `ConfigError` for a malformed URL and for a file that cannot be read.
    """
    try:
        url = with_password(url)
        _check_tls_files(urlsplit(url))
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # The callers retry; a lost connection must show within one timeout.
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError:
        # The parser's message may contain a part of the password.
        raise ConfigError(
            "store",
            "not a Redis URL; write redis://user:password@host:port/db, with every special "
            "character of the password as %XX",
        ) from None


def with_password(url: str) -> str:
    """The URL with the password in the file that `?password_file=FILE` names, if it names one.

    So a URL can stand where many may read it, such as in a manifest or in settings that Ray Serve
    shows. Raises `ConfigError` for a file that cannot be read, and for two passwords.
    """
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    files = [value for name, value in options if name == PASSWORD_FILE]
    if not files:
        return url
    if parts.password or len(files) > 1:
        raise ConfigError("store", "a Redis URL gives two passwords; leave one of them out")
    try:
        password = Path(files[0]).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("store", f"{PASSWORD_FILE}: cannot read {files[0]}: {error}") from error
    user, address = parts.username or "", parts.netloc.rpartition("@")[2]
    rest = urlencode([(name, value) for name, value in options if name != PASSWORD_FILE])
    place = f"{user}:{quote(password, safe='')}@{address}"
    return parts._replace(netloc=place, query=rest).geturl()


def shown_url(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"


@contextmanager
def reported(url: str) -> Iterator[None]:
    """A context that turns what the client raises into a `StoreError` that begins with `url`.

    It is a `DamagedError` if only the requested key has another type.
    """
    try:
        yield
    except OutOfMemoryError as error:
        raise StoreError(
            f"{url}: Redis has reached its maxmemory; raise it, or remove segments"
        ) from error
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise StoreError(f"{url}: Redis does not answer ({error})") from error
    except redis.ResponseError as error:
        if WRONG_TYPE.search(str(error)):
            raise DamagedError(f"{url}: a key holds something of another kind ({error})") from error
        raise StoreError(f"{url}: Redis refuses ({error})") from error
    except redis.RedisError as error:
        raise StoreError(f"{url}: Redis refuses ({error})") from error


def _check_tls_files(parts: SplitResult) -> None:
    given = parse_qs(parts.query)
    for option in TLS_FILES:
        for path in given.get(option, ()):
            try:
                Path(path).read_bytes()
            except OSError as error:
                message = f"{option}: cannot read {path}: {error.strerror}"
                raise ConfigError("store", message) from error


class RedisClient:
    """A client, and its name in messages.

    raw     the client; see `connect`. Within `reported` it talks to the node that holds the keys,
            whichever node of a Redis Cluster the URL names
    url     without user, password and query
    prefix  of all keys; its hash tag keeps them on one node of a Redis Cluster
    """

    def __init__(self, url: str, name: str, timeout: float) -> None:
        """`timeout` is in seconds, for each round trip. Raises `ConfigError` for a bad URL."""
        self.raw = connect(url, timeout)
        self.url = shown_url(url)
        self.prefix = f"{{draftline:{name}}}"
        self.manifest = f"{self.prefix}:manifest"
        self.learning = f"{self.prefix}:learning"
        self.channel = f"{self.prefix}:changes"
        self._named = self.raw.connection_pool
        self._finding = threading.Lock()
        self._is_found = False

    @contextmanager
    def reported(self) -> Iterator[None]:
        """A context in which what Redis raises becomes a `StoreError`."""
        try:
            with reported(self.url):
                self._find_node()
                yield
        except StoreError:
            # The keys may have moved, or another node may have taken over.
            with self._finding:
                self._is_found = False
            raise

    def _find_node(self) -> None:
        """Request any key of the store: all are on one node, and other nodes redirect to it."""
        with self._finding:
            if self._is_found:
                return
            self.raw.connection_pool = self._named
            try:
                self.raw.get(f"{self.prefix}:node")
            except MovedError as moved:
                named = self._named
                settings = {**named.connection_kwargs, "host": moved.host, "port": moved.port}
                self.raw.connection_pool = redis.ConnectionPool(named.connection_class, **settings)
            self._is_found = True


def as_text(value: bytes | str) -> str:
    """An answer of Redis as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def require_room(client: redis.Redis, num_bytes: int, url: str) -> None:
    """Raise `StoreError` if that many more bytes would exceed `maxmemory`.

    Passes if Redis has no limit, or the user may not run `INFO`. Redis itself then refuses at the
    limit, or evicts.
    """
    try:
        memory = client.info("memory")
    except NoPermissionError:
        return
    limit, used = int(memory.get("maxmemory", 0)), int(memory.get("used_memory", 0))
    if limit and used + num_bytes + ROUNDING_BYTES > limit:
        raise StoreError(
            f"{url}: {num_bytes} bytes do not fit: used_memory is {used} of maxmemory {limit} "
            f"(maxmemory-policy {_policy(memory)}); raise maxmemory, or remove segments"
        )


def warn_of_eviction(client: redis.Redis, url: str) -> None:
    """Log a warning if Redis may evict segments when other data fill it."""
    try:
        memory = client.info("memory")
    except NoPermissionError:
        return
    if int(memory.get("maxmemory", 0)) and _policy(memory).startswith("allkeys"):
        logger.warning(
            "event=retrieval_store_may_evict store=%s maxmemory-policy=%s; "
            "set noeviction or a volatile policy",
            url,
            _policy(memory),
        )


def _policy(memory: dict[str, object]) -> str:
    return str(memory.get("maxmemory_policy", "unknown"))


class ChangeListener:
    """Waits for messages on a channel; one thread at a time.

    Without a subscription (connection lost, or no right to subscribe) it only waits, and the caller
    relies on polling. Each wait tries to subscribe again.
    """

    def __init__(self, client: redis.Redis, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._pubsub: PubSub | None = None
        self._subscribed_at = 0.0
        self._is_told = True
        self._closed = threading.Event()

    def wait(self, timeout: float) -> None:
        """Return after a notification or a new subscription, at the latest after `timeout`
        seconds."""
        end = time.monotonic() + timeout
        try:
            pubsub = self._subscribed()
            if pubsub.get_message(timeout=timeout) is not None:
                # One refresh covers all notifications so far.
                while pubsub.get_message(timeout=0.0) is not None:
                    pass
            self._is_told = True
        except redis.RedisError as error:
            self._forget()
            if self._is_told:
                logger.info("event=retrieval_store_polled %s", error)
            self._is_told = False
            self._closed.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End the subscription, and a wait without one."""
        self._closed.set()
        self._forget()

    def _subscribed(self) -> PubSub:
        if time.monotonic() > self._subscribed_at + SUBSCRIPTION_SECONDS:
            self._forget()
        if self._pubsub is None:
            self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
            self._pubsub.subscribe(self._channel)
            self._subscribed_at = time.monotonic()
        return self._pubsub

    def _forget(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            pubsub.close()
