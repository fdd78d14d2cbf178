"""The state of a retrieval service and of its store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One moment of a `RetrievalService`.

    version       of the manifest being served; empty while none is served as a whole
    num_segments  segments in memory
    num_bytes     their bytes
    refused       "<namespace>/<id>" of listed segments that are not served: out of reach,
                  corrupt, or of another model
    num_refusals  how often a segment was refused since the start
    num_failures  refreshes that failed in a row; 0 while the store is followed
    last_error    the last of them; empty while the store is followed
    num_damaged   entries of logs, and learned texts, that were passed over as damaged
    is_lost       the store has lost its data: what it held is served on, and nothing is learned
    """

    version: str = ""
    num_segments: int = 0
    num_bytes: int = 0
    refused: tuple[str, ...] = ()
    num_refusals: int = 0
    num_failures: int = 0
    last_error: str = ""
    num_damaged: int = 0
    is_lost: bool = False

    @property
    def is_serving(self) -> bool:
        """Whether there is a content to serve, an empty store's included."""
        return self.num_segments > 0 or bool(self.version)
