"""Most chunks of a stream differ in three values only: their JSON is made once and filled in."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from ..generation.job import Piece

# Nobody's model is called this.
_MARK = uuid.uuid4().hex
_TEXT, _REASON = f"text-{_MARK}", f"reason-{_MARK}"
_INDEX = uuid.uuid4().int


class ChunkTemplate:
    """Chunks of plain pieces, as one full way of making them makes them, at a hundredth of its
    time."""

    __slots__ = ("_parts",)

    def __init__(self, make: Callable[[int, Piece], str]) -> None:
        """`make` gives the JSON of the chunk of a piece of choice `index`."""
        piece: Any = Piece(
            text=_TEXT,
            finish_reason=_REASON,  # pyright: ignore[reportArgumentType] - stands for any
            is_first=False,
            text_offset=0,
            prompt_ids=(),
            log_probs=None,
            prompt_log_probs=None,
        )
        self._parts = re.split(f'("{_TEXT}"|"{_REASON}"|{_INDEX})', make(_INDEX, piece))

    def chunk(self, index: int, piece: Piece) -> str:
        """The chunk's JSON; `piece` must be plain and not the first of its answer."""
        values = {
            f'"{_TEXT}"': json.dumps(piece.text, ensure_ascii=False),
            f'"{_REASON}"': json.dumps(piece.finish_reason),
            str(_INDEX): str(index),
        }
        return "".join([values.get(part, part) for part in self._parts])
