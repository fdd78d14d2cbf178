"""Whether a body keeps within the limits: looked at before anything else is done with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ....core.errors import RequestError
from ...settings.limits import RequestLimits

LISTED_TOKENS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
# Fields whose parts decide together how long a prompt is.
CHATS = ("messages", "input")


def check_sizes(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Raise `RequestError` for the first field that exceeds a limit; its types are not checked."""
    for name, value in body.items():
        _check_depth(name, value, limits)
    _check_prompts(body.get("prompt"), body.get("n"), limits)
    for name in CHATS:
        _check_chat(name, body.get(name), limits)
    _check_texts(body, limits)
    _check_lists(body, limits)
    _check_forms(body, limits)


def _check_depth(field: str, value: Any, limits: RequestLimits) -> None:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        limits.require("max_json_depth", depth, field, "levels of lists and objects")
        level = [inner for one in level for inner in _parts(one)]


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _check_prompts(prompt: Any, choices: Any, limits: RequestLimits) -> None:
    is_many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if is_many else [prompt]
    limits.require("max_prompts", len(prompts), "prompt", "prompts")
    num_chars = sum(len(one) for one in prompts if isinstance(one, str))
    limits.require("max_prompt_chars", num_chars, "prompt", "characters")
    if type(choices) is int:
        limits.require("max_answers", choices * len(prompts), "n", "answers (n times the prompts)")


def _check_chat(field: str, messages: Any, limits: RequestLimits) -> None:
    if isinstance(messages, str):
        limits.require("max_prompt_chars", len(messages), field, "characters")
    if not isinstance(messages, list):
        return
    limits.require("max_messages", len(messages), field, "messages")
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    limits.require("max_content_parts", len(parts), field, "parts of contents")
    texts = [*contents, *(part.get("text") for part in parts if isinstance(part, dict))]
    num_chars = sum(len(one) for one in texts if isinstance(one, str))
    limits.require("max_prompt_chars", num_chars, field, "characters")


def _check_texts(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Texts that are searched for while an answer is made."""
    stop = body.get("stop")
    for name, value, most in (
        ("stop", [stop] if isinstance(stop, str) else stop, "max_stop_texts"),
        ("bad_words", body.get("bad_words"), "max_bad_words"),
    ):
        if not isinstance(value, list):
            continue
        limits.require(most, len(value), name, "texts")
        lengths = [len(text) for text in value if isinstance(text, str)]
        limits.require("max_stop_chars", max(lengths, default=0), name, "characters in one text")
        limits.require("max_stop_chars_total", sum(lengths), name, "characters")


def _check_lists(body: Mapping[str, Any], limits: RequestLimits) -> None:
    listed = [(name, body.get(name), "max_listed_tokens", "token ids") for name in LISTED_TOKENS]
    listed += [
        ("tokens", body.get("tokens"), "max_detokenize_tokens", "token ids"),
        ("logit_bias", body.get("logit_bias"), "max_logit_biases", "entries"),
        ("tools", body.get("tools"), "max_tools", "tools"),
    ]
    speculative = body.get("speculative")
    if isinstance(speculative, dict):
        drafters = speculative.get("drafters")
        listed.append(("speculative.drafters", drafters, "max_named_drafters", "names"))
    for field, value, name, unit in listed:
        if isinstance(value, list | dict):
            limits.require(name, len(value), field, unit)


def _check_forms(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Grammars of all kinds: what is compiled before an answer begins."""
    _require_bytes("max_tools_bytes", "tools", body.get("tools"), limits)
    _require_bytes("max_grammar_bytes", "response_format", body.get("response_format"), limits)
    forms = body.get("structured_outputs")
    if not isinstance(forms, dict):
        return
    choice = forms.get("choice")
    if isinstance(choice, list):
        limits.require("max_choices", len(choice), "structured_outputs.choice", "texts")
    for name in ("json", "regex", "choice", "grammar"):
        _require_bytes("max_grammar_bytes", f"structured_outputs.{name}", forms.get(name), limits)
    if isinstance(schema := forms.get("json"), str):
        _check_schema_text("structured_outputs.json", schema, limits)


def _require_bytes(name: str, field: str, value: Any, limits: RequestLimits) -> None:
    if value is not None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        limits.require(name, len(text.encode()), field, "bytes")


def _check_schema_text(field: str, text: str, limits: RequestLimits) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise RequestError(field, "is nested too deeply") from None
    except ValueError:
        # Whoever reads it says what is wrong with it.
        return
    _check_depth(field, schema, limits)
