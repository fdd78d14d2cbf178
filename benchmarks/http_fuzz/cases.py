"""The cases of a fuzz run: requests over the whole schema, and bytes that are no requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from . import hard
from .garbage import Garbage, garbage
from .hints import COMMON, RESPONSES
from .schema import Schemas
from .values import MARKER, texts, wrong

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)
# The name that each route gives to the most tokens of an answer.
TOKEN_LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}
# Bodies are large, and those that were made before are made again.
UNCHECKED = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
FEW_TOKENS = st.integers(1, 6)
MOST_OPTIONAL_FIELDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A body to post.

    leave_after    events of a stream after which the client goes; None: it stays to the end
    leave_s        seconds after which it goes, whatever came
    """

    kind: str
    path: str
    body: bytes
    leave_after: int | None = None
    leave_s: float | None = None


Case = Request | Garbage


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


def _requests(document: Mapping[str, Any]) -> st.SearchStrategy[Request]:
    key = id(document)
    if key not in _MADE:
        _MADE[key] = st.one_of(
            *(_posts(document, path) for path in (*PATHS[:3], *PATHS[:3], *PATHS)),
            _grammars(),
            _grammars(),
            _texts(),
        )
    return _MADE[key]


_MADE: dict[int, st.SearchStrategy[Request]] = {}


@st.composite
def _posts(draw: st.DrawFn, document: Mapping[str, Any], path: str) -> Request:
    """Bodies with some of the path's fields; many with one or two that hold something else."""
    hints = COMMON | RESPONSES if path == "/v1/responses" else COMMON
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
    return Request(
        kind=f"{kind}, leaves" if leaves else kind,
        path=path,
        body=_encoded(body),
        leave_after=draw(st.integers(0, 6)) if leaves == "events" else None,
        leave_s=draw(st.floats(0, 0.2)) if leaves == "seconds" else None,
    )


@st.composite
def _grammars(draw: st.DrawFn) -> Request:
    """Longer answers in forms that are costly to keep to."""
    path = draw(st.sampled_from(PATHS[:2]))
    most = draw(st.sampled_from([4, 30, 60]))
    body: dict[str, Any] = {
        "max_tokens": most,
        "min_tokens": draw(st.sampled_from([0, most])),
        "temperature": draw(st.sampled_from([0, 1.0, 2.0])),
        "stream": draw(st.booleans()),
        "structured_outputs": draw(hard.structured_outputs),
    }
    if path == "/v1/completions":
        body["prompt"] = MARKER
    else:
        body["messages"] = [{"role": "user", "content": MARKER}]
        if draw(st.booleans()):
            del body["structured_outputs"]
            body |= {"tools": draw(hard.tools), "tool_choice": draw(hard.tool_choices)}
    return Request(kind="grammar", path=path, body=_encoded(body))


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _texts() -> st.SearchStrategy[Request]:
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
        lambda path, body: Request(kind="text", path=path, body=body),
        st.sampled_from(PATHS),
        st.sampled_from(odd) | st.binary(max_size=200),
    )
