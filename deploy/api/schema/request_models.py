"""What every request body shares: strict parsing, errors that name the field, JSON schemas."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, get_args

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
from ..json_body import read_json
from .refused_fields import IGNORED, Refused, drop_refused
from .size_checks import check_sizes

NULL = {"type": "null"}


def allow_null(schema: dict[str, Any]) -> None:
    """Every optional property may be null, in place."""
    required = schema.get("required", ())
    for name, found in schema.get("properties", {}).items():
        if name not in required and not _takes_null(found):
            moved = {key: found.pop(key) for key in list(found) if key not in ("title", "default")}
            found["anyOf"] = [moved, NULL]


def add_known(
    schema: dict[str, Any], refused: Mapping[str, Refused], ignored: Iterable[str]
) -> None:
    """Add the fields that are taken with neutral values only, and those that nothing reads."""
    properties = schema.setdefault("properties", {})
    for name, one in refused.items():
        values = [None, *one.neutral]
        properties[name] = {"enum": values, "description": f"not supported: {one.reason}"}
    for name in ignored:
        properties[name] = {"description": "changes nothing"}


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "null" or NULL in schema.get("anyOf", ()):
        return True
    # Without these words a schema takes anything.
    return not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}


# A longer name is no misspelling of a known one, and takes long to compare.
MAX_COMPARED_CHARS = 64


class StrictModel(BaseModel):
    """A JSON object without coercion: "1" is no number, 1.0 no whole number, true neither.

    null is as good as leaving a field out: servers and clients write it where nothing is meant.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        dropped = _not_nullable(cls)
        return {
            name: value for name, value in data.items() if value is not None or name not in dropped
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        allow_null(handler.resolve_ref_schema(schema))
        return schema


@cache
def _not_nullable(model: type[BaseModel]) -> frozenset[str]:
    """Optional fields whose type has no null of its own, by their names in JSON."""
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if not field.is_required()
        and field.annotation is not Any
        and type(None) not in get_args(field.annotation)
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

        `ignore_unknown`: fields that nobody knows are left out, and named in `ignored_fields`.
        """
        data = read_json(body, limits.max_json_values)
        check_sizes(data, limits)
        return cls.build(data, ignore_unknown=ignore_unknown)

    @classmethod
    def build(cls, body: Mapping[str, Any], *, ignore_unknown: bool = False) -> Self:
        """As `parse`, of what the JSON holds, of any size."""
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
    """What to tell of, and where it stands in the body.

    A field of several types has errors of each; the deepest is of the type that was meant.
    """
    found: list[dict[str, Any]] = [{**details} for details in error.errors(include_url=False)]
    found = [details for details in found if details["loc"][:1] == found[0]["loc"][:1]]
    placed = [(details, list(_path(data, details))) for details in found]
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
        inner = [(str(index), one) for index, one in enumerate(value)]
    else:
        return
    for name, one in inner:
        for path in _unknown(one):
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
