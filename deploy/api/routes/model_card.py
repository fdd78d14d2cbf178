"""The served model as `/v1/models` shows it and as requests name it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from ....core.request_checks import shortened
from ..errors import ApiError


class ServedModel:
    """The one model of a server. `drafters`: names that requests may give."""

    def __init__(self, name: str, drafters: Sequence[str] = ()) -> None:
        self.name = name
        self._drafters = list(drafters)
        self._created = int(time.time())

    def require(self, asked: str | None) -> None:
        """Raises `ApiError` 404 unless `asked` is the served model; None means it."""
        if asked is not None and asked != self.name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model: {shortened(asked)} is not served here; known: {self.name!r}",
                param="model",
            )

    def card(self, max_model_len: int) -> dict[str, Any]:
        """The model's entry, with vLLM's extra fields and ours; the length is in tokens."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "draftline",
            "root": self.name,
            "parent": None,
            "max_model_len": max_model_len,
            "permission": [],
            "drafters": self._drafters,
        }
