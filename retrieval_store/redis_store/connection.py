"""Connections to Redis: URL, TLS, user and password, and errors that tell no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from ...core.errors import ConfigError, DamagedError, StoreError

# As the server says it, or the client of one command of several.
WRONG_TYPE = re.compile("(?:^|caused error: )WRONGTYPE ")
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def connect(url: str, timeout: float) -> redis.Redis:
    """A client that connects on use, and again after a loss.

    url      `redis://[user:password@]host:port/db`, `unix://[user:password@]path?db=0`, or
             `rediss://` for TLS with `?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE`
    timeout  seconds; holds for each round trip

    Raises `ConfigError` for a malformed URL and for a TLS file that cannot be read.
    """
    try:
        _check_tls_files(urlsplit(url))
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # The callers try again themselves; a loss must show within one timeout.
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError:
        # What the parser says of a URL may be a part of its password.
        raise ConfigError(
            "store",
            "not a Redis URL; write redis://user:password@host:port/db, with every special "
            "character of the password as %XX",
        ) from None


def shown_url(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}{parts.path}"


@contextmanager
def reported(url: str) -> Iterator[None]:
    """Turn what the client raises into a `StoreError` that begins with `url`: a `DamagedError` if
    only the key that was asked for is of another kind."""
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
