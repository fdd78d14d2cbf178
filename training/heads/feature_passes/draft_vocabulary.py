"""The tokens that a head with an output head of its own can draft (EAGLE-3, arXiv 2503.01840).

Rare tokens are rarely drafted. With only the most frequent ones, the output head, which is most of
a small drafter's work, is a fraction of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ....models.heads.feature_head import FeatureHead
from ..distilled_texts import DistilledText


def frequent_tokens(texts: Sequence[DistilledText], vocab_size: int, count: int) -> Tensor:
    """int64 [count]: the most frequent tokens in the answers of texts, by ascending id.

    Lower ids win ties.
    """
    said = np.concatenate([text.tokens[text.num_prompt :] for text in texts]).astype(np.int64)
    counts = np.bincount(said, minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


@torch.no_grad()
def begin_vocabulary(head: FeatureHead, tokens: Tensor, output: Tensor) -> None:
    """Set a head's draft vocabulary, and initialise its output head with the target's rows.

    tokens  int64 [draft vocabulary]
    output  [vocabulary, hidden_size]  the target's
    """
    head.lm_head.weight.copy_(output[tokens.to(output.device)])
    if head.config.has_token_map:
        places = torch.arange(len(tokens))
        head.d2t.copy_(tokens - places)


def vocabulary_of(head: FeatureHead) -> Tensor:
    """int64 [draft vocabulary]: the target's ids of the tokens that a head can draft."""
    count = head.config.draft_vocab_size or head.config.vocab_size
    device = next(head.parameters()).device
    return head.target_tokens(torch.arange(count, device=device))


def draft_logits(head: FeatureHead, lm_head: nn.Module, predict: Tensor) -> Tensor:
    """[..., draft vocabulary]: by the head's own output head, or by the target's."""
    return head.lm_head(predict) if head.config.draft_vocab_size else lm_head(predict)


def best_tokens(head: FeatureHead, logits: Tensor) -> Tensor:
    """int64 [...]: the target's id of the most probable token."""
    return head.target_tokens(logits.argmax(-1))
