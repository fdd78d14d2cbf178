"""Messages between a coordinator and a drafter server, as msgpack (`transport/typed_messages.py`).

The client sends a hello, then steps; the server answers the hello with a hello and each step with
one answer, in order. Features that a step has no room for come before it, and get no answer. Every
decoder raises `ProtocolError` for any other bytes than those that it expects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import msgspec

from ...core.arrays import UInt16
from ...core.errors import MAX_INT32, DrafterError, ProtocolError
from ...core.interfaces import PrefixCounts
from ...core.proposals import (
    MAX_ASSUMED_TOKENS,
    MAX_PROPOSAL_NODES,
    MAX_TOP_NEXT_TOKENS,
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Probe,
    Proposal,
    Query,
    TopNextTokens,
)
from ..transport.typed_messages import MessageDecoder, encode, packed_array
from .features import from_bfloat16, to_bfloat16
from .link import DrafterMessage, DrafterReport, DraftSeconds

METHOD = "/draftline.drafter.Drafter/Exchange"
PROTOCOL_VERSION = 4
DEFAULT_MAX_BYTES = 64 * 2**20
REFUSAL = "wire: not a message"
# Other releases have other messages.
NO_HELLO = "wire: not a hello; run the same draftline version on both"


class Greeting(NamedTuple):
    """What a side says of itself: its name, and what its drafter reads of the target's states."""

    name: str
    features: FeatureLayers | None = None


class Hello(NamedTuple):
    """The first message of either side. Of another version, the rest may be anything."""

    protocol_version: int
    greeting: msgspec.Raw


class HalfRows(NamedTuple):
    """`FeatureRows` with the upper halves of their numbers (bfloat16)."""

    request_id: str
    position: int
    values: UInt16


class ToDrafter(NamedTuple):
    """A step and its features, which `step` itself does not have; without one, features alone.

    The step's deadline is in seconds from now on.
    """

    step: DrafterMessage | None
    features: list[HalfRows]


class Answer(NamedTuple):
    """The proposals that answer what a message asked, one each; the report and seconds that came
    with them, if any did; whether the server will stop soon, and how many requests it has of
    others."""

    proposals: list[Proposal]
    report: DrafterReport | None
    seconds: DraftSeconds | None
    is_draining: bool = False
    num_others: int = 0


class FromDrafter(NamedTuple):
    """The answer to step `sequence`, with the requests that it is about; or what it failed on."""

    sequence: int
    request_ids: list[str]
    answer: Answer | None
    error: str = ""


_Whole = Annotated[int, msgspec.Meta(ge=0)]
_UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Int32 = Annotated[int, msgspec.Meta(ge=-MAX_INT32 - 1, le=MAX_INT32)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
_Path: Any = Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_ASSUMED_TOKENS)]
# What is too long is refused before an array is made of it.
_NODES = packed_array(MAX_PROPOSAL_NODES)
# Fields that hold less than their annotations say.
_NARROWED = {
    (FeatureLayers, "layers"): tuple[_Int32, ...],
    (FeatureLayers, "width"): _UInt32,
    (HalfRows, "position"): _UInt32,
    (DrafterMessage, "sequence"): _Whole,
    (DraftRequest, "prompt_len"): _UInt32,
    (DraftRequest, "seed"): _Whole,
    (DraftRequest, "end_ids"): tuple[_TokenId, ...],
    (Commit, "base_len"): _UInt32,
    (Query, "committed_len"): _UInt32,
    (Query, "max_nodes"): _UInt32,
    (Query, "assumed"): _Path | None,
    (FromDrafter, "sequence"): _Whole,
    (Answer, "num_others"): _Whole,
    (DrafterReport, "memory_bytes"): _Whole,
    (DrafterReport, "learning"): dict[str, _Whole],
    (PrefixCounts, "queries"): _Whole,
    (PrefixCounts, "hits"): _Whole,
    (Proposal, "tokens"): _NODES,
    (Proposal, "parents"): _NODES,
    (Proposal, "log_probs"): _NODES,
    (Proposal, "num_top_next_tokens"): _UInt32,
    (Probe, "tokens"): _NODES,
    (Probe, "offsets"): _NODES,
    (Probe, "mask"): _NODES,
    (Probe, "wanted"): _NODES,
    (Probe, "top_k"): _UInt32,
}
_hellos = MessageDecoder(Hello, NO_HELLO)
_greetings = MessageDecoder(Greeting, NO_HELLO, _NARROWED)
_steps = MessageDecoder(ToDrafter, REFUSAL, _NARROWED)
_answers = MessageDecoder(FromDrafter, REFUSAL, _NARROWED)


def encode_hello(greeting: Greeting) -> bytes:
    """The first message of either side."""
    return encode(Hello(PROTOCOL_VERSION, msgspec.Raw(encode(greeting))))


def decode_hello(data: bytes) -> Greeting:
    """What the other side says of itself."""
    version, greeting = _hellos.decode(data)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"wire: the other side speaks protocol {version}, this one {PROTOCOL_VERSION}; "
            "run the same draftline version on both"
        )
    return _greetings.decode(greeting)


def encode_step(message: DrafterMessage, budget_s: float, max_bytes: int) -> bytes:
    """A message to a drafter. Raises `ProtocolError` above `max_bytes`."""
    for query in message.queries:
        _check_path(query)
    step = replace(message, deadline=budget_s, features=())
    return _encoded(ToDrafter(step, _halves(message.features)), max_bytes)


def encode_more_features(rows: Sequence[FeatureRows], max_bytes: int) -> bytes:
    """Features that go before a step. Raises `ProtocolError` above `max_bytes`."""
    return _encoded(ToDrafter(None, _halves(rows)), max_bytes)


def decode_part(data: bytes, now: float) -> DrafterMessage | list[FeatureRows]:
    """A message to a drafter, or features that go before it.

    `now` in seconds of the clock that its deadline is of.
    """
    step, halves = _steps.decode(data)
    features = [_whole(rows) for rows in halves]
    if step is None:
        return features
    for request in step.opens:
        _expect(request.token_ids.ndim == 1, "request.token_ids: 1 dimension")
    for commit in (*step.commits, *step.last_commits):
        _check_commit(commit)
    for query in step.queries:
        _expect(0.0 <= query.step_s < math.inf, f"a step takes no {query.step_s} seconds")
        _expect(0.0 <= query.token_s < math.inf, f"a token saves no {query.token_s} seconds")
    return replace(step, deadline=now + step.deadline, features=features)


def encode_answer(
    message: DrafterMessage, proposals: Sequence[Proposal], max_bytes: int,
    report: DrafterReport | None = None, seconds: DraftSeconds | None = None, *,
    is_draining: bool = False, num_others: int = 0,
) -> bytes:  # fmt: skip
    """The answer to a message. Raises `ProtocolError` above `max_bytes`."""
    asked = [query.request_id for query in message.queries]
    _expect(len(proposals) == len(asked), f"{len(proposals)} proposals for {len(asked)} queries")
    answer = Answer(list(proposals), report, seconds, is_draining, num_others)
    return _encoded(FromDrafter(message.sequence, asked, answer), max_bytes)


def encode_error(sequence: int, error: str) -> bytes:
    """The answer to a message that the drafter failed on."""
    return encode(FromDrafter(sequence, [], None, error))


def decode_answer(data: bytes, message: DrafterMessage, source: str) -> Answer:
    """What answers `message`; its proposals are of `source`, whatever the server calls it.

    Raises `DrafterError` with what the drafter raised, `ProtocolError` if the bytes are an answer
    to something else.
    """
    sequence, request_ids, answer, error = _answers.decode(data)
    _expect(sequence == message.sequence, "not an answer to the last message")
    if error or answer is None:
        raise DrafterError(f"its server reports: {error}")
    asked = [query.request_id for query in message.queries]
    count = len(answer.proposals)
    _expect(count == len(asked), f"{count} proposals for {len(asked)} queries")
    _expect(request_ids == asked, "proposals for other requests than those asked about")
    if answer.seconds is not None:
        parts = (answer.seconds.open_s, answer.seconds.observe_s, answer.seconds.propose_s)
        are_possible = all(0 <= part < math.inf for part in parts)
        _expect(are_possible, "a drafter's seconds must be finite and not below 0")
    return answer._replace(proposals=[replace(one, source=source) for one in answer.proposals])


def _encoded(message: ToDrafter | FromDrafter, max_bytes: int) -> bytes:
    try:
        data = encode(message)
    except (TypeError, OverflowError) as error:
        raise ProtocolError(f"wire: a message has no encoding: {error}") from error
    if len(data) > max_bytes:
        raise ProtocolError(f"wire: a message of {len(data)} bytes; the limit is {max_bytes}")
    return data


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"wire: {what}")


def _check_path(query: Query) -> None:
    count = len(query.assumed or ())
    _expect(
        count <= MAX_ASSUMED_TOKENS,
        f"query.assumed: a path of {count} tokens; at most {MAX_ASSUMED_TOKENS}",
    )


def _check_commit(commit: Commit) -> None:
    _expect(commit.tokens.ndim == 1, "commit.tokens: 1 dimension")
    _expect(
        commit.probe_ids is None or commit.probe_ids.ndim == 2, "commit.probe_ids: 2 dimensions"
    )
    if commit.top_next_tokens is not None:
        _check_top(commit.top_next_tokens)


def _check_top(top: TopNextTokens) -> None:
    tokens, ids = top.tokens, top.ids
    _expect(tokens.ndim == 1 and ids.ndim == 2, "top next tokens: 1 and 2 dimensions")
    is_whole = len(tokens) == len(ids) and ids.shape[1] <= MAX_TOP_NEXT_TOKENS
    _expect(is_whole, "top next tokens: not a row for each token, or rows too long")
    is_known = min(tokens.min(initial=0), ids.min(initial=0)) >= 0
    _expect(is_known, "top next tokens: a token id is negative")


def _halves(rows: Iterable[FeatureRows]) -> list[HalfRows]:
    return [HalfRows(own.request_id, own.position, to_bfloat16(own.values)) for own in rows]


def _whole(rows: HalfRows) -> FeatureRows:
    _expect(rows.values.ndim == 2, "features.values: 2 dimensions")
    return FeatureRows(rows.request_id, rows.position, from_bfloat16(rows.values))
