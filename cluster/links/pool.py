"""Several servers of one drafter, between which its requests are shared out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .link import DrafterLink


class MemberFinder(Protocol):
    """Knows the servers of a pool that grows and shrinks."""

    async def find(self) -> Mapping[str, int]:
        """The servers that take requests now, by a name that no other one ever gets, each with the
        requests that it has open for all coordinators. Raises what the system raises that it asks.
        """
        ...

    def link(self, key: str) -> DrafterLink:
        """A link to one of those that `find` gave last."""
        ...


@dataclass(slots=True, eq=False)
class DrafterPool:
    """A drafter with several servers: what a hub asks of a link, without the sending.

    links   to the servers, by number or name; those of a `finder` come and go
    finder  where the servers are; None: the links are all there are
    reads_features  whether it goes on from the target's features
    """

    name: str
    max_nodes: int
    keeps_answers: bool
    links: dict[str, DrafterLink] = field(default_factory=dict)
    finder: MemberFinder | None = None
    reads_features: bool = False

    is_local = False
    ahead = None


AnyLink = DrafterLink | DrafterPool
