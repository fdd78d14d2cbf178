"""Checks a body first: against the limits, and for fields that are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ....core.errors import RequestError
from ...settings.limits import RequestLimits
from ..errors import bad_request

LISTED_TOKENS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
# Fields whose parts decide together how long a prompt is.
CHATS = ("system", "messages", "input")
# Fields about the caller or about caching, which never change an answer.
IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)


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
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        limits.require("max_json_depth", depth, field, "levels of lists and objects")
        level = [part for value in level for part in _parts(value)]


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _check_prompts(prompt: Any, choices: Any, limits: RequestLimits) -> None:
    is_many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if is_many else [prompt]
    limits.require("max_prompts", len(prompts), "prompt", "prompts")
    num_chars = sum(len(text) for text in prompts if isinstance(text, str))
    limits.require("max_prompt_chars", num_chars, "prompt", "characters")
    if type(choices) is int:
        limits.require("max_answers", choices * len(prompts), "n", "answers (n times the prompts)")


def _check_chat(field: str, messages: Any, limits: RequestLimits) -> None:
    if isinstance(messages, str):
        limits.require("max_prompt_chars", len(messages), field, "characters")
    if not isinstance(messages, list):
        return
    limits.require("max_messages", len(messages), field, "messages")
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    limits.require("max_content_parts", len(parts), field, "parts of contents")
    num_chars = sum(map(len, _texts(messages)))
    limits.require("max_prompt_chars", num_chars, field, "characters")


def _texts(value: Any) -> Iterator[str]:
    """All texts of messages, parts, and what tools returned in parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in ("content", "text", "thinking", "output"):
            yield from _texts(value.get(name))


def _check_texts(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check texts that are searched for during generation."""
    stop = body.get("stop")
    for name, value, most in (
        ("stop", [stop] if isinstance(stop, str) else stop, "max_stop_texts"),
        ("stop_sequences", body.get("stop_sequences"), "max_stop_texts"),
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
    """Check grammars of all kinds, which are compiled before generation."""
    _require_bytes("max_tools_bytes", "tools", body.get("tools"), limits)
    for name in ("response_format", "text", "output_config"):
        _require_bytes("max_grammar_bytes", name, body.get(name), limits)
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
        # The parser reports what is wrong with it.
        return
    _check_depth(field, schema, limits)


class Refused(NamedTuple):
    """Why a field is refused, and its neutral values beside null."""

    reason: str
    neutral: tuple[Any, ...] = ()


ANYWHERE_REFUSED: dict[str, Refused] = {
    "metadata": Refused("nothing is kept that it could label", ({},)),
    "service_tier": Refused(
        "there is one tier; priority orders requests", ("auto", "default", "standard")
    ),
    "use_beam_search": Refused("beams have no speculative form here", (False,)),
    "length_penalty": Refused("it belongs to beam search", (1,)),
    "early_stopping": Refused("it belongs to beam search", (False,)),
    "logits_processors": Refused("code of a client is not run; see logit_bias", ([],)),
    "repetition_detection": Refused("see frequency_penalty"),
    "thinking_token_budget": Refused("see max_tokens"),
    "prompt_embeds": Refused("prompts are texts or token ids"),
    "logprob_token_ids": Refused("see logprobs", ([],)),
    "return_tokens_as_token_ids": Refused("see return_token_ids", (False,)),
    "truncation_side": Refused("the oldest tokens are cut", ("left",)),
    # Tokenizers of the Rust library, which all models here have, put no spaces there.
    "spaces_between_special_tokens": Refused("it has no effect", (True, False)),
    "request_id": Refused("send the header x-request-id"),
    "kv_transfer_params": Refused("KV stays in this server", ({},)),
    "ec_transfer_params": Refused("no encoder runs here", ({},)),
    "vllm_xargs": Refused("there are no plugins", ({},)),
    "guided_json": Refused("send structured_outputs.json"),
    "guided_regex": Refused("send structured_outputs.regex"),
    "guided_choice": Refused("send structured_outputs.choice"),
    "guided_grammar": Refused("send structured_outputs.grammar"),
    "guided_decoding_backend": Refused("there is one"),
    "guided_whitespace_pattern": Refused("send structured_outputs.regex"),
    "regex": Refused("send structured_outputs.regex"),
    "ebnf": Refused("send structured_outputs.grammar"),
    "json_schema": Refused("send structured_outputs.json or response_format"),
    "stop_regex": Refused("see stop", ([],)),
    "no_stop_trim": Refused("send include_stop_str_in_output", (False,)),
    "lora_path": Refused("there are no adapters"),
    "return_hidden_states": Refused("hidden states stay in the model", (False,)),
}

COMPLETION_REFUSED: dict[str, Refused] = ANYWHERE_REFUSED | {
    "suffix": Refused("the model continues texts, it does not fill them in", ("",)),
}

CHAT_REFUSED: dict[str, Refused] = ANYWHERE_REFUSED | {
    "functions": Refused("send tools", ([],)),
    "function_call": Refused("send tool_choice", ("none", "auto")),
    "modalities": Refused("answers are text", (["text"],)),
    "audio": Refused("answers are text"),
    "prediction": Refused("drafters propose from the text itself"),
    "reasoning_effort": Refused("see chat_template_kwargs"),
    "verbosity": Refused("see max_tokens", ("medium",)),
    "web_search_options": Refused("nothing is searched"),
    "moderation": Refused("nothing is moderated"),
    "echo": Refused("send continue_final_message", (False,)),
    "add_special_tokens": Refused("the chat template writes them", (False,)),
    "mm_processor_kwargs": Refused("prompts are text", ({},)),
    "media_io_kwargs": Refused("prompts are text", ({},)),
}


def drop_refused(body: Mapping[str, Any], refused: Mapping[str, Refused]) -> dict[str, Any]:
    """`body` without ignored and neutral fields; 400 naming a field that asks for something.

    null is neutral for all of them.
    """
    kept = {}
    for name, value in body.items():
        if name in IGNORED:
            continue
        if name not in refused:
            kept[name] = value
        elif value is not None and not any(_same(value, item) for item in refused[name].neutral):
            raise bad_request(name, f"not supported: {_advice(refused[name])}")
    return kept


def _same(value: Any, item: Any) -> bool:
    # True == 1 in Python, and `logprobs: 0` does not mean `logprobs: false`.
    return isinstance(value, bool) == isinstance(item, bool) and value == item


def _advice(refused: Refused) -> str:
    allowed = " or ".join(repr(value) for value in refused.neutral)
    return f"{refused.reason}; leave it out" + (f" or send {allowed}" if allowed else "")
