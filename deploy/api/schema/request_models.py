"""The base of all bodies: JSON read in turns, strict fields, errors that name them, schemas."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from json import decoder, scanner
from typing import Any, ClassVar, Self

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

from ...settings.limits import DEFAULT_LIMITS, RequestLimits
from ..errors import bad_request
from .size_checks import IGNORED, Refused, check_sizes, drop_refused

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
