"""Lookups and ended requests as protobuf messages, and back with every field checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.arrays import Int32, pack, unpack_flat
from ..core.errors import ProtocolError
from ..core.interfaces import Ended, Subtree
from .delta.settings import Fingerprint
from .retrieval_pb2 import Context, LearnRequest, LookupReply, LookupRequest
from .retrieval_pb2 import Subtree as SubtreeMessage

METHOD = "/draftline.retrieval.Retrieval/Lookup"
# Prefix of the details of RESOURCE_EXHAUSTED when a server refuses a batch; gRPC itself also uses
# that code.
REFUSED = "refused: "
MAX_NODES = 4096
MAX_CONTEXT_TOKENS = 4096


def encode_request(
    contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
) -> bytes:
    """The arguments of `Lookup.lookup` as bytes."""
    budgets = [min(max(budget, 0), MAX_NODES) for budget in max_nodes]
    entries = zip(contexts, namespaces, budgets, strict=True)
    return LookupRequest(
        contexts=[
            Context(tokens=pack(tokens, np.int32).data, namespace=namespace, max_nodes=budget)
            for tokens, namespace, budget in entries
        ]
    ).SerializeToString()


def decode_request(request: LookupRequest) -> tuple[list[Int32], list[str], list[int]]:
    """The arguments of `Lookup.lookup`. Raises `ProtocolError` for values out of range."""
    contexts = [unpack_flat(entry.tokens, np.int32, "tokens") for entry in request.contexts]
    budgets = [entry.max_nodes for entry in request.contexts]
    if any(len(context) > MAX_CONTEXT_TOKENS or np.any(context < 0) for context in contexts):
        raise ProtocolError(f"tokens: at most {MAX_CONTEXT_TOKENS} ids, none negative")
    if any(budget > MAX_NODES for budget in budgets):
        raise ProtocolError(f"max_nodes: at most {MAX_NODES}")
    return contexts, [entry.namespace for entry in request.contexts], budgets


def encode_reply(subtrees: Sequence[Subtree]) -> bytes:
    """Subtrees as bytes, for `decode_reply`."""
    return LookupReply(
        subtrees=[
            SubtreeMessage(
                tokens=pack(subtree.tokens, np.int32).data,
                parents=pack(subtree.parents, np.int32).data,
                log_probs=pack(subtree.log_probs, np.float32).data,
                match_len=subtree.match_len,
            )
            for subtree in subtrees
        ]
    ).SerializeToString()


def decode_reply(reply: LookupReply, count: int) -> list[Subtree]:
    """`count` subtrees from bytes. Raises `ProtocolError` unless each is one."""
    if len(reply.subtrees) != count:
        raise ProtocolError(f"asked for {count} subtrees, got {len(reply.subtrees)}")
    return [_subtree(entry) for entry in reply.subtrees]


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
    return Subtree(tokens, parents, log_probs, entry.match_len)


LEARN_METHOD = "/draftline.retrieval.Retrieval/Learn"


def encode_learn(ended: Ended, fingerprint: Fingerprint) -> bytes:
    """An ended request, and the model that its tokens are for, as bytes."""
    return LearnRequest(
        namespace=ended.namespace,
        tokens=pack(ended.tokens, np.int32).data,
        runs=pack(np.array(ended.accepted, dtype=np.int32)).data,
        tokenizer_hash=fingerprint.tokenizer_hash,
        model_hash=fingerprint.model_hash,
        vocab_size=fingerprint.vocab_size,
    ).SerializeToString()


def decode_learn(request: LearnRequest) -> tuple[Ended, Fingerprint]:
    """The arguments of `encode_learn`. Raises `ProtocolError` for runs outside the text."""
    tokens = unpack_flat(request.tokens, np.int32, "tokens")
    runs = unpack_flat(request.runs, np.int32, "runs")
    if len(runs) % 2:
        raise ProtocolError("runs: not pairs of start and stop")
    starts, stops = runs[::2], runs[1::2]
    if np.any(starts < 0) or np.any(starts >= stops) or np.any(stops > len(tokens)):
        raise ProtocolError("runs: a run is not in the text")
    accepted = tuple(zip(starts.tolist(), stops.tolist(), strict=True))
    fingerprint = Fingerprint(
        tokenizer_hash=request.tokenizer_hash,
        model_hash=request.model_hash,
        vocab_size=request.vocab_size,
    )
    return Ended(request.namespace, tokens, accepted), fingerprint
