"""Text behind committed tokens: these stay, no byte is lost, and a whole text is read as such."""

from __future__ import annotations

import pytest
from draftline.drafters.model.vocabulary.written import Retokenizer, WrittenText, complete_len
from hypothesis import given
from hypothesis import strategies as st
from support.tools.tiny_tokenizers import byte_level_bpe, single_bytes, unigram, vocabulary

KINDS = {"bpe": byte_level_bpe, "unigram": unigram, "bytes": single_bytes}
PARTS = st.sampled_from(
    ["the", " cat", "\n    ", "return", " self", ".path", "höhe", "\U0001f600", " ", "_", "12"]
)
TEXTS = st.lists(PARTS, min_size=1, max_size=30).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, more=TEXTS)
def test_committed_tokens_stay_and_the_text_follows(kind: str, text: str, more: str) -> None:
    own = vocabulary(KINDS[kind]())
    committed = own.encode(text)
    ids = Retokenizer(own).continuation(committed, more.encode())
    assert own.bytes_of(ids) == more.encode()


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, more=TEXTS)
def test_the_drafter_s_tokens_are_those_of_the_whole_text(kind: str, text: str, more: str) -> None:
    own = vocabulary(KINDS[kind]())
    tokens = own.encode(text)
    kept, following = Retokenizer(own, lookbehind=40).rewritten(tokens, more.encode())
    assert kept <= len(tokens)
    assert [*tokens[:kept], *following] == own.encode(text + more)


@given(text=TEXTS, more=st.lists(PARTS, min_size=1, max_size=8))
def test_a_text_grows_by_target_tokens_and_loses_no_byte(text: str, more: list[str]) -> None:
    target, draft = vocabulary(byte_level_bpe()), vocabulary(unigram())
    grown = WrittenText(draft, target, Retokenizer(draft), target.encode(text))
    said = text.encode()
    for part in more:
        for token in target.encode(part):
            before = list(grown.tokens)
            kept = grown.extend([token])
            assert grown.tokens[:kept] == before[:kept]
            said += target.surface(token)
            whole = draft.bytes_of(grown.tokens) + grown.held
            assert whole in (said, b" " + said)
            assert grown.held == said[complete_len(said) :]


def test_a_character_is_held_back_until_it_is_complete() -> None:
    target, draft = vocabulary(single_bytes()), vocabulary(unigram())
    text = WrittenText(draft, target, Retokenizer(draft), target.encode("a"))
    before = list(text.tokens)
    first, second = target.encode("é")
    assert text.extend([first]) == len(before)
    assert text.tokens == before
    assert text.held == "é".encode()[:1]
    text.extend([second])
    assert draft.bytes_of(text.tokens) == " aé".encode()
    assert text.held == b""
    assert Retokenizer(target).continuation([], "é".encode()[:1]) == []


def test_special_tokens_end_a_text_and_begin_another() -> None:
    target, draft = vocabulary(byte_level_bpe()), vocabulary(unigram())
    assert target.end is not None
    ids = [*target.encode("the cat"), target.end, *target.encode("the mat")]
    text = WrittenText(draft, target, Retokenizer(draft), ids)
    ends = [place for place, token in enumerate(text.tokens) if token == draft.end]
    assert len(ends) == 1
    assert text.tokens[ends[0] + 1] == draft.begin
    assert draft.bytes_of(text.tokens[ends[0] + 2 :]) == b" the mat"
    # What follows is not read together with what was before.
    text.extend(target.encode(" sat"))
    assert text.tokens[ends[0]] == draft.end


def test_a_token_that_would_begin_within_the_committed_ones_is_spelled() -> None:
    target = vocabulary(byte_level_bpe())
    [cat] = target.encode(" cat")
    parts = [*target.encode(" c")[:1], *target.encode("a")]
    assert target.bytes_of([cat]) == b" cat"
    ids = Retokenizer(target).continuation(parts, b"t sat")
    assert target.bytes_of(ids) == b"t sat"


@pytest.mark.parametrize(
    ("text", "length"), [(b"", 0), (b"a", 1), (b"a\xc3", 1), (b"\xc3\xa9", 2), (b"\xf0\x9f\x98", 0)]
)
def test_only_whole_characters_count(text: bytes, length: int) -> None:
    assert complete_len(text) == length


def test_bytes_that_are_no_text_are_spelled() -> None:
    own = vocabulary(single_bytes())
    kept, following = Retokenizer(own).rewritten(own.encode("a"), b"\xff\xfeb")
    assert (kept, own.bytes_of(following)) == (1, b"\xff\xfeb")
