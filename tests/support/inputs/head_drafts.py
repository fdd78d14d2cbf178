"""What a feature head drafts, one row at a time, as a drafter has it."""

from __future__ import annotations

import torch
from draftline.models.heads.feature_head import FeatureHead
from draftline.training.heads.feature_passes import text_rows
from draftline.training.heads.target import TextBatch
from torch import Tensor, nn
from torch.nn import functional


class DraftedKeys:
    """What a drafter attends: the rows that it was given one by one, and the row itself."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, _layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[1, heads, head_dim]: of one row."""
        seen = [torch.cat(own) for own in zip(*self.kept, (keys, values), strict=True)]
        heads = [part.transpose(0, 1) for part in (queries, *seen)]
        attended = functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return attended.transpose(0, 1)

    def keep(self, head: FeatureHead, *row: Tensor) -> None:
        """Keep a row's keys and values."""
        self.kept.append(head.keys_values(*row))


def drafted_behind(
    head: FeatureHead, embed: nn.Module, batch: TextBatch, *, text: int, row: int, count: int
) -> Tensor:
    """[count, hidden_size]: what predicts `count` drafts of a head that knows the target's states
    up to `row`, fed with the text's own tokens. There are `count` tokens behind the row.
    """
    rows = text_rows(embed, batch)
    embeddings, known = rows.embeddings[text], head.project(rows.features[text])
    keys, places = DraftedKeys(), torch.arange(len(known))
    for place in range(row):
        one = slice(place, place + 1)
        keys.keep(head, embeddings[one], known[one], places[one])
    found, state = [], known[row : row + 1]
    for place in range(row, row + count):
        one = slice(place, place + 1)
        output = head(embeddings[one], state, places[one], keys)
        keys.keep(head, embeddings[one], state, places[one])
        found.append(output.predict[0])
        state = output.regress
    return torch.stack(found)
