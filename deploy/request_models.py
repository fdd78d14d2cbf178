"""What every request body shares: strict parsing, with errors that name the field and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from .api.json_body import read_json
from .api.schema.limits import DEFAULT_LIMITS, RequestLimits
from .api.schema.size_checks import check_sizes
from .errors import bad_request
from .refused_fields import IGNORED, drop_refused

# A longer name is no misspelling of a known one, and takes long to compare.
MAX_COMPARED_CHARS = 64


class StrictModel(BaseModel):
    """A JSON object without coercion: "1" is no number, 1.0 no whole number, true neither."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RequestModel(StrictModel):
    """A request body. `neutral` lists the OpenAI fields that are not supported yet."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> Self:
        """The body as a request. Raises `ApiError` 400 or `RequestError`, naming the field."""
        data = read_json(body, limits.max_json_values)
        check_sizes(data, limits)
        try:
            return cls.model_validate(drop_refused(data, cls.neutral))
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in details["loc"])
            message = _describe(cls, dict(details))
            raise bad_request(path or None, message) from None


def _describe(model: type[RequestModel], details: dict[str, Any]) -> str:
    """One sentence about a pydantic error; unknown fields get the nearest known one."""
    match details["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            known = [*model.model_fields, *model.neutral, *IGNORED]
            name = str(details["loc"][-1])[:MAX_COMPARED_CHARS]
            near = difflib.get_close_matches(name, known, n=1)
            return "unknown field" + (f"; did you mean {near[0]!r}?" if near else "")
        case "model_type":
            return "must be an object"
        case "value_error":
            return str(details["ctx"]["error"])
    message = str(details["msg"])
    return f"{message[:1].lower()}{message[1:]}"
