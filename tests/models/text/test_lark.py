"""Literals of Lark: the texts and expressions that they stand for, whatever those hold."""

from __future__ import annotations

import json
import re

import pytest
from draftline.core.errors import RequestError
from draftline.models.load.bundled import demo_path
from draftline.models.text.grammar_messages import lark_regex, lark_text
from draftline.models.text.grammar_worker import Matcher, grammar_tokenizer
from draftline.models.text.tokenizer import load_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

MODEL = load_tokenizer(demo_path())
PREPARED = grammar_tokenizer(MODEL.backend_tokenizer.to_str(), len(MODEL), [MODEL.eos_token_id])


def accepts(kind: str, value: str, text: str) -> bool:
    matcher = Matcher(PREPARED, (kind, value), len(MODEL), [MODEL.eos_token_id])
    ids = MODEL.encode(text, add_special_tokens=False)
    rows, masks = matcher.follow(ids, range(-1, len(ids) - 1))
    ends = masks[-1][MODEL.eos_token_id // 32] >> (MODEL.eos_token_id % 32) & 1
    return len(rows) == 1 + len(ids) and bool(ends)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
@example("\x7f")
@example("a\\x41\\u0041\\\\x41")
@example("//")
@example('"#\n\r\t\x00\x1f\u2028🙂')
def test_a_text_is_itself(text: str) -> None:
    for kind, value in (
        ("choice", json.dumps([text, "other"])),
        ("grammar", f"start: {lark_text(text)}"),
    ):
        assert accepts(kind, value, text)
        assert not accepts(kind, value, text + "x")


# An expression, texts that fit and that do not.
SLASHES = [
    ("/", ["/"], ["\\/", ""]),
    ("//", ["//"], ["/", ""]),
    (r"a\/b", ["a/b"], [r"a\/b"]),
    (r"a\\/b", [r"a\/b"], ["a/b", r"a\\/b"]),
    (r"a\\\/b", [r"a\/b"], ["a/b", r"a\\/b"]),
    (r"a\\\\/b", [r"a\\/b"], [r"a\/b"]),
    (r"[/]+\\", ["//\\"], ["//", "\\"]),
    (r"[^/\\]+/", ["ab/"], ["a/b", "a\\/"]),
    (r"(a/|\\)#//\d", ["a/#//1", "\\#//2"], ["a/"]),
    ("a\n/\x7f", ["a\n/\x7f"], ["a"]),
]


@pytest.mark.parametrize(("expression", "good", "bad"), SLASHES)
def test_slashes_of_expressions(expression: str, good: list[str], bad: list[str]) -> None:
    for kind, value in (
        ("regex", expression),
        ("grammar", f"start: {lark_regex(expression)} end\nend: {lark_regex('(x/)?')}"),
    ):
        assert all(accepts(kind, value, text) for text in good)
        assert not any(accepts(kind, value, text) for text in bad)


@given(st.text(st.sampled_from("\\/y."), min_size=1, max_size=8))
@example("y\\")
def test_slashes_and_backslashes_mean_what_they_do_in_python(expression: str) -> None:
    texts = ["/", "\\/", "y/y", "y\\/y", "\\\\"]
    try:
        fits = [re.fullmatch(expression, text) is not None for text in texts]
    except re.error:
        with pytest.raises(RequestError):
            accepts("regex", expression, "y")
    else:
        assert [accepts("regex", expression, text) for text in texts] == fits
