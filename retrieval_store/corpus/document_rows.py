"""Documents of rows with named fields: lines of JSON, rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .documents import Chat, Document, Message, Unreadable

CHAT_FIELDS = ("messages", "conversations")
# Fields whose texts, joined, are a document; the first that a row has are taken.
TEXT_FIELDS = (("text",), ("content",), ("prompt", "completion"))
FIELDS = (*CHAT_FIELDS, *(name for names in TEXT_FIELDS for name in names))
# What data sets call the speakers, ShareGPT's names among them.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


def read_row(name: str, row: Mapping[str, Any]) -> Document | Chat | Unreadable:
    """The document of one row of named fields.

    A chat has `messages` (of `role` and `content`) or `conversations` (ShareGPT: of `from` and
    `value`); a text has `text`, `content`, or `prompt` and `completion`. Any other row gives
    `Unreadable`.
    """
    for field in CHAT_FIELDS:
        if row.get(field) is not None:
            return _chat(name, row[field])
    for fields in TEXT_FIELDS:
        parts = [row.get(field) for field in fields]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return Document(name, "".join(texts))
    return Unreadable(name, "no text field")


def _chat(name: str, entries: Any) -> Chat | Unreadable:
    turns = entries if isinstance(entries, list) else []
    messages = tuple(message for turn in turns if (message := _message(turn)) is not None)
    if not messages or len(messages) < len(turns):
        return Unreadable(name, "bad chat")
    if all(message.role != "assistant" for message in messages):
        return Unreadable(name, "chat without an answer")
    return Chat(name, messages)


def _message(entry: Any) -> Message | None:
    if not isinstance(entry, dict):
        return None
    role = ROLES.get(str(entry.get("role") or entry.get("from")).lower())
    content = _content(entry["content"] if "content" in entry else entry.get("value"))
    return None if role is None or content is None else Message(role, content)


def _content(value: Any) -> str | None:
    """A text, or the texts of a list of parts; None for anything else, such as a picture."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = [part.get("text") for part in value if isinstance(part, dict)]
    parts = [text for text in texts if isinstance(text, str)]
    return "".join(parts) if parts and len(parts) == len(value) else None
