"""Attention of a training pass in which a head sees the same states as in drafting.

When a head drafts its n-th token, the last n - 1 features are its own. Pass n trains on this case:
HASS (arXiv 2408.15766), section 3.2, and GRIFFIN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ContextReplacement:
    """Attention of pass n, over n - 1 streams of states besides that of the queries.

    Stream 0 has the target's features, stream j the head's own from pass j, each shifted to the row
    that reads it. Row r attends stream 0 up to row r - (n - 1), stream j at row r - (n - 1 - j),
    and its own. Missing rows are masked by minus infinity before the softmax; a factor of 0 would
    leave them a share.

    Implements `Attend` for a head of one layer.
    """

    def __init__(self, streams: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`streams`: keys and values [..., rows, kv_heads, head_dim] of each stream except the
        queries'."""
        self._streams = streams

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[..., rows, heads, head_dim] of queries of that shape."""
        assert layer == 0, "context is replaced in heads of one layer"
        queries = queries * queries.shape[-1] ** -0.5
        streams = [*self._streams, (keys, values)]
        num_heads = queries.shape[-2]
        repeated = [
            tuple(part.repeat_interleave(num_heads // part.shape[-2], -2) for part in stream)
            for stream in streams
        ]
        (first_keys, first_values), later = repeated[0], repeated[1:]
        scores = [_scores_before(queries, first_keys, len(later))]
        for index, (own_keys, _) in enumerate(later):
            scores.append(_scores_at(queries, own_keys, len(later) - 1 - index))
        shares = torch.cat(scores, dim=-1).softmax(-1)
        rows = queries.shape[-3]
        attended = torch.einsum("...hrc,...chd->...rhd", shares[..., :rows], first_values)
        for index, (_, own_values) in enumerate(later):
            share = shares[..., rows + index].transpose(-1, -2).unsqueeze(-1)
            attended = attended + share * own_values.roll(len(later) - 1 - index, -3)
        return attended


def _scores_before(queries: Tensor, keys: Tensor, distance: int) -> Tensor:
    """[..., heads, rows, rows]: of each row with those that are `distance` or more before it."""
    rows = queries.shape[-3]
    scores = torch.einsum("...rhd,...chd->...hrc", queries, keys)
    is_hidden = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1 - distance)
    return scores.masked_fill(is_hidden, -torch.inf)


def _scores_at(queries: Tensor, keys: Tensor, distance: int) -> Tensor:
    """[..., heads, rows, 1]: of each row with the one that is `distance` before it."""
    rows = queries.shape[-3]
    scores = (queries * keys.roll(distance, -3)).sum(-1).transpose(-1, -2).unsqueeze(-1)
    is_missing = torch.arange(rows, device=queries.device) < distance
    return scores.masked_fill(is_missing[:, None], -torch.inf)
