"""Ended requests as protobuf messages, and back with every field checked."""

from __future__ import annotations

import numpy as np

from ...core.arrays import pack, unpack_flat
from ...core.errors import ProtocolError
from ...core.interfaces import Ended
from ..delta.fingerprint import Fingerprint
from ..retrieval_pb2 import LearnRequest

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
