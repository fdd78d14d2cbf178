"""OpenAI fields that draftline knows but does not support yet, and the values that change nothing.

Such a field is accepted with a neutral value only: nothing a client asks for is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import bad_request

_SHARED: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}

COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = _SHARED | {
    "best_of": (1,),
    "suffix": ("",),
}

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = _SHARED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
}

# They identify the caller and never change an answer.
IGNORED = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


def drop_refused(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """`body` without ignored and neutral fields; 400 naming a field that asks for something.

    null is neutral for all of them.
    """
    kept = {}
    for name, value in body.items():
        if name in IGNORED:
            continue
        if name not in neutral:
            kept[name] = value
        elif value is not None and not any(_same(value, item) for item in neutral[name]):
            raise bad_request(name, f"not supported yet; {_advice(neutral[name])}")
    return kept


def _same(value: Any, item: Any) -> bool:
    # True == 1 in Python, and `logprobs: 0` does not mean `logprobs: false`.
    return isinstance(value, bool) == isinstance(item, bool) and value == item


def _advice(values: tuple[Any, ...]) -> str:
    allowed = " or ".join(repr(value) for value in values)
    return f"leave it out or send {allowed}" if allowed else "leave it out"
