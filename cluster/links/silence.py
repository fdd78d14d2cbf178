"""When a drafter server that runs, but does not answer, counts as dead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Silence:
    """Counts in a row what a server left unanswered.

    A connection is answered by a server that is well within milliseconds, whatever its drafter
    does; a message takes as long as the drafter, which a prompt may keep for seconds.
    """

    max_connects: int = 2
    max_messages: int = 5
    connects: int = 0
    messages: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether nothing but a new process can be expected to answer."""
        return self.connects >= self.max_connects or self.messages >= self.max_messages

    def connected(self) -> None:
        """The server answered a connection."""
        self.connects = 0

    def end(self) -> None:
        """The drafter answered, or is another now."""
        self.connects = self.messages = 0
