"""A retrieval server of the benchmark's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .owned_server import OwnedServer


class RetrievalServer(OwnedServer):
    """Over the store at `url`. It serves a little after its start."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def command(self) -> Sequence[str]:
        """See `OwnedServer`."""
        module = ("-m", "draftline.actors.retrieval_server")
        return (sys.executable, *module, "--store", self._url, "--port", str(self.port))

    def revive(self) -> None:
        """Start it again if it has ended by itself: at its start it needs its store."""
        if self._process is not None and self.pid is None:
            self.lose()
            self.start()
