"""Opens the store that a URL names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from ..core.errors import ConfigError
from ..models.bundled import DEMO_STORE
from .directory_store import DirectoryStore
from .store import SegmentStore


def open_store(url: str, *, must_exist: bool = False) -> SegmentStore:
    """`redis://host:port/db` (also `rediss://`, `unix://`), a folder, or `demo`: the bundled one.

    Connects to nothing yet. Raises `ConfigError` for any other scheme; with `must_exist`, as for
    those who only read, also for a folder that is not there.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss", "unix"):
        # By name and only here: the embedded store needs neither that file nor the Redis client.
        return import_module(".redis_store", __package__).RedisStore(url)
    if url == "demo":
        return DirectoryStore(DEMO_STORE)
    if scheme in ("", "file") and url:
        folder = Path(url.removeprefix("file://"))
        if must_exist and not folder.is_dir():
            raise ConfigError("store", f"no folder {folder}; `draftline corpus build` makes one")
        return DirectoryStore(folder)
    # What stands before an @ may be a password.
    shown = f"{scheme}://..." if "@" in url else repr(url)
    raise ConfigError("store", f"{shown} is neither a folder nor a redis:// URL")
