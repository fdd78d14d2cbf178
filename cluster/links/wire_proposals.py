"""Arrays, proposals and top next tokens as parts of a drafter's messages (`wire.py`)."""

from __future__ import annotations

from numpy.typing import NDArray

from ...core.arrays import PackedArray, pack, unpack
from ...core.draft_distributions import DraftDistributions
from ...core.errors import ProtocolError
from ...core.proposals import (
    MAX_PROPOSAL_NODES,
    MAX_TOP_NEXT_TOKENS,
    Probe,
    Proposal,
    TopNextTokens,
)
from . import drafter_pb2 as pb

INT32, FLOAT32, BOOL = "<i4", "<f4", "|b1"


def encode_array(array: NDArray, dtype: str) -> pb.Array:
    """An array as a message; `dtype` is one of INT32, FLOAT32, BOOL."""
    packed = pack(array, dtype)
    return pb.Array(dtype=packed.dtype, shape=packed.shape, data=packed.data)


def decode_array(message: pb.Array, field: str, dtype: str = INT32, dims: int = 1) -> NDArray:
    """An array of exactly this dtype and number of dimensions. Raises `ProtocolError`."""
    packed = PackedArray(message.dtype, message.shape, message.data)
    return unpack(packed, dtype, f"wire: {field}", (dims,))


def encode_proposal(added: pb.Proposal, proposal: Proposal) -> None:
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


def decode_proposal(proposal: pb.Proposal, source: str) -> Proposal:
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


def encode_top_next_tokens(top_next_tokens: TopNextTokens) -> pb.TopNextTokens:
    """What the target told of the tokens that may come next."""
    return pb.TopNextTokens(
        tokens=encode_array(top_next_tokens.tokens, INT32),
        ids=encode_array(top_next_tokens.ids, INT32),
    )


def decode_top_next_tokens(message: pb.TopNextTokens) -> TopNextTokens:
    """The reverse. Raises `ProtocolError`."""
    tokens = decode_array(message.tokens, "top_next_tokens.tokens")
    ids = decode_array(message.ids, "top_next_tokens.ids", dims=2)
    if len(tokens) != len(ids) or ids.shape[1] > MAX_TOP_NEXT_TOKENS:
        raise ProtocolError("wire: top next tokens: not a row for each token, or rows too long")
    if min(tokens.min(initial=0), ids.min(initial=0)) < 0:
        raise ProtocolError("wire: top next tokens: a token id is negative")
    return TopNextTokens(tokens, ids)
