from dataclasses import replace
from typing import SupportsIndex

import pytest
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.letters import Letters
from support.inputs.plain_stop import PlainStopRule


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def rule(max_tokens: int = 100, eos: tuple[int, ...] = (), **params: object) -> StopRule:
    return StopRule(SamplingParams(**params), eos, max_tokens, Letters())


def test_a_stop_text_is_cut_and_ends_at_the_token_that_completes_it() -> None:
    assert rule(stop=("cd",)).advance(ids("abcdef")) == (4, "ab", "stop", "cd")


def test_a_beginning_stop_text_is_held_back_until_it_is_decided() -> None:
    stop = rule(stop=("cde",))
    assert stop.advance(ids("abcd")) == (4, "ab", None, None)
    assert stop.advance(ids("f")) == (1, "cdf", None, None)


def test_the_earliest_stop_text_wins() -> None:
    assert rule(stop=("bcd", "c")).advance(ids("abcd")) == (3, "ab", "stop", "c")


def test_eos_belongs_to_the_tokens_and_not_to_the_text() -> None:
    assert rule(eos=(2,)).advance(ids("abcd")) == (3, "ab", "stop", None)
    assert rule(eos=(2,), ignore_eos=True).advance(ids("abcd")) == (4, "abcd", None, None)
    assert rule(stop_token_ids=(1,), ignore_eos=True).advance(ids("abcd")) == (2, "a", "stop", 1)


def test_a_stop_that_is_kept_ends_the_text() -> None:
    def kept(**params: tuple[object, ...]) -> StopRule:
        return rule(include_stop_str_in_output=True, **params)

    assert kept(stop=("cd",)).advance(ids("abcdef")) == (4, "abcd", "stop", "cd")
    assert kept(stop_token_ids=(1,)).advance(ids("abcd")) == (2, "ab", "stop", 1)
    in_pieces = kept(stop=("cde",))
    assert in_pieces.advance(ids("abcd")) == (4, "ab", None, None)
    assert in_pieces.advance(ids("e")) == (1, "cde", "stop", "cde")


class Words:
    """A token is a text of its own."""

    def __init__(self, words: list[str], rest: str = "") -> None:
        self.words = words
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        return self.rest


def test_of_texts_that_one_token_completes_the_one_that_begins_first_counts() -> None:
    def advance(*stop: str, kept: bool = False) -> tuple[object, ...]:
        params = SamplingParams(stop=stop, include_stop_str_in_output=kept)
        return StopRule(params, (), 9, Words(["x", "abcdy"])).advance([0, 1])

    assert advance("c", "bcd") == (2, "xa", "stop", "bcd")
    assert advance("c", "bcd", kept=True) == (2, "xabcd", "stop", "bcd")
    assert advance("bcd", "bc", kept=True) == (2, "xabc", "stop", "bc")


class CountedText(str):
    """Counts the characters of it that are read."""

    num_read = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        self.num_read += len(part)
        return part


def test_a_token_costs_the_same_however_much_of_a_stop_text_has_matched() -> None:
    counts = []
    for length in (100, 10_000):
        text = CountedText("a" * length + "b")
        stop = StopRule(SamplingParams(stop=(text,)), (), 10 * length, Letters())
        assert stop.advance(ids("a" * (length - 1))).text == ""
        text.num_read = 0
        for _ in range(20):
            stop.advance(ids("a"))
        counts.append(text.num_read)
    assert counts[0] == counts[1] < 200


def test_a_stop_text_counts_if_it_is_complete_behind_the_least_length() -> None:
    assert rule(stop=("bc",), min_tokens=2).advance(ids("abcd")) == (3, "a", "stop", "bc")
    assert rule(stop=("bc",), min_tokens=3).advance(ids("abcd")) == (4, "abcd", None, None)
    assert rule(stop=("bb",), min_tokens=2).advance(ids("bbba")) == (3, "b", "stop", "bb")


def test_a_special_token_without_text_ends_the_answer_like_a_stop_text() -> None:
    params = SamplingParams(stop=("<|x|>", "cd"), min_tokens=1)

    def new() -> StopRule:
        return StopRule(params, (), 9, Words(["a", "c", "", "d"]), {2: "<|x|>"})

    assert new().advance([0, 1, 2, 3]) == (3, "ac", "stop", "<|x|>")
    assert new().advance([2, 1, 3]) == (3, "", "stop", "cd")
    in_pieces = new()
    assert in_pieces.advance([0, 1]) == (2, "a", None, None)
    assert in_pieces.advance([2]) == (1, "c", "stop", "<|x|>")


def test_a_stop_text_that_the_flushed_rest_completes_is_named() -> None:
    params = SamplingParams(stop=("b?",), stop_token_ids=(25,))
    for last in ([2], [2, 25]):
        stop = StopRule(params, (), 3 if last == [2] else 9, Bytes())
        assert stop.advance([0, 1, *last]) == (2 + len(last), "", "stop", "b?")


def test_the_longest_length_gives_out_held_text() -> None:
    stop = rule(max_tokens=3, stop=("cd",))
    assert stop.advance(ids("ab")) == (2, "ab", None, None)
    assert stop.num_tokens_left == 1
    assert stop.advance(ids("cd")) == (1, "c", "length", None)


class Bytes:
    """Two tokens a letter, as bytes of one character are."""

    def __init__(self) -> None:
        self.pending = 0

    def push(self, token_id: int) -> str:
        self.pending += 1
        if self.pending < 2:
            return ""
        self.pending = 0
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return "?" * self.pending


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    stop = StopRule(SamplingParams(), (), 3, Bytes())
    assert stop.advance([0, 1, 2]) == (3, "b?", "length", None)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_cutting_the_offer_differently_changes_nothing(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    whole = rule(stop=tuple(stops)).advance(ids(text))
    in_pieces = rule(stop=tuple(stops))
    taken, said, reason, start = 0, "", None, 0
    while start < len(text) and reason is None:
        end = data.draw(st.integers(start + 1, len(text)))
        part = in_pieces.advance(ids(text[start:end]))
        taken, said, reason = taken + part.num_tokens, said + part.text, part.finish_reason
        start = end
    assert (taken, said, reason) == whole[:3]
    starts = [text.find(stop) for stop in stops if stop in text]
    if reason == "stop":
        completed = text[:taken]
        assert any(completed.endswith(stop) for stop in stops)
        assert said == completed[: min(completed.find(s) for s in stops if s in completed)]
    else:
        assert not starts
        assert text.startswith(said)


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(
    st.lists(st.text("abc", max_size=6), min_size=1, max_size=4),
    st.text("ab", max_size=4),
    STOPS,
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6),
    st.integers(0, 6),
    st.integers(6, 25),
)
def test_stop_texts_are_found_where_a_plain_search_finds_them(
    words: list[str],
    rest: str,
    stops: list[str],
    draft_batch: list[list[int]],
    min_tokens: int,
    max_tokens: int,
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, stop_token_ids=(3,))
    plain = PlainStopRule(params, (), max_tokens, Words(words * 4, rest))
    fast = StopRule(params, (), max_tokens, Words(words * 4, rest))
    kept_params = replace(params, include_stop_str_in_output=True, stop_token_ids=())
    kept = StopRule(kept_params, (), max_tokens, Words(words * 4, rest))
    text, kept_text = "", ""
    for offer in draft_batch:
        expected, given_out = plain.advance(offer), fast.advance(offer)
        assert given_out[:3] == expected
        text += expected[1]
        kept_offer = kept.advance(offer[: expected[0]])
        kept_text += kept_offer.text
        if expected[2] is None:
            assert kept_text == text
        elif offer[expected[0] - 1] != 3 and isinstance(given_out.stop_reason, str):
            assert kept_text == text + given_out.stop_reason
        if expected[2] is not None:
            return


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "max_tokens", "top_k", "seed"])
@pytest.mark.parametrize("value", [-1, "1", float("nan"), True, 1e300, [1]])
def test_bad_parameters_name_their_field(field: str, value: object) -> None:
    from draftline.core.errors import RequestError

    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
