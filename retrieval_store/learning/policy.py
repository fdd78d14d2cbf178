"""Which namespaces of a store are not learned, whatever any replica is started with."""

from __future__ import annotations

from typing import Protocol

from ...core.errors import ConfigError
from ..search.lookup import SHARED
from ..store import check_namespace


class LearningPolicy(Protocol):
    """The namespaces of which nothing is learned, kept in the store itself.

    Every method raises `StoreError` if that is out of reach. Logs look at it in the very step that
    appends, so nothing is appended once `switch` has returned; what was learned before stays.
    """

    def off(self) -> frozenset[str]:
        """Namespaces of which nothing is learned."""
        ...

    def switch(self, namespace: str, *, learns: bool) -> None:
        """Forbid learning of a namespace, or allow it again. Raises `ConfigError` as
        `check_learned` does."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


def check_learned(namespace: str) -> None:
    """Raise `ConfigError` for an unsafe name, and for `shared`, which is never learned."""
    check_namespace(namespace)
    if namespace == SHARED:
        raise ConfigError("namespace", f"nothing is ever learned of {SHARED}; name a tenant")
