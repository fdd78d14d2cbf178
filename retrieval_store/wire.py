"""Lookups and ended requests as msgpack, and back with every field checked.

Arrays are little-endian numbers, one after the other: int32, and float32 for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ..core.arrays import Int32, pack, unpack_flat
from ..core.errors import ProtocolError
from ..core.interfaces import Ended, Subtree
from .delta.settings import Fingerprint

# Other releases have other messages: a change of them gives the service another name, so that both
# sides hear of it.
METHOD = "/draftline.retrieval.v2.Retrieval/Lookup"
LEARN_METHOD = "/draftline.retrieval.v2.Retrieval/Learn"
# Prefix of the details of RESOURCE_EXHAUSTED when a server refuses a batch; gRPC itself also uses
# that code.
REFUSED = "refused: "
MAX_NODES = 4096
MAX_CONTEXT_TOKENS = 4096
MAX_COUNT = 2**32 - 1
# Of what an error repeats.
MAX_NAME = 64

T = TypeVar("T")
_counts = msgspec.msgpack.Decoder(dict[str, int])


class ContextMessage(NamedTuple):
    """A context of a lookup."""

    tokens: bytes
    namespace: str
    max_nodes: int


class SubtreeMessage(NamedTuple):
    """The answer to one."""

    tokens: bytes
    parents: bytes
    log_probs: bytes
    match_len: int


class LearnMessage(NamedTuple):
    """An ended request: `runs` has start and stop of each, one after the other. The last three say
    for which model the tokens are."""

    namespace: str
    tokens: bytes
    runs: bytes
    tokenizer_hash: str
    model_hash: str
    vocab_size: int


_contexts = msgspec.msgpack.Decoder(list[ContextMessage])
_subtrees = msgspec.msgpack.Decoder(list[SubtreeMessage])
_learned = msgspec.msgpack.Decoder(LearnMessage)


def encode_request(
    contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
) -> bytes:
    """The arguments of `Lookup.lookup` as bytes."""
    budgets = [min(max(budget, 0), MAX_NODES) for budget in max_nodes]
    return msgspec.msgpack.encode(
        [
            ContextMessage(pack(tokens, np.int32).data, namespace, budget)
            for tokens, namespace, budget in zip(contexts, namespaces, budgets, strict=True)
        ]
    )


def decode_request(data: bytes) -> tuple[list[Int32], list[str], list[int]]:
    """The arguments of `Lookup.lookup`. Raises `ProtocolError` for values out of range."""
    entries = _decode(_contexts, data)
    contexts = [unpack_flat(entry.tokens, np.int32, "tokens") for entry in entries]
    budgets = [entry.max_nodes for entry in entries]
    if any(len(context) > MAX_CONTEXT_TOKENS or np.any(context < 0) for context in contexts):
        raise ProtocolError(f"tokens: at most {MAX_CONTEXT_TOKENS} ids, none negative")
    if any(not 0 <= budget <= MAX_NODES for budget in budgets):
        raise ProtocolError(f"max_nodes: at most {MAX_NODES}")
    return contexts, [entry.namespace for entry in entries], budgets


def encode_reply(subtrees: Sequence[Subtree]) -> bytes:
    """Subtrees as bytes, for `decode_reply`."""
    return msgspec.msgpack.encode(
        [
            SubtreeMessage(
                pack(subtree.tokens, np.int32).data,
                pack(subtree.parents, np.int32).data,
                pack(subtree.log_probs, np.float32).data,
                int(subtree.match_len),
            )
            for subtree in subtrees
        ]
    )


def decode_reply(data: bytes, count: int) -> list[Subtree]:
    """`count` subtrees from bytes. Raises `ProtocolError` unless each is one."""
    entries = _decode(_subtrees, data)
    if len(entries) != count:
        raise ProtocolError(f"asked for {count} subtrees, got {len(entries)}")
    return [_subtree(entry) for entry in entries]


def _subtree(entry: SubtreeMessage) -> Subtree:
    tokens = unpack_flat(entry.tokens, np.int32, "tokens")
    parents = unpack_flat(entry.parents, np.int32, "parents")
    log_probs = unpack_flat(entry.log_probs, np.float32, "log_probs")
    if not tokens.shape == parents.shape == log_probs.shape:
        raise ProtocolError("subtree: arrays differ in length")
    if np.any(parents < -1) or np.any(parents >= np.arange(len(parents))):
        raise ProtocolError("subtree: a parent does not precede its child")
    if np.any(tokens < 0) or not np.all(log_probs <= 0):
        raise ProtocolError("subtree: a negative token id, or a log-probability above 0")
    _check_count("subtree: match_len", entry.match_len)
    return Subtree(tokens, parents, log_probs, entry.match_len)


def encode_learn(ended: Ended, fingerprint: Fingerprint) -> bytes:
    """An ended request, and the model that its tokens are for, as bytes."""
    return msgspec.msgpack.encode(
        LearnMessage(
            ended.namespace,
            pack(ended.tokens, np.int32).data,
            pack(np.array(ended.accepted, dtype=np.int32)).data,
            fingerprint.tokenizer_hash,
            fingerprint.model_hash,
            fingerprint.vocab_size,
        )
    )


def decode_learn(data: bytes) -> tuple[Ended, Fingerprint]:
    """The arguments of `encode_learn`. Raises `ProtocolError` for runs outside the text."""
    message = _decode(_learned, data)
    _check_count("vocab_size", message.vocab_size)
    tokens = unpack_flat(message.tokens, np.int32, "tokens")
    runs = unpack_flat(message.runs, np.int32, "runs")
    if len(runs) % 2:
        raise ProtocolError("runs: not pairs of start and stop")
    starts, stops = runs[::2], runs[1::2]
    if np.any(starts < 0) or np.any(starts >= stops) or np.any(stops > len(tokens)):
        raise ProtocolError("runs: a run is not in the text")
    accepted = tuple(zip(starts.tolist(), stops.tolist(), strict=True))
    fingerprint = Fingerprint(
        tokenizer_hash=message.tokenizer_hash,
        model_hash=message.model_hash,
        vocab_size=message.vocab_size,
    )
    return Ended(message.namespace, tokens, accepted), fingerprint


def encode_counts(counts: Mapping[str, int]) -> bytes:
    """What became of an ended request: see `core.interfaces.OUTCOMES`."""
    return msgspec.msgpack.encode(dict(counts))


def decode_counts(data: bytes) -> dict[str, int]:
    """The reverse. Raises `ProtocolError` for numbers out of range."""
    counts = _decode(_counts, data)
    for name, count in counts.items():
        _check_count(name, count)
    return counts


def _check_count(name: str, count: int) -> None:
    if not 0 <= count <= MAX_COUNT:
        raise ProtocolError(f"{name[:MAX_NAME]}: {count} is not from 0 to {MAX_COUNT}")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    # Text that is none, keys that cannot be keys and too deep nesting raise errors of Python's own.
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message of a retrieval server: {error}") from error
