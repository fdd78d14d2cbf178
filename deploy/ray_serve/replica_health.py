"""Whether Ray Serve should keep a replica; pure, so that it is tested without Ray."""

from __future__ import annotations

from collections.abc import Callable


class ReplicaHealth:
    """Gives an engine that replaces lost stages the time to do so.

    recovery_timeout_s  how long it may take
    clock               seconds; only differences count
    """

    def __init__(self, recovery_timeout_s: float, clock: Callable[[], float]) -> None:
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._since: float | None = None

    def problem(self, state: str) -> str | None:
        """Why the replica should be replaced; None: it should stay.

        state  of the engine: starting, ready, recovering, failed or closed
        """
        if state == "ready":
            self._since = None
            return None
        if state in ("failed", "closed"):
            return f"the engine has {state}"
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since <= self._recovery_timeout_s:
            return None
        return f"the engine is {state} for more than {self._recovery_timeout_s:g} s"
