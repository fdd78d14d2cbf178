"""The page at `/ui`, on which an operator watches drafts at work.

Its files hold nothing secret and need no key; what they show comes from routes that do. Paths in
them are relative, so that the server may stand behind any prefix.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import FastAPI, Response

FOLDER = Path(__file__).parents[2] / "assets" / "ui"
PATH = "/ui"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but the page's own files may run, and nobody may frame it: it handles the key.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# By path; only these are served, whatever else lies in the folder.
FILES = {
    PATH if file.name == PAGE else f"{PATH}/{file.name}": file
    for file in sorted(FOLDER.iterdir())
    if file.suffix in MEDIA_TYPES
}


def add_live_page(app: FastAPI) -> None:
    """Serve the page and its files, which are read now."""
    for path, file in FILES.items():
        answer = partial(_answer, file.read_bytes(), MEDIA_TYPES[file.suffix])
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)


async def _answer(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=HEADERS)
