"""The namespaces that are excluded from learning, and the immediate erasure of a namespace."""

from __future__ import annotations

from typing import Protocol

from ...core.errors import ConfigError, StoreError
from ..search.lookup import SHARED
from ..store import check_namespace


class LearningPolicy(Protocol):
    """The namespaces excluded from learning, kept in the store itself.

    Every method raises `StoreError` if the store is out of reach. Logs check the policy atomically
    with each append, so nothing is appended once `switch` has returned. Earlier learned text stays.
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


class NamespaceEraser(Protocol):
    """Deletes namespaces. Both methods raise `StoreError` if the store is out of reach."""

    def erase(self, namespace: str) -> None:
        """Delete segments, learned texts and their records at once, without a grace period.

        Waits for a running fold, which would write again, and notifies readers.
        """
        ...

    def remains(self, namespace: str) -> list[str]:
        """Names of keys, entries and files of the namespace, sorted."""
        ...

    def close(self) -> None:
        """Free connections."""
        ...


def forget_namespace(
    eraser: NamespaceEraser, namespace: str, policy: LearningPolicy | None = None
) -> int:
    """Erase a namespace, verify that nothing is left, and return how many things were deleted.

    With `policy`, the namespace is also excluded from learning, so that requests which end later
    add nothing. Replicas drop its content at their next refresh. Raises `ConfigError` for an unsafe
    name, and `StoreError` naming what is left.
    """
    check_namespace(namespace)
    if policy is not None:
        policy.switch(namespace, learns=False)
    before = eraser.remains(namespace)
    eraser.erase(namespace)
    left = eraser.remains(namespace)
    if left:
        raise StoreError(
            f"namespace {namespace}: {', '.join(left[:4])} is there again; stop what writes to it "
            "and forget it once more"
        )
    return len(before)
