"""What a drafter is asked, as parts of its messages (`wire.py`)."""

from __future__ import annotations

import math

import numpy as np

from ...core.arrays import ROOT
from ...core.errors import ProtocolError
from ...core.proposals import MAX_ASSUMED_TOKENS, MAX_PROPOSAL_NODES, AheadQuery, Query
from . import drafter_pb2 as pb
from .wire_proposals import INT32, decode_array, encode_array


def encode_query(added: pb.Query, query: Query) -> None:
    """Fill in a query's message. Raises `ProtocolError` for too long a path."""
    added.request_id = query.request_id
    added.committed_len = query.committed_len
    added.max_nodes = query.max_nodes
    added.step_s, added.token_s = query.step_s, query.token_s
    if query.assumed is not None:
        _check_path(len(query.assumed))
        path = np.array(query.assumed, dtype=np.int32)
        added.assumed.CopyFrom(encode_array(path, INT32))


def decode_query(query: pb.Query) -> Query:
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


def encode_ahead(added: pb.AheadQuery, query: AheadQuery) -> None:
    """Fill in the message of one that asks ahead."""
    added.request_id = query.request_id
    added.committed_len = query.committed_len
    added.max_nodes = query.max_nodes
    added.tokens.CopyFrom(encode_array(query.tokens, INT32))
    added.parents.CopyFrom(encode_array(query.parents, INT32))


def decode_ahead(query: pb.AheadQuery) -> AheadQuery:
    """One that asks ahead. Raises `ProtocolError`."""
    count = max(query.tokens.shape, default=0)
    if count > MAX_PROPOSAL_NODES:
        raise ProtocolError(f"wire: a tree of {count} nodes; at most {MAX_PROPOSAL_NODES}")
    tokens = decode_array(query.tokens, "ahead.tokens")
    parents = decode_array(query.parents, "ahead.parents")
    if len(tokens) != len(parents) or tokens.min(initial=0) < 0:
        raise ProtocolError("wire: a tree's token is negative or has no parent")
    if parents.min(initial=ROOT) < ROOT or not (parents < np.arange(len(parents))).all():
        raise ProtocolError("wire: a tree's parent does not precede its child")
    return AheadQuery(query.request_id, query.committed_len, query.max_nodes, tokens, parents)
