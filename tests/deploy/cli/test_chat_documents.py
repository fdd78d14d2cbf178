"""Chats become documents of which the answers alone are judged, whatever the template does."""

from __future__ import annotations

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.corpus.build import render_chats
from draftline.retrieval_store.corpus.documents import Chat, Document, Message, Unreadable
from support.fakes.fake_engine import byte_tokenizer

PLAIN = (
    "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As of a model that thinks: what it thought before is left out of earlier turns.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSING = "{{ raise_exception('roles must take turns') }}"
TURNS = (
    Message("system", "a"),
    Message("user", "yes or no?"),
    Message("assistant", "  yes "),
    Message("user", "yes"),
    Message("assistant", "yes\nyes"),
)


def render(template: str, turns: tuple[Message, ...] = TURNS) -> Document | Unreadable:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    [found] = render_chats([Chat("c", turns)], tokenizer, "m")
    return found


@pytest.mark.parametrize("template", [PLAIN, THINKING])
def test_the_answers_are_found(template: str) -> None:
    found = render(template)
    assert isinstance(found, Document)
    assert found.answers is not None
    first, second = found.answers
    assert [found.text[span.start : span.stop] for span in (first, second)] == ["yes", "yes\nyes"]
    marker = "<assistant>"
    assert found.text[: first.start].rstrip().endswith(marker)
    assert found.text[: first.start].count(marker) == 1
    assert found.text[: second.start].count(marker) == 2
    assert second.stop >= len(found.text) - len("</>")


def test_an_answer_before_any_question_is_found() -> None:
    found = render(PLAIN, (Message("assistant", "hello"), Message("user", "hello")))
    assert isinstance(found, Document)
    assert found.answers == ((len("<assistant>"), len("<assistant>hello")),)


def test_what_a_template_refuses_or_changes_is_told() -> None:
    assert render(REFUSING) == Unreadable("c", "refused by the chat template")
    turns = (Message("user", "a"), Message("assistant", "<think>b</think>c"))
    changed = Unreadable("c", "answer changed by the chat template")
    assert render(THINKING, turns) == changed


def test_a_model_without_a_template_is_told_by_name() -> None:
    tokenizer = byte_tokenizer(chat=False)
    texts = [Document("t", "text"), Unreadable("u", "not UTF-8")]
    assert list(render_chats(texts, tokenizer, "m")) == texts
    with pytest.raises(ConfigError, match=r"c is a chat, but the model m has no chat template"):
        list(render_chats([Chat("c", TURNS)], tokenizer, "m"))
