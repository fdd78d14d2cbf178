"""Namespaces that a retrieval server refused to this process's token."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

# Trailing metadata of a refusal: the names, with commas between.
DENIED_KEY = "draftline-denied-namespaces"
# An operator may widen a token's scope; then its texts are found again after so long.
FORGET_S = 60.0
MAX_NAMES = 4096


class DeniedNamespaces:
    """Leaves refused namespaces out of lookups, so that the other requests of a batch are served.

    Each is said once. Asked again after `FORGET_S`. One thread at a time may use it.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._until: dict[str, float] = {}
        self._said: set[str] = set()

    def add(self, namespaces: Iterable[str]) -> bool:
        """Remember refused ones; whether any of them was not known."""
        now = self._clock()
        fresh = [name for name in namespaces if self._until.get(name, 0.0) <= now]
        if len(self._until) + len(fresh) > MAX_NAMES:
            self._until.clear()
        for name in fresh:
            self._until[name] = now + FORGET_S
            if name not in self._said and len(self._said) < MAX_NAMES:
                self._said.add(name)
                logger.warning(
                    "event=namespace_denied server=%s namespace=%s fix=list the namespace beside "
                    "this token in the retrieval server's --token-file",
                    self._address,
                    name,
                )
        return bool(fresh)

    def allowed(self, namespaces: Sequence[str]) -> list[int]:
        """Positions of those that may be asked for."""
        if not self._until:
            return list(range(len(namespaces)))
        now = self._clock()
        return [
            index for index, name in enumerate(namespaces) if self._until.get(name, 0.0) <= now
        ]
