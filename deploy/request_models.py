"""What every request body shares: strict parsing, with errors that name the field and the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import bad_request
from .refused_fields import IGNORED, drop_refused

# Text of a request is bounded by the body's size; lists of short texts need their own bound.
MAX_STOP_TEXTS = 16
MAX_PROMPTS = 256


class StrictModel(BaseModel):
    """A JSON object without coercion: "1" is no number, 1.0 no whole number, true neither."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RequestModel(StrictModel):
    """A request body. `neutral` lists the OpenAI fields that are not supported yet."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The body as a request. Raises `ApiError` 400 naming the field."""
        data = _json_object(body)
        try:
            return cls.model_validate(drop_refused(data, cls.neutral))
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in details["loc"])
            message = _describe(cls, dict(details))
            raise bad_request(path or None, message) from None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body, parse_constant=_no_constant)
        if b"\\ud" in body.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_request(None, "the body holds half a surrogate pair") from None
    except RecursionError:
        raise bad_request(None, "the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request(None, "the body must be a JSON object")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _describe(model: type[RequestModel], details: dict[str, Any]) -> str:
    """One sentence about a pydantic error; unknown fields get the nearest known one."""
    match details["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            known = [*model.model_fields, *model.neutral, *IGNORED]
            near = difflib.get_close_matches(str(details["loc"][-1]), known, n=1)
            return "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
        case "model_type":
            return "must be an object"
        case "value_error":
            return str(details["ctx"]["error"])
    message = str(details["msg"])
    return f"{message[:1].lower()}{message[1:]}"
