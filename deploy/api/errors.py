"""Errors as the OpenAI API answers them, and as Anthropic's does: an HTTP status and JSON."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

from ...core.errors import (
    CapacityError,
    EngineClosed,
    EngineFailed,
    ReaderTooSlow,
    RequestError,
    RequestFailed,
    StageLost,
    place_of,
)

logger = logging.getLogger(__name__)

# Where no queue gives an estimate: the server recovers, or is about to be replaced.
RETRY_AFTER_S = 1
# Names of fields, and what libraries say of a grammar or a template, may hold a client's own text.
MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 100
TIMEOUT_MESSAGE = "Request server side timeout"

# The names that vLLM and OpenAI clients know (peers: `{"error": {"type": ...}}`).
ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "TimeoutError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


# The same as Anthropic's clients know them.
MESSAGE_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
MESSAGES_PATH, MODELS_PATH = "/v1/messages", "/v1/models"


class ApiError(Exception):
    """The error that a client receives: HTTP status, message, and the wrong field (`param`)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = _at_most(MAX_MESSAGE_CHARS, message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else _at_most(MAX_PARAM_CHARS, param)
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`; code is the HTTP status."""
        kind = ERROR_TYPES.get(HTTPStatus(self.status), "InternalServerError")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }

    @property
    def message_body(self) -> dict[str, Any]:
        """The error as Anthropic's API has it."""
        is_ours = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        other = "api_error" if is_ours else "invalid_request_error"
        kind = MESSAGE_ERROR_TYPES.get(HTTPStatus(self.status), other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body_for(self, scope: MutableMapping[str, Any]) -> dict[str, Any]:
        """The error in the form of the API that a request is made to."""
        return self.message_body if is_for_anthropic(scope) else self.body

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status: `Retry-After`, `WWW-Authenticate`."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def is_for_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request is one of Anthropic's API; both APIs have the models' path, and only
    clients of Anthropic's send `anthropic-version`."""
    path: str = scope["path"]
    if path.startswith(MODELS_PATH):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path.startswith(MESSAGES_PATH)


def _at_most(most: int, text: str) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def bad_request(param: str | None, message: str) -> ApiError:
    """400: the client has to change `param`."""
    text = f"{_at_most(MAX_PARAM_CHARS, param)}: {message}" if param else message
    return ApiError(HTTPStatus.BAD_REQUEST, text, param=param)


def to_api_error(error: Exception) -> ApiError:
    """The API error for `error`. Unexpected errors are logged, and their text is not sent."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(error.field, error.message)
        case CapacityError():
            seconds = error.retry_after_s or RETRY_AFTER_S
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), retry_after_s=seconds)
        case StageLost() | EngineClosed() | EngineFailed():
            reason = f"{_unavailable(error)}, please retry ({error})"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return ApiError(status, reason, retry_after_s=RETRY_AFTER_S)
        case ReaderTooSlow() | TimeoutError():
            is_slow = isinstance(error, ReaderTooSlow)
            reason = f"the client reads too slowly: {error}" if is_slow else TIMEOUT_MESSAGE
            return ApiError(HTTPStatus.REQUEST_TIMEOUT, reason)
    message = "internal server error; see the server log"
    if isinstance(error, RequestFailed):
        message = str(error)
    else:
        # Not its message, which may quote the request.
        logger.error("event=request_failed error=%s", place_of(error))
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)


def _unavailable(error: StageLost | EngineClosed | EngineFailed) -> str:
    match error:
        case StageLost():
            return "the model is recovering"
        case EngineClosed():
            return "the server is shutting down"
    return "the server is about to be replaced"
