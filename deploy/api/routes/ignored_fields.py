"""How a client and the operator hear of fields that were left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from starlette.responses import Response

logger = logging.getLogger(__name__)

HEADER = "x-draftline-ignored-fields"
MAX_NAMES = 16
MAX_NAME_CHARS = 64
MAX_LOGGED_NAMES = 256
LOG_PERIOD_S = 60.0


class IgnoredFields:
    """Names ignored fields in a header of the answer, and in the log now and then.

    Names come from clients: what cannot stand in a header is replaced, and lists are cut. Values
    are told nowhere.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._logged_at: float | None = None
        self._unlogged: dict[str, None] = {}

    def tell(self, response: Response, names: Sequence[str]) -> Response:
        """The same response with the header, where anything was ignored."""
        if not names:
            return response
        spelled = list(dict.fromkeys(map(_spell, names)))
        more = ["..."] if len(spelled) > MAX_NAMES else []
        response.headers[HEADER] = ", ".join([*spelled[:MAX_NAMES], *more])
        self._log(spelled[:MAX_NAMES])
        return response

    def _log(self, names: Sequence[str]) -> None:
        if len(self._unlogged) < MAX_LOGGED_NAMES:
            self._unlogged.update(dict.fromkeys(names))
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= LOG_PERIOD_S:
            logger.warning("event=fields_ignored names=%s", ",".join(self._unlogged))
            self._logged_at = now
            self._unlogged.clear()


def _spell(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_NAME_CHARS])
