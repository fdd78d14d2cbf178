"""The cases of a fuzz run: requests over the whole schema, and bytes that are no requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from support.fuzz.http_values import (
    COMMON,
    MARKER,
    MESSAGES,
    RESPONSES,
    Strategy,
    anything,
    numbers,
    short_texts,
    structured_outputs,
    texts,
    tool_choices,
    tools,
    wrong,
)

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


Schema = Mapping[str, Any]
NOT_SUPPORTED = "not supported"


class Schemas:
    """Values that the schemas of a document allow, or nearly: not all limits are in a schema.

    hints  strategies for properties of these names, wherever they stand
    """

    def __init__(self, document: Schema, hints: Mapping[str, Strategy]) -> None:
        self._definitions: Mapping[str, Schema] = document["components"]["schemas"]
        self._hints = hints
        self._made: dict[str, Strategy] = {}

    def fields(self, path: str, document: Schema) -> tuple[dict[str, Strategy], list[str]]:
        """The properties of the body that is posted to a path; of them, the required ones.

        Properties that the server knows and refuses are left out.
        """
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        schema = self._definitions[_name_of(body["schema"]["$ref"])]
        served = {
            name: self._property(name, inner)
            for name, inner in schema["properties"].items()
            if not inner.get("description", "").startswith(NOT_SUPPORTED)
        }
        return served, list(schema.get("required", ()))

    def _property(self, name: str, schema: Schema) -> Strategy:
        return self._hints[name] if name in self._hints else self.values(schema)

    def values(self, schema: Schema) -> Strategy:
        """Values that a schema allows."""
        if "$ref" in schema:
            return self._referred(_name_of(schema["$ref"]))
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return st.one_of([self.values(one) for one in schema[key]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        make: dict[str, Callable[[Schema], Strategy]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda _: texts,
            "integer": _integers,
            "number": lambda _: st.floats(-2, 3) | numbers,
            "boolean": lambda _: st.booleans(),
            "null": lambda _: st.none(),
        }
        kind = schema.get("type")
        return make[kind](schema) if isinstance(kind, str) else anything

    def _referred(self, name: str) -> Strategy:
        if name not in self._made:
            self._made[name] = st.deferred(lambda: self.values(self._definitions[name]))
        return self._made[name]

    def _object(self, schema: Schema) -> Strategy:
        properties = schema.get("properties")
        if properties is None:
            inner = schema.get("additionalProperties")
            values = self.values(inner) if isinstance(inner, Mapping) else anything
            keys = st.integers(0, 300).map(str) | short_texts
            return st.dictionaries(keys, values, max_size=4)
        required = schema.get("required", ())
        made = {name: self._property(name, inner) for name, inner in properties.items()}
        return st.fixed_dictionaries(
            {name: made[name] for name in required},
            optional={name: made[name] for name in made if name not in required},
        )

    def _array(self, schema: Schema) -> Strategy:
        least = schema.get("minItems", 0)
        return st.lists(self.values(schema.get("items", {})), min_size=least, max_size=least + 3)


def _integers(schema: Schema) -> Strategy:
    least = max(schema.get("minimum", -2), -2)
    return st.integers(least, min(schema.get("maximum", 300), 300))


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]


PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
# Routes that answer with text, which are asked more often.
NUM_TEXT_PATHS = 4
# Values of fields that a route spells in its own way.
HINTS = {
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
}
# The name that each route gives to the most tokens of an answer.
TOKEN_LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
# Bodies are large, and those that were made before are made again.
UNCHECKED = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
FEW_TOKENS = st.integers(1, 6)
MOST_OPTIONAL_FIELDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzRequest:
    """A body to post.

    leave_after    events of a stream after which the client goes; None: it stays to the end
    leave_s        seconds after which it goes, whatever came
    """

    kind: str
    path: str
    body: bytes
    leave_after: int | None = None
    leave_s: float | None = None


Case = FuzzRequest | Garbage


def make_cases(document: Mapping[str, Any], count: int, seed_value: int) -> list[Case]:
    """So many different cases; the same for the same document, versions and seed."""
    made: dict[Case, None] = {}
    strategy = st.sampled_from(range(20)).flatmap(
        lambda draw: garbage if draw < 3 else _requests(document)
    )

    @seed(seed_value)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=UNCHECKED,
    )
    @given(strategy)
    def note(case: Case) -> None:
        assume(case not in made)
        made[case] = None

    note()
    return list(made)


def _requests(document: Mapping[str, Any]) -> st.SearchStrategy[FuzzRequest]:
    key = id(document)
    if key not in _MADE:
        _MADE[key] = st.one_of(
            *(
                _posts(document, path)
                for path in (*PATHS[:NUM_TEXT_PATHS], *PATHS[:NUM_TEXT_PATHS], *PATHS)
            ),
            _grammars(),
            _grammars(),
            _texts(),
        )
    return _MADE[key]


_MADE: dict[int, st.SearchStrategy[FuzzRequest]] = {}


@st.composite
def _posts(draw: st.DrawFn, document: Mapping[str, Any], path: str) -> FuzzRequest:
    """Bodies with some of the path's fields; many with one or two that hold something else."""
    hints = COMMON | HINTS.get(path, {})
    fields, required = Schemas(document, hints).fields(path, document)
    chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=MOST_OPTIONAL_FIELDS))
    body = {name: draw(fields[name]) for name in sorted({*required, *chosen})}
    limit = TOKEN_LIMITS.get(path)
    if limit is not None and not {limit, "max_tokens"} & body.keys():
        body[limit] = draw(FEW_TOKENS)
    if "stream_options" in body:
        body["stream"] = True
    kind = "schema"
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        kind = "border"
        name = draw(st.sampled_from(sorted(fields)) | texts.map(lambda text: text[:60]))
        body[name] = draw(wrong)
    # A client that leaves is one of a stream, mostly.
    leaves = draw(st.sampled_from([None, None, None, None, "events", "seconds"]))
    if leaves == "events":
        body["stream"] = True
    return FuzzRequest(
        kind=f"{kind}, leaves" if leaves else kind,
        path=path,
        body=_encoded(body),
        leave_after=draw(st.integers(0, 6)) if leaves == "events" else None,
        leave_s=draw(st.floats(0, 0.2)) if leaves == "seconds" else None,
    )


@st.composite
def _grammars(draw: st.DrawFn) -> FuzzRequest:
    """Longer answers in forms that are costly to keep to."""
    path = draw(st.sampled_from(PATHS[:2]))
    most = draw(st.sampled_from([4, 30, 60]))
    body: dict[str, Any] = {
        "max_tokens": most,
        "min_tokens": draw(st.sampled_from([0, most])),
        "temperature": draw(st.sampled_from([0, 1.0, 2.0])),
        "stream": draw(st.booleans()),
        "structured_outputs": draw(structured_outputs),
    }
    if path == "/v1/completions":
        body["prompt"] = MARKER
    else:
        body["messages"] = [{"role": "user", "content": MARKER}]
        if draw(st.booleans()):
            del body["structured_outputs"]
            body |= {"tools": draw(tools), "tool_choice": draw(tool_choices)}
    return FuzzRequest(kind="grammar", path=path, body=_encoded(body))


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _texts() -> st.SearchStrategy[FuzzRequest]:
    """Bodies that are no JSON, or too deep, long or odd for most readers of it."""
    odd = [
        b"", b"null", b"[]", b"1", b'"' + MARKER.encode() + b'"', b"{", b'{"prompt":', b"\xff\xfe",
        b'{"prompt": "\xff"}', b'{"prompt": "a", "prompt": "b", "max_tokens": 1}',
        b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": "a", "max_tokens": -Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": [' + b"1," * 300_000 + b"1]}", b'{"' + b"k" * 100_000 + b'": 1}',
        b'{"messages": [' + b"{}," * 5000 + b"{}]}", b" " * 5_000_000,
        b'{"messages": [{"role": "user", "content": [' + b'{"type":"text","text":"a"},' * 9000
        + b'{"type":"text","text":"a"}]}], "max_tokens": 1}',
        json.dumps({"prompt": MARKER * 80_000, "max_tokens": 1}).encode(),
        json.dumps({"prompt": [MARKER * 300] * 256, "max_tokens": 1}).encode(),
    ]  # fmt: skip
    return st.builds(
        lambda path, body: FuzzRequest(kind="text", path=path, body=body),
        st.sampled_from(PATHS),
        st.sampled_from(odd) | st.binary(max_size=200),
    )
