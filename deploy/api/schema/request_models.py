"""The base of all bodies: JSON, limits, strict fields, errors that name them, schemas."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from json import decoder, scanner
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from ....core.errors import RequestError
from ...settings.settings import DEFAULT_LIMITS, RequestLimits
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


NULL = {"type": "null"}
# A longer name is no misspelling of a known one, and takes long to compare.
MAX_COMPARED_CHARS = 64
# Bodies with at most so many separators are read by the standard library's C code, which keeps
# the interpreter for itself until it is done: some milliseconds for so many values.
MAX_C_VALUES = 10_000
SEPARATORS = b",:[{"
# Whole pairs are one character after reading.
HALF_PAIR = re.compile("[\ud800-\udfff]")


def allow_null(schema: dict[str, Any]) -> None:
    """Allow null for every optional property and for unknown ones; changes `schema`."""
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = NULL
    required = schema.get("required", ())
    for name, value_schema in schema.get("properties", {}).items():
        if name not in required and not _takes_null(value_schema):
            moved = {
                key: value_schema.pop(key)
                for key in list(value_schema)
                if key not in ("title", "default")
            }
            value_schema["anyOf"] = [moved, NULL]


def add_known(
    schema: dict[str, Any], refused: Mapping[str, Refused], ignored: Iterable[str]
) -> None:
    """Add the fields that are accepted with neutral values only, and the ignored ones."""
    properties = schema.setdefault("properties", {})
    for name, field in refused.items():
        values = [None, *field.neutral]
        properties[name] = {"enum": values, "description": f"not supported: {field.reason}"}
    for name in ignored:
        properties[name] = {"description": "changes nothing"}


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "null" or NULL in schema.get("anyOf", ()):
        return True
    # Without these words a schema takes anything.
    return not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


class StrictModel(BaseModel):
    """A JSON object without coercion: "1" is no number, 1.0 no whole number, true neither.

    null is as good as leaving an optional field out, also an unknown one: clients write all
    fields of what a server answered, with null where it had none.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        required = _required(cls)
        return {
            name: value for name, value in data.items() if value is not None or name in required
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        allow_null(handler.resolve_ref_schema(schema))
        return schema


@cache
def _required(model: type[BaseModel]) -> frozenset[str]:
    """Names of the required fields in JSON."""
    return frozenset(
        field.alias or name for name, field in model.model_fields.items() if field.is_required()
    )


class RequestModel(StrictModel):
    """A request body. `refused` are the known fields that are not supported."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def parse(
        cls, body: bytes, limits: RequestLimits = DEFAULT_LIMITS, *, ignore_unknown: bool = False
    ) -> Self:
        """The body as a request. Raises `ApiError` 400 or `RequestError`, naming the field.

        `ignore_unknown`: unknown fields are left out, and named in `ignored_fields`.
        """
        data = read_json(body, limits.max_json_values)
        check_sizes(data, limits)
        return cls.build(data, ignore_unknown=ignore_unknown)

    @classmethod
    def build(cls, body: Mapping[str, Any], *, ignore_unknown: bool = False) -> Self:
        """As `parse`, from parsed JSON of any size."""
        data = drop_refused(body, cls.refused)
        try:
            request = cls.model_validate(data, extra="allow" if ignore_unknown else "forbid")
            ignored = tuple(_unknown(request)) if ignore_unknown else ()
            if ignored:
                request = cls.model_validate(data, extra="ignore")
                request._ignored = ignored  # noqa: SLF001 - of its own class
            return request
        except ValidationError as error:
            details, path = _first_error(error, data)
            raise bad_request(".".join(path) or None, _describe(cls, details)) from None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        add_known(handler.resolve_ref_schema(schema), cls.refused, IGNORED)
        return schema

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Paths of the fields that were left out."""
        return self._ignored


def _first_error(error: ValidationError, data: Any) -> tuple[dict[str, Any], list[str]]:
    """The error to report, and its place in the body.

    A field of several types has errors of each; the deepest is of the type that was meant.
    """
    errors: list[dict[str, Any]] = [{**details} for details in error.errors(include_url=False)]
    errors = [details for details in errors if details["loc"][:1] == errors[0]["loc"][:1]]
    placed = [(details, list(_path(data, details))) for details in errors]
    return max(placed, key=lambda pair: (len(pair[1]), not pair[0]["type"].endswith("_type")))


def _path(data: Any, details: Mapping[str, Any]) -> Iterator[str]:
    """The parts of an error's place that stand in the body; others name one of several types."""
    loc: Sequence[str | int] = details["loc"]
    for part in loc:
        if isinstance(part, int) or (isinstance(data, dict) and part in data):
            data = data[part]
            yield str(part)
    if details["type"] == "missing":
        yield str(loc[-1])


def _unknown(value: Any) -> Iterator[str]:
    """Paths of the fields that no model knows, below `value`."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        fields = type(value).model_fields
        inner = [(field.alias or name, getattr(value, name)) for name, field in fields.items()]
    elif isinstance(value, list | tuple):
        inner = [(str(index), item) for index, item in enumerate(value)]
    else:
        return
    for name, item in inner:
        for path in _unknown(item):
            yield f"{name}.{path}"


def _describe(model: type[RequestModel], details: dict[str, Any]) -> str:
    """One sentence about a pydantic error; unknown fields get the nearest known one."""
    match details["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            known = [*model.model_fields, *model.refused, *IGNORED]
            name = str(details["loc"][-1])[:MAX_COMPARED_CHARS]
            near = difflib.get_close_matches(name, known, n=1)
            return "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
        case "model_type":
            return "must be an object"
        case "value_error":
            return str(details["ctx"]["error"])
    message = str(details["msg"])
    return f"{message[:1].lower()}{message[1:]}"


def read_json(body: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object that the body holds. Raises `ApiError` 400.

    `max_values`: numbers, texts, lists and objects that it may hold together.
    """
    num_separators = sum(body.count(separator) for separator in SEPARATORS)
    if num_separators >= max_values and (num_values := count_values(body)) > max_values:
        raise bad_request(
            None, f"the body holds {num_values} JSON values; at most {max_values} are allowed"
        )
    reader = _Decoder(parse_constant=_no_constant)
    if num_separators > MAX_C_VALUES:
        reader.use_python()
    try:
        data = reader.decode(body.decode())
    except RecursionError:
        raise bad_request(None, "the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request(None, "the body must be a JSON object")
    if b"\\ud" in body.lower() and any(HALF_PAIR.search(text) for text in texts_of(data)):
        raise bad_request(None, "the body holds half a surrogate pair")
    return data


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            left += value.values()
        elif isinstance(value, list):
            left += value


def count_values(body: bytes) -> int:
    """Most values that a body can hold, by its separators outside texts; keys count as values."""
    text = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    letters = np.frombuffer(text, dtype=np.uint8)
    is_text = np.bitwise_xor.accumulate(letters == ord('"'))
    is_separator = np.isin(letters, np.frombuffer(SEPARATORS, dtype=np.uint8))
    return 1 + int(np.count_nonzero(is_separator & ~is_text))


class _Decoder(json.JSONDecoder):
    """The standard library's decoder, whose implementation in Python can be interrupted."""

    def use_python(self) -> None:
        """Read lists and objects by the code in Python."""
        # Type stubs leave them out, as the standard library's documentation does.
        python: Any = decoder
        self.parse_object = python.JSONObject
        self.parse_array = python.JSONArray
        python = scanner
        self.scan_once = python.py_make_scanner(self)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
