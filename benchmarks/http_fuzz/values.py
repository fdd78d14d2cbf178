"""Strategies for the values of fields: ordinary ones, those at borders, and wrong ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# Stands in every request, and must stand in no log.
MARKER = "zq7Kx9marker"

NUMBERS: list[Any] = [
    0, -1, 1, 2, 5, 20, 21, 255, 256, 257, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**31) - 1, -(2**63) - 1, 10**30, -0.0, 0.5, 1.0, 1.5, 2.0, 1e-300, 5e-324, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS = [
    "", " ", "\n", "\0", "\ud800", "\udfff\ud800", "NaN", "-1", "null", "true", "1e999", "\u202e",
    "e\u0301", "\U0001f600" * 3, "\ufeff", "\x7f\x1b[31m", "{{ 7 * 7 }}", "{% for", "<|im_end|>",
    "<think>", "<tool_call>{", "\"'\\", "../../etc/passwd", "%s%n", "a" * 5000, "\u00e9" * 3000,
]  # fmt: skip

numbers = st.sampled_from(NUMBERS) | st.integers(-3, 40) | st.floats(-3, 3)
# With surrogates, which JSON can spell and UTF-8 cannot.
odd_texts = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=()), max_size=12)
short_texts = odd_texts.map(lambda text: text[:40])
texts = st.just(MARKER) | odd_texts.map(lambda text: MARKER + text) | odd_texts
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(short_texts, inner, max_size=3),
    max_leaves=6,
)
huge = st.sampled_from([300, 1025, 5000, 20000]).flatmap(
    lambda count: st.sampled_from(
        [
            [MARKER] * count,
            list(range(count)),
            [[]] * count,
            {f"{MARKER}{index}": index for index in range(count)},
            {str(index): 1.5 for index in range(count)},
            MARKER * (count // 4),
            "\n" * count,
        ]
    )
)


def nested(depth: int, *, in_objects: bool) -> Any:
    """Lists, or objects, within one another."""
    value: Any = MARKER
    for _ in range(depth):
        value = {"a": value} if in_objects else [value]
    return value


deep = st.builds(nested, st.sampled_from([5, 62, 63, 64, 65, 200]), in_objects=st.booleans())
# What a field was not made for.
wrong = st.one_of(anything, anything, numbers, texts, huge, deep)
