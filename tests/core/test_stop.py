import pytest
from draftline.core.sampling_params import SamplingParams
from draftline.core.stop import StopRule
from hypothesis import given
from hypothesis import strategies as st
from support.letters import Letters


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def rule(max_tokens: int = 100, eos: tuple[int, ...] = (), **params: object) -> StopRule:
    return StopRule(SamplingParams(**params), eos, max_tokens, Letters())


def test_a_stop_text_is_cut_and_ends_at_the_token_that_completes_it() -> None:
    assert rule(stop=("cd",)).advance(ids("abcdef")) == (4, "ab", "stop")


def test_a_beginning_stop_text_is_held_back_until_it_is_decided() -> None:
    stop = rule(stop=("cde",))
    assert stop.advance(ids("abcd")) == (4, "ab", None)
    assert stop.advance(ids("f")) == (1, "cdf", None)


def test_the_earliest_stop_text_wins() -> None:
    assert rule(stop=("bcd", "c")).advance(ids("abcd")) == (3, "ab", "stop")


def test_eos_belongs_to_the_tokens_and_not_to_the_text() -> None:
    assert rule(eos=(2,)).advance(ids("abcd")) == (3, "ab", "stop")
    assert rule(eos=(2,), ignore_eos=True).advance(ids("abcd")) == (4, "abcd", None)
    assert rule(stop_token_ids=(1,), ignore_eos=True).advance(ids("abcd")) == (2, "a", "stop")


def test_the_longest_length_gives_out_held_text() -> None:
    stop = rule(max_tokens=3, stop=("cd",))
    assert stop.advance(ids("ab")) == (2, "ab", None)
    assert stop.num_tokens_left == 1
    assert stop.advance(ids("cd")) == (1, "c", "length")


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
    assert stop.advance([0, 1, 2]) == (3, "b?", "length")


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
    assert (taken, said, reason) == whole
    starts = [text.find(stop) for stop in stops if stop in text]
    if reason == "stop":
        completed = text[:taken]
        assert any(completed.endswith(stop) for stop in stops)
        assert said == completed[: min(completed.find(s) for s in stops if s in completed)]
    else:
        assert not starts
        assert text.startswith(said)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "max_tokens", "top_k", "seed"])
@pytest.mark.parametrize("value", [-1, "1", float("nan"), True, 1e300, [1]])
def test_bad_parameters_name_their_field(field: str, value: object) -> None:
    from draftline.core.errors import RequestError

    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
