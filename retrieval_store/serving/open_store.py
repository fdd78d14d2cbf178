"""Opens the store that a URL names, its log of learned texts, its policy and its eraser."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from ...core.errors import ConfigError
from ...models.load.bundled import DEMO_STORE
from ..delta.delta_log import DeltaLog
from ..delta.settings import Fingerprint, LearningSettings, Tag, Tagged
from ..directory_store.delta_log import (
    DirectoryDeltaLog,
    DirectoryLearningPolicy,
    directory_log_tags,
)
from ..directory_store.store import DirectoryEraser, DirectoryStore
from ..learning import LearningPolicy, LiveLearning, NamespaceEraser
from ..store import SegmentStore


def open_store(url: str, *, must_exist: bool = False) -> SegmentStore:
    """The store that a URL names; connects to nothing yet.

    url  `redis://host:port/db` (also `rediss://`, `unix://`), a folder, or `demo`: the bundled one

    Raises `ConfigError` for any other scheme; with `must_exist`, as for readers, also for a missing
    folder.
    """
    if _is_redis(url):
        # A local import: the embedded store needs neither that file nor the Redis client.
        return import_module("..redis_store.store", __package__).RedisStore(url)
    folder = _folder(url)
    if must_exist and not folder.is_dir():
        raise ConfigError("store", f"no folder {folder}; `draftline corpus build` makes one")
    return DirectoryStore(folder)


def shown_store(url: str) -> str:
    """The name of a store in reports: no user or password, and of a folder its name only."""
    if _is_redis(url):
        return import_module("..redis_store.client", __package__).shown_url(url)
    return Path(url).name


def open_delta_log(url: str, fingerprint: Tagged, settings: LearningSettings) -> DeltaLog:
    """The log beside a store. Raises `ConfigError` as `open_store` does, and for `demo`."""
    if _is_redis(url):
        log = import_module("..redis_store.delta_log", __package__).RedisDeltaLog
        return log(url, fingerprint, settings)
    return DirectoryDeltaLog(_writable(url), fingerprint, settings)


def open_all_logs(url: str) -> list[DeltaLog]:
    """The logs of all models, to be read. Raises `ConfigError` and `StoreError`."""
    if url == "demo":
        return []
    if _is_redis(url):
        tags = import_module("..redis_store.delta_log", __package__).redis_log_tags(url)
    else:
        tags = directory_log_tags(_folder(url))
    return [open_delta_log(url, Tag(tag), LearningSettings()) for tag in tags]


def open_learning(url: str, fingerprint: Fingerprint, off: Collection[str] = ()) -> LiveLearning:
    """Learning into a store, for texts of one model, except for the namespaces in `off`."""
    settings = LearningSettings()
    log = open_delta_log(url, fingerprint, settings)
    return LiveLearning(open_store(url), log, fingerprint, settings, off)


def open_eraser(url: str) -> NamespaceEraser:
    """The eraser of a store's namespaces. Raises `ConfigError` as `open_delta_log` does."""
    if _is_redis(url):
        return import_module("..redis_store.delta_log", __package__).RedisEraser(url)
    return DirectoryEraser(_writable(url))


def open_policy(url: str, *, writes: bool = False) -> LearningPolicy:
    """The learning policy of a store: the namespaces excluded from learning.

    Raises `ConfigError` as `open_store` does; with `writes` also for `demo`, and for a missing
    folder, where a policy would have no effect.
    """
    if _is_redis(url):
        return import_module("..redis_store.delta_log", __package__).RedisLearningPolicy(url)
    folder = _writable(url) if writes else _folder(url)
    if writes and not folder.is_dir():
        raise ConfigError("store", f"no folder {folder}; nothing was ever stored there")
    return DirectoryLearningPolicy(folder)


def _is_redis(url: str) -> bool:
    return urlsplit(url).scheme in ("redis", "rediss", "unix")


def _folder(url: str) -> Path:
    if url == "demo":
        return DEMO_STORE
    scheme = urlsplit(url).scheme
    if scheme in ("", "file") and url:
        return Path(url.removeprefix("file://"))
    # The text before an @ may be a password.
    shown = f"{scheme}://..." if "@" in url else repr(url)
    raise ConfigError("store", f"{shown} is neither a folder nor a redis:// URL")


def _writable(url: str) -> Path:
    if url == "demo":
        raise ConfigError("store", "the bundled store is not written; name a folder of your own")
    return _folder(url)
