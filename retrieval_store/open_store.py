"""Opens the store that a URL names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from ..core.errors import ConfigError
from ..models.bundled import DEMO_STORE
from .directory_store import DirectoryStore
from .store import SegmentStore


def open_store(url: str) -> SegmentStore:
    """`redis://host:port/db` (also `rediss://`, `unix://`), a folder, or `demo`: the bundled one.

    Connects to nothing yet. Raises `ConfigError` for any other scheme.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss", "unix"):
        # By name and only here: the embedded store needs neither that file nor the Redis client.
        return import_module(".redis_store", __package__).RedisStore(url)
    if url == "demo":
        return DirectoryStore(DEMO_STORE)
    if scheme in ("", "file") and url:
        return DirectoryStore(Path(url.removeprefix("file://")))
    raise ConfigError("store", f"{url!r} is neither a folder nor a redis:// URL")
