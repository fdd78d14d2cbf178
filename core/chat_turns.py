"""A request's chat, for drafters that read it by a chat template of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .errors import require

FIELD = "chat"
ROLES = ("system", "developer", "user", "assistant")
MAX_TURNS = 1024
# About as many bytes as the ids of the longest prompts of today; longer chats are read as text.
MAX_CHAT_CHARS = 2**18


class ChatTurn(NamedTuple):
    """One message: who says it, one of `ROLES`, and its text."""

    role: str
    content: str


def check_turns(turns: Sequence[ChatTurn]) -> None:
    """Raise `RequestError` for what is no chat, too long, or cannot be sent."""
    require(isinstance(turns, tuple), FIELD, "must be a tuple of turns")
    require(len(turns) <= MAX_TURNS, FIELD, f"must have at most {MAX_TURNS} turns")
    is_text = all(
        isinstance(turn, ChatTurn) and turn.role in ROLES and isinstance(turn.content, str)
        for turn in turns
    )
    require(is_text, FIELD, f"must be turns of texts by {', '.join(ROLES)}")
    length = sum(len(turn.content) for turn in turns)
    require(length <= MAX_CHAT_CHARS, FIELD, f"must have at most {MAX_CHAT_CHARS} characters")
    require(all(map(_is_utf8, turns)), FIELD, "must not hold half a surrogate pair")


def _is_utf8(turn: ChatTurn) -> bool:
    try:
        turn.content.encode()
    except UnicodeEncodeError:
        return False
    return True
