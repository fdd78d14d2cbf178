"""Bytes for raw sockets: half requests, wrong lengths, broken chunks, and noise."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from .values import MARKER

KEY = f"authorization: Bearer {MARKER}\r\n".encode()
BODY = b'{"prompt": "' + MARKER.encode() + b'", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" + KEY
WHOLE = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What a raw connection sends.

    pieces     sent one after the other, `pause_s` apart
    is_shut    the client says that nothing more comes, and reads on
    is_read    it reads what is answered; otherwise it closes at once
    """

    kind: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    is_shut: bool = False
    is_read: bool = True


ODD = [
    b"", b"\0" * 100, b"\r\n" * 2000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n",
    b"GET /" + MARKER.encode() * 10_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /v1/models/" + MARKER.encode() + b"%00%ff%2e%2e HTTP/1.1\r\nhost: a\r\n\r\n",
    b"G\xc3\xa9T /health HTTP/1.1\r\n\r\n", b"BREW /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET http://[::1/health HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n",
    b"GET //\\..//health?%%%=%zz#" + MARKER.encode() + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: " + MARKER.encode() + b"\r\nsec-websocket-version: 13\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost a\r\n\r\n", b"GET /health HTTP/1.1\r\n: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx-" + MARKER.encode() + b": \xff\xfe\0\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"GET /health HTTP/1.1\r\na: " + MARKER.encode() * 20_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx-request-id: " + MARKER.encode() + b"\xff\r\n\r\n",
    POST + b"content-length: -1\r\n\r\n" + BODY, POST + b"content-length: 5\r\n\r\n" + BODY,
    POST + b"content-length: 99999\r\n\r\n" + BODY, POST + b"content-length: 0x10\r\n\r\n" + BODY,
    POST + b"content-length: " + b"9" * 400 + b"\r\n\r\n" + BODY,
    POST + b"content-length: 99999999999\r\n\r\n" + BODY,
    POST + b"content-length: 5\r\ncontent-length: 50\r\n\r\n" + BODY,
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + BODY,
    POST + b"transfer-encoding: chunked\r\n\r\n" + BODY,
    POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
    POST + b"transfer-encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 3000 + b"0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 3000 + b"\r\n",
    POST + b"transfer-encoding: gzip\r\n\r\n" + BODY, POST + b"content-encoding: gzip\r\n\r\n",
    POST + b"\r\n", POST[:30], WHOLE[:-4], WHOLE, WHOLE * 3, WHOLE * 40, GET * 200, WHOLE + GET,
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer \xff" + KEY + b"\r\n",
    b"GET /load HTTP/1.1\r\nhost: a\r\n" + KEY + b"range: bytes=5-\r\n\r\n",
    b"DELETE /v1/responses/" + MARKER.encode() + b" HTTP/1.1\r\nhost: a\r\n" + KEY + b"\r\n",
    b"PUT /v1/completions HTTP/1.1\r\nhost: a\r\n" + KEY + b"content-length: 0\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n", b"POST /ping HTTP/1.1\r\nhost: a\r\n\r\n",
    GET + b"garbage " + MARKER.encode() + b"\r\n\r\n" + GET,
]  # fmt: skip


@st.composite
def _garbage(draw: st.DrawFn) -> Garbage:
    whole = draw(st.one_of(st.sampled_from(ODD), st.sampled_from(ODD), st.binary(max_size=400)))
    if draw(st.sampled_from([False, False, True])) and whole:
        # A few bytes changed.
        changed = bytearray(whole)
        for _ in range(draw(st.integers(1, 3))):
            changed[draw(st.integers(0, min(len(changed), 300) - 1))] = draw(st.integers(0, 255))
        whole = bytes(changed)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    bounds = [0, *cuts, len(whole)]
    pieces = [whole[begin:end] for begin, end in pairwise(bounds)]
    if draw(st.sampled_from([False, False, True])):
        pieces = pieces[:-1]
    return Garbage(
        kind="garbage",
        pieces=tuple(pieces),
        pause_s=draw(st.sampled_from([0.0, 0.0, 0.001, 0.05])),
        is_shut=draw(st.booleans()),
        is_read=draw(st.sampled_from([True, True, False])),
    )


garbage: st.SearchStrategy[Garbage] = _garbage()
