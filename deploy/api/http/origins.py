"""What pages of other sites may send (CORS)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import SAFELISTED_HEADERS, CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from ...settings.settings import ServerConfig

ASKED = "access-control-request-headers"


class AllowedOrigins(CORSMiddleware):
    """Starlette's CORS, with names of headers that may end in `*`.

    A client's headers are a family, to which its next version adds one: `x-stainless-*`.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, *, exposed: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=config.cors_allow_origins,
            allow_methods=config.cors_allow_methods,
            # Answers name the headers that were asked for, which are checked here.
            allow_headers=("*",),
            allow_credentials=config.cors_allow_credentials,
            expose_headers=exposed,
        )
        names = {name.lower() for name in (*SAFELISTED_HEADERS, *config.cors_allow_headers)}
        self._names = {name for name in names if not name.endswith("*")}
        self._prefixes = tuple(name[:-1] for name in names if name.endswith("*"))

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks what a page may send."""
        asked = (name.strip().lower() for name in request_headers.get(ASKED, "").split(","))
        refused = [
            name
            for name in asked
            if name and name not in self._names and not name.startswith(self._prefixes)
        ]
        if refused:
            return PlainTextResponse(
                f"headers that server.cors_allow_headers does not allow: {', '.join(refused)}", 400
            )
        return super().preflight_response(request_headers)
