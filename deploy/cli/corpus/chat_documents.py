"""Chats as the target sees them: its chat template's text, of which the answers are judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError

from ....core.errors import ConfigError
from ....retrieval_store.corpus.documents import Chat, Document, Span, Unreadable


def render_chats(
    found: Iterable[Document | Chat | Unreadable], tokenizer: Any, model: str
) -> Iterator[Document | Unreadable]:
    """The same with a document in place of every chat.

    A chat that the template refuses, or whose answers it changes, is `Unreadable`. Raises
    `ConfigError` at the first chat if the model has no chat template.
    """
    for one in found:
        if not isinstance(one, Chat):
            yield one
            continue
        if not tokenizer.chat_template:
            raise ConfigError(
                "input",
                f"{one.name} is a chat, but the model {model} has no chat template; "
                "give texts, or a model that has one",
            )
        yield _render(one, tokenizer)


def _render(chat: Chat, tokenizer: Any) -> Document | Unreadable:
    turns = [{"role": one.role, "content": one.content} for one in chat.messages]
    try:
        text = _text(tokenizer, turns)
        answers = _answers(tokenizer, turns, text)
    except TemplateError:
        return Unreadable(chat.name, "refused by the chat template")
    if answers is None:
        return Unreadable(chat.name, "answer changed by the chat template")
    return Document(chat.name, text, answers)


def _answers(tokenizer: Any, turns: list[dict[str, str]], text: str) -> tuple[Span, ...] | None:
    """Where the assistant's words stand; None if one of its turns is not there as it was given."""
    spans: list[Span] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        # What stands before an answer is what the model is asked with, up to where the template
        # treats earlier turns otherwise than the last one.
        asked = _text(tokenizer, turns[:index], generate=True) if index else ""
        begin = max(_shared(asked, text), spans[-1].stop if spans else 0)
        answer = turn["content"].strip()
        start = text.find(answer, begin)
        if start < 0:
            return None
        spans.append(Span(start, start + len(answer)))
    return tuple(spans)


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _text(tokenizer: Any, turns: list[dict[str, str]], *, generate: bool = False) -> str:
    return tokenizer.apply_chat_template(turns, add_generation_prompt=generate, tokenize=False)
