from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from draftline.cluster.links import wire
from draftline.cluster.links.features import from_bfloat16
from draftline.cluster.links.link import DrafterMessage, DrafterReport, DraftSeconds
from draftline.core.arrays import PackedArray
from draftline.core.errors import DrafterError, ProtocolError
from draftline.core.interfaces import PrefixCounts
from draftline.core.proposals import (
    MAX_ASSUMED_TOKENS,
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
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

LIMIT = 2**20

ids = st.text(min_size=1, max_size=8)
ints = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda v: np.array(v, dtype=np.int32))
floats = st.lists(st.floats(-1e6, 0, width=32), max_size=6).map(
    lambda v: np.array(v, dtype=np.float32)
)
lists = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
shapings = st.builds(
    LogitsParams,
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | lists.filter(bool),
    banned_token_ids=lists,
    min_tokens=st.integers(0, 2**31 - 1),
)
matrices = arrays(np.int32, array_shapes(min_dims=2, max_dims=2, min_side=0))
requests = st.builds(
    DraftRequest,
    ids,
    ints,
    st.integers(0, 2**31),
    st.floats(0, 100),
    st.integers(0, 2**63 - 1),
    ids,
    st.just(LogitsParams()) | shapings,
    lists,
    ids,
    st.booleans(),
)
top_next_tokens = st.builds(
    lambda ids: TopNextTokens(np.arange(len(ids), dtype=np.int32), ids),
    arrays(
        np.int32,
        array_shapes(min_dims=2, max_dims=2, min_side=0),
        elements=st.integers(0, 2**31 - 1),
    ),
)
commits = st.builds(
    Commit, ids, st.integers(0, 2**31), ints, st.none() | matrices, st.none() | top_next_tokens
)
queries = st.builds(
    Query,
    ids,
    st.integers(0, 2**31),
    st.integers(0, 256),
    st.none() | lists,
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
probes = st.builds(
    Probe,
    ints,
    ints,
    arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, min_side=0)),
    ints,
    st.integers(0, 100),
)
float_matrices = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, min_side=0),
    elements=st.floats(0, 1, width=32),
)
distributions = st.none() | st.builds(DraftDistributions, matrices, float_matrices)
proposals = st.builds(
    Proposal,
    st.just("s"),
    ints,
    ints,
    floats,
    st.none() | probes,
    st.integers(0, 2**31),
    distributions,
)
feature_rows = st.builds(
    FeatureRows,
    ids,
    st.integers(0, 2**31),
    # What 16 bits hold, so that it comes back as it is.
    arrays(
        np.uint16, array_shapes(min_dims=2, max_dims=2, min_side=0), elements=st.integers(0, 0x7F80)
    ).map(from_bfloat16),
)


messages = st.builds(
    DrafterMessage,
    st.integers(1, 2**40),
    st.lists(ids, max_size=3).map(tuple),
    st.lists(requests, max_size=3).map(tuple),
    st.lists(commits, max_size=3),
    st.lists(queries, max_size=3),
    st.just(0.0),
    st.lists(commits, max_size=3),
    st.lists(feature_rows, max_size=3),
)


def same(left: object, right: object) -> bool:
    """Equality of the nested values, arrays with their dtypes."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, list | tuple):
        assert isinstance(right, list | tuple)
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(type(left), "__slots__") and hasattr(type(left), "__dataclass_fields__"):
        names = type(left).__dataclass_fields__
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    return left == right


def decoded_step(data: bytes, now: float) -> DrafterMessage:
    decoded = wire.decode_part(data, now)
    assert isinstance(decoded, DrafterMessage)
    return decoded


@given(messages)
def test_a_step_round_trips(message: DrafterMessage):
    decoded = decoded_step(wire.encode_step(message, 0.25, LIMIT), 100.0)
    assert decoded.deadline == 100.25
    names = ("sequence", "closes", "opens", "commits", "queries", "last_commits", "features")
    assert all(same(getattr(decoded, name), getattr(message, name)) for name in names)


@given(st.lists(feature_rows, max_size=4))
def test_features_before_a_step_round_trip(rows: list[FeatureRows]):
    data = wire.encode_more_features(rows, LIMIT)
    decoded = wire.decode_part(data, 0.0)
    assert isinstance(decoded, list)
    assert same(decoded, rows)


@pytest.mark.parametrize("read", [None, FeatureLayers((-1, 3), 8), FeatureLayers((5,), 4096)])
def test_a_hello_says_what_is_read(read: FeatureLayers | None):
    greeting = wire.Greeting("s", read)
    assert wire.decode_hello(wire.encode_hello(greeting)) == greeting


def changed(message: Any, **fields: Any) -> Any:
    """A message as msgpack sees it, with other values of the fields of a step."""
    step, features = msgspec.msgpack.decode(wire.encode_step(message, 0.0, LIMIT))
    return msgspec.msgpack.encode([step | fields, features])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (PackedArray("<i4", (1, 2), bytes(8)), "numbers are '<i4', not '<u2'"),
        (PackedArray("<u2", (4,), bytes(8)), "2 dimensions"),
        (PackedArray("<u2", (2, 4), bytes(8)), "not a whole"),
        (3, "array"),
    ],
)
def test_wrong_features_are_refused(values: object, message: str):
    data = msgspec.msgpack.encode([None, [["r", 0, values]]])
    with pytest.raises(ProtocolError, match=rf"^wire: .*{message}"):
        wire.decode_part(data, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.0),
        ("top_k", 2**32 - 1),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 3.0),
        ("logit_bias", {1: float("inf")}),
        ("banned_token_ids", [2**31]),
    ],
)
def test_an_impossible_shaping_is_refused(field: str, value: object):
    request = DraftRequest("r", np.array([3], dtype=np.int32), 1, 0.0, 1)
    message = DrafterMessage(1, (), (request,), [], [], 0.0)
    (opened,) = msgspec.msgpack.decode(wire.encode_step(message, 0.0, LIMIT))[0]["opens"]
    shaped = opened | {"logits_params": opened["logits_params"] | {field: value}}
    with pytest.raises(ProtocolError, match=f"^wire: .*{field}: "):
        wire.decode_part(changed(message, opens=[shaped]), 0.0)


SECONDS = DraftSeconds(open_s=0.5, observe_s=0.0, propose_s=0.25)


@given(st.lists(st.tuples(queries, proposals), max_size=3))
def test_an_answer_round_trips(pairs: list[tuple[Query, Proposal]]):
    message = DrafterMessage(7, (), (), [], [query for query, _ in pairs], 0.0)
    answered = [proposal for _, proposal in pairs]
    told = DrafterReport(9, {"learned": 3}, PrefixCounts(20, 16))
    data = wire.encode_answer(
        message, answered, LIMIT, told, SECONDS, is_draining=True, num_others=6
    )
    decoded, report, seconds, is_draining, num_others = wire.decode_answer(data, message, "s")
    assert same(decoded, answered)
    assert report is not None
    assert (report.memory_bytes, report.learning) == (9, {"learned": 3})
    assert report.prefix == (20, 16)
    assert (is_draining, num_others) == (True, 6)
    assert seconds == SECONDS


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_seconds_that_cannot_be_are_a_protocol_error(bad: float):
    message = DrafterMessage(1, (), (), [], [], 0.0)
    data = wire.encode_answer(message, [], LIMIT, None, DraftSeconds(open_s=bad))
    with pytest.raises(ProtocolError, match="seconds"):
        wire.decode_answer(data, message, "s")


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("field", "said"), [("step_s", "a step takes no"), ("token_s", "a token saves no")]
)
def test_seconds_of_steps_that_cannot_be_are_a_protocol_error(field: str, said: str, bad: float):
    query = Query("r", 1, 4)._replace(**{field: bad})
    message = DrafterMessage(1, (), (), [], [query], 0.0)
    with pytest.raises(ProtocolError, match=said):
        decoded_step(wire.encode_step(message, 0.1, LIMIT), 0.0)


@given(st.binary(max_size=64))
def test_garbage_is_a_protocol_error_or_decodes(data: bytes):
    message = DrafterMessage(1, (), (), [], [], 0.0)
    for decode, kind in (
        (lambda: wire.decode_part(data, 0.0), DrafterMessage | list),
        (lambda: wire.decode_answer(data, message, "s"), tuple),
        (lambda: wire.decode_hello(data), wire.Greeting),
    ):
        try:
            decoded = decode()
        except (ProtocolError, DrafterError):
            continue
        assert isinstance(decoded, kind)


@given(messages, st.data())
def test_a_damaged_step_is_a_protocol_error_or_decodes(
    message: DrafterMessage, data: st.DataObject
):
    encoded = bytearray(wire.encode_step(message, 0.25, LIMIT))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decoded_step(bytes(encoded), 0.0)
    except ProtocolError:
        return
    # What still decodes is a whole message: it can be sent on.
    assert wire.encode_step(decoded, 0.25, LIMIT)


@pytest.mark.parametrize(
    "array",
    [
        PackedArray("<i8", (1,), bytes(8)),
        PackedArray("<i4", (2,), bytes(4)),
        PackedArray("<i4", (1, 1), bytes(4)),
        PackedArray("<i4", (2**31, 2**31), bytes(4)),
        PackedArray("<i4", (1,) * 100_000, bytes(4)),
        PackedArray("", (), b""),
    ],
)
def test_a_wrong_array_is_refused(array: PackedArray):
    message = DrafterMessage(1, (), (), [], [], 0.0)
    data = changed(message, commits=[["r", 1, array, None, None]])
    with pytest.raises(ProtocolError, match=r"^wire: .*commits?\.tokens: "):
        wire.decode_part(data, 0.0)


def _heard(tokens: list[int], ids: np.ndarray) -> bytes:
    heard = TopNextTokens(np.array(tokens, dtype=np.int32), ids.astype(np.int32))
    commit = Commit("r", 1, np.array([2], dtype=np.int32), None, heard)
    return wire.encode_step(DrafterMessage(1, (), (), [commit], [], 0.0), 0.1, LIMIT)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_heard([1, 2], np.ones((1, 3))), "not a row for each token"),
        (_heard([1], np.ones((1, MAX_TOP_NEXT_TOKENS + 1))), "rows too long"),
        (_heard([-1], np.ones((1, 3))), "negative"),
        (_heard([1], -np.ones((1, 3))), "negative"),
        (_heard([1], np.ones(3)), "2 dimensions"),
    ],
)
def test_wrong_top_next_tokens_are_refused(data: bytes, message: str):
    with pytest.raises(ProtocolError, match=message):
        decoded_step(data, 0.0)


def test_oversize_is_refused_before_it_is_sent():
    request = DraftRequest("r", np.zeros(1000, dtype=np.int32), 1000, 0.0, 1)
    message = DrafterMessage(1, (), (request,), [], [], 0.0)
    with pytest.raises(ProtocolError, match="limit is 1000"):
        wire.encode_step(message, 0.1, 1000)


HUGE = 2_500_000


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("nodes", "answer.proposals.tokens: "),
        ("probe", "answer.proposals.probe.mask: "),
        ("dimensions", "answer.proposals.parents: "),
        ("proposals", "2 proposals for 1 queries"),
    ],
)
def test_huge_answers_are_refused_before_arrays_are_built(
    part: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    asked = DrafterMessage(1, (), (), [], [Query("r", 1, 4)], 0.0)
    few, square = np.zeros(1, dtype=np.int32), np.zeros((1, 1), dtype=np.bool_)
    proposal = Proposal("s", few, few, few.astype(np.float32), Probe(few, few, square, few, 1))
    answer = msgspec.msgpack.decode(wire.encode_answer(asked, [proposal], LIMIT))
    (sent,) = answer[2][0]
    if part == "nodes":
        sent["tokens"] = PackedArray("<i4", (HUGE,), bytes(4 * HUGE))
    elif part == "probe":
        sent["probe"]["mask"] = PackedArray("|b1", (HUGE, 1), bytes(HUGE))
    elif part == "dimensions":
        sent["parents"] = PackedArray("<i4", (1,) * HUGE, bytes(4))
    else:
        answer[2][0].append(sent)
    sizes: list[int] = []
    build = np.frombuffer
    monkeypatch.setattr(
        np, "frombuffer", lambda raw, **options: sizes.append(len(raw)) or build(raw, **options)
    )
    with pytest.raises(ProtocolError, match=f"^wire: .*{said}"):
        wire.decode_answer(msgspec.msgpack.encode(answer), asked, "s")
    assert max(sizes, default=0) < HUGE


SMALL = DrafterMessage(
    1, (), (DraftRequest("r", np.array([3], dtype=np.int32), 1, 0.0, 1, end_ids=(2,)),),
    [Commit("r", 1, np.array([3], dtype=np.int32), np.ones((1, 1), dtype=np.int32))],
    [Query("r", 1, 4, (5,))], 0.0, (), [FeatureRows("r", 0, np.ones((1, 2), dtype=np.float32))],
)  # fmt: skip
REPORT = DrafterReport(9, {"learned": 3}, PrefixCounts(20, 16))
HOSTILE_BYTES = 4 * 2**20


def hostile(part: bytes) -> bytes:
    """A list of one-byte values as msgpack, or of lists in each other."""
    return b"\xdd" + HOSTILE_BYTES.to_bytes(4, "big") + part * HOSTILE_BYTES


HOSTILE = {
    "empty maps": hostile(b"\x80"),
    "empty lists": hostile(b"\x90"),
    "numbers": hostile(b"\x01"),
    "nested lists": hostile(b"\x91")[5:] + b"\x90",
    "a long shape": b"\x93\xa3<i4" + hostile(b"\x01") + b"\xc4\0",
    "maps in a shape": b"\x93\xa3<i4" + hostile(b"\x80") + b"\xc4\0",
    "a list for bytes": b"\x93\xa3<i4\x91\x01" + hostile(b"\x80"),
}


def _changed_places(sent: Any, name: str, value: object) -> bytes:
    """A message with another value at `name`, which says the way to it."""
    *way, last = name.split("/")
    place = sent
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value
    return msgspec.msgpack.encode(sent)


def with_sent(name: str, value: object) -> bytes:
    """A whole step, but for one field."""
    return _changed_places(msgspec.msgpack.decode(wire.encode_step(SMALL, 0.0, LIMIT)), name, value)


def with_answered(name: str, value: object) -> bytes:
    """A whole answer to it, but for one field."""
    few, square = np.zeros(1, dtype=np.int32), np.zeros((1, 1), dtype=np.bool_)
    drawn = DraftDistributions(np.ones((1, 1), dtype=np.int32), np.ones((1, 1), dtype=np.float32))
    proposal = Proposal(
        "s", few, few, few.astype(np.float32), Probe(few, few, square, few, 1), 0, drawn
    )
    data = wire.encode_answer(SMALL, [proposal], LIMIT, REPORT, SECONDS)
    return _changed_places(msgspec.msgpack.decode(data), name, value)


def peak_of_refusal(read: Callable[[], object], message: str) -> int:
    """Most bytes of memory that a refusal took."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=message):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_array_takes_no_memory(kind: str):
    sent = msgspec.Raw(HOSTILE[kind])
    for name, said in (
        ("0/opens/0/token_ids", "step.opens.token_ids: "),
        ("0/commits/0/2", "step.commits.tokens: "),
        ("0/commits/0/3", "step.commits.probe_ids: "),
        ("1/0/2", "features.values: "),
    ):
        data = with_sent(name, sent)
        peak = peak_of_refusal(lambda data=data: wire.decode_part(data, 0.0), said)
        assert peak < HOSTILE_BYTES
    for name, said in (
        ("2/0/0/tokens", "answer.proposals.tokens: "),
        ("2/0/0/probe/mask", "answer.proposals.probe.mask: "),
        ("2/0/0/distributions/probs", "answer.proposals.distributions.probs: "),
    ):
        data = with_answered(name, sent)
        peak = peak_of_refusal(lambda data=data: wire.decode_answer(data, SMALL, "s"), said)
        assert peak < HOSTILE_BYTES


@pytest.mark.parametrize(
    ("place", "field", "most"),
    [
        ("0/sequence", "step.sequence", 2**64 - 1),
        ("0/opens/0/prompt_len", "step.opens.prompt_len", 2**32 - 1),
        ("0/opens/0/seed", "step.opens.seed", 2**64 - 1),
        ("0/opens/0/end_ids/0", "step.opens.end_ids", 2**31 - 1),
        ("0/commits/0/1", "step.commits.base_len", 2**32 - 1),
        ("0/queries/0/1", "step.queries.committed_len", 2**32 - 1),
        ("0/queries/0/2", "step.queries.max_nodes", 2**32 - 1),
        ("0/queries/0/3/0", "step.queries.assumed", 2**31 - 1),
        ("1/0/1", "features.position", 2**32 - 1),
    ],
)
def test_numbers_of_a_step_have_ranges(place: str, field: str, most: int):
    assert decoded_step(with_sent(place, most), 0.0)
    for value in (-1, most + 1):
        if value < 2**64:
            with pytest.raises(ProtocolError, match=f"^wire: .*: {field}: "):
                wire.decode_part(with_sent(place, value), 0.0)


@pytest.mark.parametrize(
    ("place", "field", "most"),
    [
        ("2/1/memory_bytes", "answer.report.memory_bytes", 2**64 - 1),
        ("2/1/learning/learned", "answer.report.learning", 2**64 - 1),
        ("2/1/prefix/0", "answer.report.prefix.queries", 2**64 - 1),
        ("2/1/prefix/1", "answer.report.prefix.hits", 2**64 - 1),
        ("2/4", "answer.num_others", 2**64 - 1),
        ("2/0/0/num_top_next_tokens", "answer.proposals.num_top_next_tokens", 2**32 - 1),
        ("2/0/0/probe/top_k", "answer.proposals.probe.top_k", 2**32 - 1),
    ],
)
def test_numbers_of_an_answer_have_ranges(place: str, field: str, most: int):
    assert wire.decode_answer(with_answered(place, most), SMALL, "s")
    for value in (-1, most + 1):
        if value < 2**64:
            with pytest.raises(ProtocolError, match=f"^wire: .*: {field}: "):
                wire.decode_answer(with_answered(place, value), SMALL, "s")
    with pytest.raises(ProtocolError, match="sequence: "):
        wire.decode_answer(with_answered("0", -1), SMALL, "s")


@pytest.mark.parametrize("field", ["store", "namespace", "cache_salt", "seed"])
def test_a_request_says_whether_it_may_be_learned_from(field: str):
    # A default would learn from the requests of those who do not know of the field.
    (opened,) = msgspec.msgpack.decode(wire.encode_step(SMALL, 0.0, LIMIT))[0]["opens"]
    del opened[field]
    with pytest.raises(ProtocolError, match=f"^wire: .*`{field}`"):
        wire.decode_part(changed(SMALL, opens=[opened]), 0.0)


@pytest.mark.parametrize("features", [[[2**31], 8], [[1], -1], [[1], 2**32]])
def test_layers_that_cannot_be_are_refused(features: list):
    layers, width = features
    greeting = msgspec.msgpack.encode(["s", {"layers": layers, "width": width}])
    hello = msgspec.msgpack.encode([wire.PROTOCOL_VERSION, msgspec.Raw(greeting)])
    with pytest.raises(ProtocolError, match=r"features\.(layers|width): "):
        wire.decode_hello(hello)


# The first is the hello of releases before protocol 4.
@pytest.mark.parametrize("data", [b"\x0a\x05\x08\x03\x12\x01s", b"", b"GET / HTTP/1.1", b"\x90"])
def test_the_refusal_of_a_first_message_says_what_to_do(data: bytes):
    with pytest.raises(ProtocolError, match="run the same draftline version on both"):
        wire.decode_hello(data)


def test_proposals_are_of_the_link_whatever_the_server_calls_them():
    asked = DrafterMessage(1, (), (), [], [Query("r", 1, 4)], 0.0)
    none = np.empty(0, dtype=np.int32)
    other = Proposal("other", none, none, np.empty(0, dtype=np.float32))
    answer = wire.decode_answer(wire.encode_answer(asked, [other], LIMIT), asked, "s")
    assert answer.proposals[0].source == "s"


def test_an_answer_about_another_request_is_refused():
    asked = DrafterMessage(1, (), (), [], [Query("mine", 1, 4)], 0.0)
    other = DrafterMessage(1, (), (), [], [Query("yours", 1, 4)], 0.0)
    none = np.empty(0, dtype=np.int32)
    proposal = Proposal("s", none, none, np.empty(0, dtype=np.float32))
    with pytest.raises(ProtocolError, match="other requests"):
        wire.decode_answer(wire.encode_answer(other, [proposal], LIMIT), asked, "s")
    stale = DrafterMessage(2, (), (), [], asked.queries, 0.0)
    with pytest.raises(ProtocolError, match="last message"):
        wire.decode_answer(wire.encode_answer(asked, [proposal], LIMIT), stale, "s")


@pytest.mark.parametrize("tokens", [[1] * (MAX_ASSUMED_TOKENS + 1), [3, -1], [[1]]])
def test_a_path_that_cannot_be_is_refused(tokens: list) -> None:
    message = DrafterMessage(1, (), (), [], [], 0.0)
    data = changed(message, queries=[["r", 1, 4, tokens, 0.0, 0.0]])
    with pytest.raises(ProtocolError, match=r"^wire: "):
        wire.decode_part(data, 0.0)


def test_too_long_a_path_is_not_sent():
    longest = (1,) * MAX_ASSUMED_TOKENS
    for path in (longest, (*longest, 1)):
        message = DrafterMessage(1, (), (), [], [Query("r", 1, 4, path)], 0.0)
        if path == longest:
            assert decoded_step(wire.encode_step(message, 0.0, LIMIT), 0.0).queries[0] == (
                Query("r", 1, 4, longest)
            )
        else:
            with pytest.raises(ProtocolError, match="a path of 257 tokens; at most 256"):
                wire.encode_step(message, 0.0, LIMIT)


@pytest.mark.parametrize("version", [wire.PROTOCOL_VERSION - 1, 99])
def test_another_protocol_version_is_named(version: int):
    # Whatever else it says.
    hello = msgspec.msgpack.encode([version, {"unknown": 3}])
    with pytest.raises(ProtocolError, match=f"protocol {version}, this one"):
        wire.decode_hello(hello)
