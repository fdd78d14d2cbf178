"""The models of a server, the bodies that name one of them, and `/v1/models`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from ....cluster.config import EngineConfig
from ....cluster.loop_calls import collector_paused, off_loop
from ....core.errors import shortened
from ....models.load.bundled import BUNDLED_NAMES
from ...settings.settings import RequestLimits, ServerConfig
from ..engine_client import EngineClient
from ..errors import ApiError, bad_request
from ..http.callers import Caller, caller_of
from ..http.metrics import AnswerRecorder
from ..http.middleware import read_body
from ..schema.request_models import RequestModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model and its engine client.

    name      as clients see it
    config    the server's settings, with this model's parsers
    metrics   where its answers are counted
    settings  the engine's, of which `/v1/models` and `/server_info` report; None: not known
    created   seconds since 1970
    """

    name: str
    engine_client: EngineClient
    config: ServerConfig
    metrics: AnswerRecorder
    settings: EngineConfig | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> set[str]:
        """What requests and tenants' settings may call it: where it was given no name, as by other
        servers, what its setting `model` says, too."""
        engine = self.settings
        if engine is None or engine.served_model_name is not None:
            return {self.name}
        return {self.name, engine.model}

    def card(self, caller: Caller) -> dict[str, Any]:
        """The model's entry, with vLLM's extra fields and ours; the length is in tokens."""
        engine, client = self.settings, self.engine_client
        # The bundled ones have a template, and only continue code.
        is_bundled = engine is not None and engine.model in BUNDLED_NAMES
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "draftline",
            "root": self.name,
            "parent": None,
            "max_model_len": caller.context(client.max_model_len),
            "permission": [],
            "drafters": [] if engine is None else [one.source for one in engine.drafters],
            "is_chat": not is_bundled and bool(client.codec.template.source),
        }


class ServedModels:
    """All models of a server; there is at least one."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name: Mapping[str, ServedModel] = {model.name: model for model in models}
        others = {name: model for model in self.all for name in model.names}
        self._by_any_name = others | self._by_name

    @property
    def all(self) -> list[ServedModel]:
        """Every one."""
        return list(self._by_name.values())

    def usable(self, caller: Caller) -> list[ServedModel]:
        """Those that a caller may use."""
        return [model for model in self._by_name.values() if caller.may_use(model.names)]

    def find(self, asked: str | None, caller: Caller) -> ServedModel:
        """The model of a request; of one that names none, the only one there is.

        Raises `ApiError` 400 where it must name one, 403 for a model that the caller may not use,
        404 for one that is not served.
        """
        if asked is None and len(self._by_name) > 1:
            raise bad_request(
                "model", f"is missing; this server has several: {self._known(caller)}"
            )
        model = self.all[0] if asked is None else self._by_any_name.get(asked)
        if model is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model: {shortened(asked)} is not served here; known: {self._known(caller)}",
                param="model",
            )
        caller.check_model(model.name, model.names)
        return model

    def _known(self, caller: Caller) -> str:
        return ", ".join(repr(model.name) for model in self.usable(caller)) or "none"


def add_model_routes(app: FastAPI, models: ServedModels) -> None:
    """Add `/v1/models`."""

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The models of this server that the caller may use."""
        caller = caller_of(request)
        return {"object": "list", "data": [model.card(caller) for model in models.usable(caller)]}

    @app.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str, request: Request) -> dict[str, Any]:
        """One model."""
        caller = caller_of(request)
        return models.find(model_id, caller).card(caller)


RequestT = TypeVar("RequestT", bound=RequestModel)

# Reading and checking so many bytes takes about a millisecond.
INLINE_BYTES = 16_384
HEADER = "x-draftline-ignored-fields"
MAX_NAMES = 16
MAX_NAME_CHARS = 64


class Bodies:
    """Bodies of requests to a server's models."""

    def __init__(self, config: ServerConfig, models: ServedModels) -> None:
        self._config = config
        self._models = models

    async def read(self, request: Request, kind: type[RequestT]) -> tuple[RequestT, ServedModel]:
        """The body as a request of this kind, and the model that it is for.

        Raises `ApiError` 400, 403, 404 or 413.
        """
        data = await read_body(request, self._config.max_body_bytes)
        body = await self._parse(kind, data)
        caller = caller_of(request)
        model = self._models.find(getattr(body, "model", None), caller)
        caller.check_priority(getattr(body, "priority", None) or 0)
        return body, model

    async def _parse(self, kind: type[RequestT], data: bytes) -> RequestT:
        limits, ignores = self._config.limits, self._config.ignore_unknown_fields
        if len(data) <= INLINE_BYTES:
            return kind.parse(data, limits, ignore_unknown=ignores)
        return await off_loop(_parse_large, kind, data, limits, ignores=ignores)


def _parse_large(
    kind: type[RequestT], data: bytes, limits: RequestLimits, *, ignores: bool
) -> RequestT:
    with collector_paused():
        return kind.parse(data, limits, ignore_unknown=ignores)


def name_ignored(response: Response, names: Sequence[str]) -> Response:
    """The same response, with a header of the fields that were ignored, if any were.

    Names come from clients: what cannot stand in a header is replaced, and lists are cut. Values
    are never reported.
    """
    if names:
        spelled = list(dict.fromkeys(map(_spell, names)))
        more = ["..."] if len(spelled) > MAX_NAMES else []
        response.headers[HEADER] = ", ".join([*spelled[:MAX_NAMES], *more])
    return response


def _spell(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_NAME_CHARS])
