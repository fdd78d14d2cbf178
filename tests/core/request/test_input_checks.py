"""The one check of token ids and of the room that a prompt leaves."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import pytest
from draftline.core.errors import RequestError
from draftline.core.request.sampling_params import answer_room, check_vocabulary, checked_prompt
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 50


@given(st.lists(st.integers(0, VOCAB - 1)))
def test_a_prompt_stays_as_it_is(token_ids: list[int]) -> None:
    prompt = checked_prompt(token_ids, VOCAB)
    assert prompt.dtype == np.int32
    assert prompt.tolist() == token_ids


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (VOCAB, "token id 50 is outside the vocabulary of 50"),
        (-1, "token id -1 is outside"),
        (10**60, "a number of 200 bits is outside"),
        (True, "must be a token id, a whole number"),
        (2.0, "must be a token id, a whole number"),
        ("a", "must be a token id, a whole number"),
        (None, "must be a token id, a whole number"),
    ],
)
def test_the_first_bad_id_is_named(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        checked_prompt([1, 2, bad, 3, bad], VOCAB)
    assert raised.value.field == "prompt[2]"


def test_other_whole_numbers_are_token_ids() -> None:
    assert checked_prompt([1, HTTPStatus.OK], 300).tolist() == [1, 200]


def test_a_list_is_checked_at_both_ends() -> None:
    check_vocabulary("tokens", [], VOCAB)
    check_vocabulary("tokens", {0, VOCAB - 1}, VOCAB)
    for bad in (-1, VOCAB):
        with pytest.raises(RequestError, match="tokens: token id"):
            check_vocabulary("tokens", [3, bad, 5], VOCAB)


@given(st.integers(0, 30), st.integers(1, 30), st.none() | st.integers(0, 40))
def test_the_room_is_what_the_prompt_leaves(prompt_len: int, most: int, limit: int | None) -> None:
    room = most - prompt_len
    fits = prompt_len > 0 and room >= (limit != 0) and (limit is None or limit <= room)
    if fits:
        assert answer_room(prompt_len, most, {"max_tokens": limit}) == room
        return
    with pytest.raises(RequestError) as raised:
        answer_room(prompt_len, most, {"max_tokens": limit})
    assert raised.value.field == ("max_tokens" if prompt_len and room > 0 else "prompt")


def test_every_limit_is_named_by_its_own_field() -> None:
    with pytest.raises(
        RequestError, match="9 and the prompt's 4 tokens exceed the cache of 12; at most 8"
    ):
        answer_room(4, 12, {"max_tokens": 8, "min_tokens": 9}, "the cache of 12")
