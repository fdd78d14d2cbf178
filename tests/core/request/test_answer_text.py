"""The text that is made of tokens elsewhere is the one that the stop rule makes."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.core.request.output import Delta
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import AnswerText, SilentStream, StopRule
from hypothesis import given
from hypothesis import strategies as st


class Pairs:
    """Every second token makes the text of two final; what is left comes with the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held += chr(ord("a") + token_id)
        return self.flush() if len(self.held) == 2 else ""

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def delta(tokens: Sequence[int], text: str, reason: object) -> Delta:
    return Delta(
        request_id="r", token_ids=tuple(tokens), sources=("target",) * len(tokens), text=text,
        finish_reason=reason,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


@given(
    steps=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=8),
    stop_ids=st.sets(st.integers(0, 5), max_size=2),
    eos=st.sets(st.integers(0, 5), max_size=1),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 3),
    includes=st.booleans(),
)
def test_without_stop_texts_tokens_and_the_end_say_all(
    steps: list[list[int]], stop_ids: set[int], eos: set[int], max_tokens: int, min_tokens: int,
    includes: bool,
) -> None:  # fmt: skip
    params = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=tuple(stop_ids), include_stop_str_in_output=includes,
        min_tokens=min(min_tokens, max_tokens),
    )  # fmt: skip
    with_text = StopRule(params, tuple(eos), max_tokens, Pairs())
    silent = StopRule(params, tuple(eos), max_tokens, SilentStream())
    texts = AnswerText(params, Pairs())
    for step in steps:
        expected, found = with_text.advance(step), silent.advance(step)
        assert found == expected._replace(text="")
        tokens = step[: found.num_tokens]
        assert texts.advance(tokens, found.finish_reason) == expected.text
        if found.finish_reason is not None:
            return


def test_what_was_cut_at_a_stop_text_stays() -> None:
    texts = AnswerText(SamplingParams(stop=("x",)), Pairs())
    cut = delta([1, 2, 3], "b", "stop")
    assert texts.completed(cut) is cut


def test_ends_without_a_rest() -> None:
    assert AnswerText(SamplingParams(), Pairs()).advance([], "length") == ""
    texts = AnswerText(SamplingParams(), Pairs())
    assert texts.completed(delta([0], "", None)).text == ""
    # Cancelled: nobody reads on.
    assert texts.advance([], "cancelled") == ""
    assert texts.completed(delta([1], "", None)).text == "ab"
