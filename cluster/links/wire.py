"""Drafter messages as bytes: protobuf (`drafter.proto`), arrays as packed little-endian numbers.

Every decoder raises `ProtocolError` for any other bytes than those that it expects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ...core.arrays import PackedArray, pack, unpack
from ...core.errors import DrafterError, ProtocolError, RequestError
from ...core.interfaces import PrefixCounts
from ...core.proposals import (
    MAX_ASSUMED_TOKENS,
    MAX_PROPOSAL_NODES,
    MAX_TOP_NEXT_TOKENS,
    Commit,
    DraftDistributions,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    LogitsParams,
    Probe,
    Proposal,
    Query,
    TopNextTokens,
)
from . import drafter_pb2 as pb
from .features import from_bfloat16, to_bfloat16
from .link import DrafterMessage, DrafterReport, DraftSeconds

METHOD = "/draftline.drafter.Drafter/Exchange"
PROTOCOL_VERSION = 3
DEFAULT_MAX_BYTES = 64 * 2**20

Message = TypeVar("Message", pb.ToDrafter, pb.FromDrafter)

# Of arrays. numpy holds bfloat16 in `HALF`, which is as wide.
INT32, FLOAT32, BOOL = "<i4", "<f4", "|b1"
BFLOAT16, HALF = "bf16", "<u2"
# Fields of `LogitsParams` that are one number, absent where they are off.
NUMBERS = (
    "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip


class Greeting(NamedTuple):
    """What a side says of itself: its name, and what its drafter reads of the target's states."""

    name: str
    features: FeatureLayers | None = None


def encode_hello(greeting: Greeting, kind: type[Message]) -> bytes:
    """The first message of either side."""
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION, name=greeting.name)
    if greeting.features is not None:
        hello.features.layers.extend(greeting.features.layers)
        hello.features.width = greeting.features.width
    return kind(hello=hello).SerializeToString()


def decode_hello(data: bytes, kind: type[Message]) -> Greeting:
    """What the other side says of itself."""
    message = _parse(data, kind)
    if message.WhichOneof("body") != "hello":
        raise ProtocolError("wire: the first message must be a hello")
    version = message.hello.protocol_version
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"wire: the other side speaks protocol {version}, this one {PROTOCOL_VERSION}; "
            "run the same draftline version on both"
        )
    features = message.hello.features
    layers = FeatureLayers(tuple(features.layers), features.width) if features.layers else None
    return Greeting(message.hello.name, layers)


def encode_step(message: DrafterMessage, budget_s: float, max_bytes: int) -> bytes:
    """A message to a drafter. Raises `ProtocolError` above `max_bytes`."""
    step = pb.Step(sequence=message.sequence, closes=message.closes, budget_s=budget_s)
    for request in message.opens:
        step.opens.add(
            request_id=request.request_id,
            token_ids=encode_array(request.token_ids, INT32),
            prompt_len=request.prompt_len,
            temperature=request.temperature,
            seed=request.seed,
            namespace=request.namespace,
            logits_params=_encode_logits_params(request.logits_params),
            end_ids=request.end_ids,
            cache_salt=request.cache_salt,
            store=request.store,
        )
    step.commits.extend(map(_encode_commit, message.commits))
    step.last_commits.extend(map(_encode_commit, message.last_commits))
    step.features.extend(map(_encode_features, message.features))
    for query in message.queries:
        _encode_query(step.queries.add(), query)
    return _within(pb.ToDrafter(step=step).SerializeToString(), max_bytes)


def encode_more_features(rows: Sequence[FeatureRows], max_bytes: int) -> bytes:
    """Features that go before a step. Raises `ProtocolError` above `max_bytes`."""
    more = pb.MoreFeatures(features=map(_encode_features, rows))
    return _within(pb.ToDrafter(more_features=more).SerializeToString(), max_bytes)


def decode_part(data: bytes, now: float) -> DrafterMessage | list[FeatureRows]:
    """A message to a drafter, or features that go before it; `now` as in `decode_step`."""
    message = _parse(data, pb.ToDrafter)
    if message.WhichOneof("body") == "more_features":
        return [_decode_features(features) for features in message.more_features.features]
    if message.WhichOneof("body") != "step":
        raise ProtocolError("wire: expected a step")
    return _decode_step(message.step, now)


def decode_step(data: bytes, now: float) -> DrafterMessage:
    """A message to a drafter; `now` in seconds of the clock that its deadline is of."""
    message = decode_part(data, now)
    if not isinstance(message, DrafterMessage):
        raise ProtocolError("wire: expected a step")
    return message


def _decode_step(step: pb.Step, now: float) -> DrafterMessage:
    return DrafterMessage(
        step.sequence,
        tuple(step.closes),
        tuple(_decode_request(request) for request in step.opens),
        [_decode_commit(commit) for commit in step.commits],
        [_decode_query(query) for query in step.queries],
        now + step.budget_s,
        [_decode_commit(commit) for commit in step.last_commits],
        [_decode_features(features) for features in step.features],
    )


def encode_answer(
    message: DrafterMessage,
    proposals: Sequence[Proposal],
    max_bytes: int,
    report: DrafterReport | None = None,
    seconds: DraftSeconds | None = None,
    *,
    is_draining: bool = False,
    num_others: int = 0,
) -> bytes:
    """The answer to a message. Raises `ProtocolError` above `max_bytes`."""
    answer = pb.Answer(sequence=message.sequence, is_draining=is_draining, num_others=num_others)
    if report is not None:
        answer.memory_bytes = report.memory_bytes
        answer.learning.update(report.learning)
        answer.prefix_queries, answer.prefix_hits = report.prefix
    if seconds is not None:
        answer.open_s = seconds.open_s
        answer.observe_s = seconds.observe_s
        answer.propose_s = seconds.propose_s
    for query, proposal in zip(message.queries, proposals, strict=True):
        _encode_proposal(answer.proposals.add(request_id=query.request_id), proposal)
    return _within(pb.FromDrafter(answer=answer).SerializeToString(), max_bytes)


def encode_error(sequence: int, error: str) -> bytes:
    """The answer to a message that the drafter failed on."""
    return pb.FromDrafter(answer=pb.Answer(sequence=sequence, error=error)).SerializeToString()


class Answer(NamedTuple):
    """The proposals that answer what a message asked, one each; the report and seconds that came
    with them, if any did; whether the server will stop soon, and how many requests it has of
    others."""

    proposals: list[Proposal]
    report: DrafterReport | None
    seconds: DraftSeconds | None
    is_draining: bool = False
    num_others: int = 0


def decode_answer(data: bytes, message: DrafterMessage, source: str) -> Answer:
    """What answers `message`.

    Raises `DrafterError` with what the drafter raised, `ProtocolError` if the bytes are an answer
    to something else.
    """
    parsed = _parse(data, pb.FromDrafter)
    if parsed.WhichOneof("body") != "answer" or parsed.answer.sequence != message.sequence:
        raise ProtocolError("wire: not an answer to the last message")
    if parsed.answer.error:
        raise DrafterError(f"its server reports: {parsed.answer.error}")
    proposals = parsed.answer.proposals
    asked = [query.request_id for query in message.queries]
    if len(proposals) != len(asked):
        raise ProtocolError(f"wire: {len(proposals)} proposals for {len(asked)} queries")
    if [proposal.request_id for proposal in proposals] != asked:
        raise ProtocolError("wire: proposals for other requests than those asked about")
    decoded = [_decode_proposal(proposal, source) for proposal in proposals]
    answer = parsed.answer
    return Answer(
        decoded,
        _decode_report(answer),
        _decode_seconds(answer),
        answer.is_draining,
        answer.num_others,
    )


def _decode_report(answer: pb.Answer) -> DrafterReport | None:
    if not answer.HasField("memory_bytes"):
        return None
    prefix = PrefixCounts(answer.prefix_queries, answer.prefix_hits)
    return DrafterReport(answer.memory_bytes, dict(answer.learning), prefix)


def _decode_seconds(answer: pb.Answer) -> DraftSeconds | None:
    if not answer.HasField("propose_s"):
        return None
    seconds = (answer.open_s, answer.observe_s, answer.propose_s)
    if not all(0 <= part < math.inf for part in seconds):
        raise ProtocolError("wire: a drafter's seconds must be finite and not below 0")
    return DraftSeconds(*seconds)


def _parse(data: bytes, kind: type[Message]) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"wire: not a {kind.__name__} message") from error


def _within(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise ProtocolError(f"wire: a message of {len(data)} bytes; the limit is {max_bytes}")
    return data


def _decode_request(request: pb.DraftRequest) -> DraftRequest:
    return DraftRequest(
        request.request_id,
        decode_array(request.token_ids, "request.token_ids"),
        request.prompt_len,
        request.temperature,
        request.seed,
        request.namespace,
        _decode_logits_params(request.logits_params),
        tuple(request.end_ids),
        request.cache_salt,
        request.store,
    )


def _encode_logits_params(logits_params: LogitsParams) -> pb.LogitsParams:
    return pb.LogitsParams(
        **{name: getattr(logits_params, name) for name in NUMBERS},
        logit_bias=logits_params.logit_bias,
        allowed_token_ids=logits_params.allowed_token_ids,
        banned_token_ids=logits_params.banned_token_ids,
    )


def _decode_logits_params(message: pb.LogitsParams) -> LogitsParams:
    given = {name: getattr(message, name) for name in NUMBERS if message.HasField(name)}
    try:
        return LogitsParams(
            **given,
            logit_bias=dict(message.logit_bias),
            allowed_token_ids=tuple(message.allowed_token_ids) or None,
            banned_token_ids=tuple(message.banned_token_ids),
        )
    except RequestError as error:
        raise ProtocolError(f"wire: {error}") from error


def _encode_query(added: pb.Query, query: Query) -> None:
    """Fill in a query's message. Raises `ProtocolError` for too long a path."""
    added.request_id = query.request_id
    added.committed_len = query.committed_len
    added.max_nodes = query.max_nodes
    added.step_s, added.token_s = query.step_s, query.token_s
    if query.assumed is not None:
        _check_path(len(query.assumed))
        path = np.array(query.assumed, dtype=np.int32)
        added.assumed.CopyFrom(encode_array(path, INT32))


def _decode_query(query: pb.Query) -> Query:
    """A query. Raises `ProtocolError`."""
    assumed = None
    if query.HasField("assumed"):
        _check_path(max(query.assumed.shape, default=0))
        path = decode_array(query.assumed, "query.assumed")
        if path.min(initial=0) < 0:
            raise ProtocolError("wire: query.assumed: a token id is negative")
        assumed = tuple(path.tolist())
    if not 0.0 <= query.step_s < math.inf:
        raise ProtocolError(f"wire: a step takes no {query.step_s} seconds")
    if not 0.0 <= query.token_s < math.inf:
        raise ProtocolError(f"wire: a token saves no {query.token_s} seconds")
    return Query(
        query.request_id, query.committed_len, query.max_nodes, assumed, query.step_s, query.token_s
    )


def _check_path(count: int) -> None:
    if count > MAX_ASSUMED_TOKENS:
        raise ProtocolError(
            f"wire: query.assumed: a path of {count} tokens; at most {MAX_ASSUMED_TOKENS}"
        )


def _decode_commit(commit: pb.Commit) -> Commit:
    probe_ids = (
        decode_array(commit.probe_ids, "commit.probe_ids", dims=2)
        if commit.HasField("probe_ids")
        else None
    )
    tokens = decode_array(commit.tokens, "commit.tokens")
    top_next_tokens = (
        _decode_top_next_tokens(commit.top_next_tokens)
        if commit.HasField("top_next_tokens")
        else None
    )
    return Commit(commit.request_id, commit.base_len, tokens, probe_ids, top_next_tokens)


def _encode_features(rows: FeatureRows) -> pb.Features:
    values = pack(to_bfloat16(rows.values), HALF)
    array = pb.Array(dtype=BFLOAT16, shape=values.shape, data=values.data)
    return pb.Features(request_id=rows.request_id, position=rows.position, values=array)


def _decode_features(features: pb.Features) -> FeatureRows:
    array, field = features.values, "wire: features.values"
    if array.dtype != BFLOAT16:
        raise ProtocolError(f"{field}: numbers are {array.dtype[:8]!r}, not {BFLOAT16!r}")
    halves = unpack(PackedArray(HALF, array.shape, array.data), HALF, field, (2,))
    return FeatureRows(features.request_id, features.position, from_bfloat16(halves))


def _encode_commit(commit: Commit) -> pb.Commit:
    encoded = pb.Commit(
        request_id=commit.request_id,
        base_len=commit.base_len,
        tokens=encode_array(commit.tokens, INT32),
    )
    if commit.probe_ids is not None:
        encoded.probe_ids.CopyFrom(encode_array(commit.probe_ids, INT32))
    if commit.top_next_tokens is not None:
        encoded.top_next_tokens.CopyFrom(_encode_top_next_tokens(commit.top_next_tokens))
    return encoded


def encode_array(array: NDArray, dtype: str) -> pb.Array:
    """An array as a message; `dtype` is one of INT32, FLOAT32, BOOL."""
    packed = pack(array, dtype)
    return pb.Array(dtype=packed.dtype, shape=packed.shape, data=packed.data)


def decode_array(message: pb.Array, field: str, dtype: str = INT32, dims: int = 1) -> NDArray:
    """An array of exactly this dtype and number of dimensions. Raises `ProtocolError`."""
    packed = PackedArray(message.dtype, message.shape, message.data)
    return unpack(packed, dtype, f"wire: {field}", (dims,))


def _encode_proposal(added: pb.Proposal, proposal: Proposal) -> None:
    """Fill in a proposal's message, which has its request's id already."""
    added.tokens.CopyFrom(encode_array(proposal.tokens, INT32))
    added.parents.CopyFrom(encode_array(proposal.parents, INT32))
    added.log_probs.CopyFrom(encode_array(proposal.log_probs, FLOAT32))
    added.num_top_next_tokens = proposal.num_top_next_tokens
    if proposal.probe is not None:
        added.probe.CopyFrom(_encode_probe(proposal.probe))
    if proposal.distributions is not None:
        added.distributions.ids.CopyFrom(encode_array(proposal.distributions.ids, INT32))
        added.distributions.probs.CopyFrom(encode_array(proposal.distributions.probs, FLOAT32))


def _encode_probe(probe: Probe) -> pb.Probe:
    return pb.Probe(
        tokens=encode_array(probe.tokens, INT32),
        offsets=encode_array(probe.offsets, INT32),
        mask=encode_array(probe.mask, BOOL),
        wanted=encode_array(probe.wanted, INT32),
        top_k=probe.top_k,
    )


def _decode_probe(probe: pb.Probe) -> Probe:
    # The mask has a number for each pair of rows.
    if max(probe.tokens.shape, default=0) > MAX_PROPOSAL_NODES:
        raise ProtocolError(f"wire: a probe of more than {MAX_PROPOSAL_NODES} rows")
    return Probe(
        decode_array(probe.tokens, "probe.tokens"),
        decode_array(probe.offsets, "probe.offsets"),
        decode_array(probe.mask, "probe.mask", BOOL, dims=2),
        decode_array(probe.wanted, "probe.wanted"),
        probe.top_k,
    )


def _decode_proposal(proposal: pb.Proposal, source: str) -> Proposal:
    """A proposal of `source`. Raises `ProtocolError`."""
    count = max(proposal.tokens.shape, default=0)
    if count > MAX_PROPOSAL_NODES:
        raise ProtocolError(f"wire: a proposal of {count} nodes; at most {MAX_PROPOSAL_NODES}")
    return Proposal(
        source,
        decode_array(proposal.tokens, "proposal.tokens"),
        decode_array(proposal.parents, "proposal.parents"),
        decode_array(proposal.log_probs, "proposal.log_probs", FLOAT32),
        _decode_probe(proposal.probe) if proposal.HasField("probe") else None,
        proposal.num_top_next_tokens,
        _decode_distributions(proposal.distributions)
        if proposal.HasField("distributions")
        else None,
    )


def _decode_distributions(distributions: pb.Distributions) -> DraftDistributions:
    return DraftDistributions(
        decode_array(distributions.ids, "distributions.ids", dims=2),
        decode_array(distributions.probs, "distributions.probs", FLOAT32, dims=2),
    )


def _encode_top_next_tokens(top_next_tokens: TopNextTokens) -> pb.TopNextTokens:
    """The target's most probable next tokens."""
    return pb.TopNextTokens(
        tokens=encode_array(top_next_tokens.tokens, INT32),
        ids=encode_array(top_next_tokens.ids, INT32),
    )


def _decode_top_next_tokens(message: pb.TopNextTokens) -> TopNextTokens:
    """The reverse. Raises `ProtocolError`."""
    tokens = decode_array(message.tokens, "top_next_tokens.tokens")
    ids = decode_array(message.ids, "top_next_tokens.ids", dims=2)
    if len(tokens) != len(ids) or ids.shape[1] > MAX_TOP_NEXT_TOKENS:
        raise ProtocolError("wire: top next tokens: not a row for each token, or rows too long")
    if min(tokens.min(initial=0), ids.min(initial=0)) < 0:
        raise ProtocolError("wire: top next tokens: a token id is negative")
    return TopNextTokens(tokens, ids)
