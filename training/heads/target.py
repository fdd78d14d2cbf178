"""The target of a head in training: its states of texts, and the modules that a head shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...models.layers.model_slice import load_whole_model
from .distilled_texts import DistilledText, text_batch


class TextBatch(NamedTuple):
    """Texts of a step.

    tokens    int64 [texts, length]
    features  [texts, length, features' width] of the target, the input of a head
    answers   bool [texts, length] the tokens that the target generated
    states    [texts, length, hidden_size]  the normed last ones, whose logits are the target's
    """

    tokens: Tensor
    features: Tensor
    answers: Tensor
    states: Tensor


class Target:
    """A frozen model.

    embed    token ids to embeddings
    norm     last states to normed ones
    lm_head  normed states to logits
    """

    def __init__(self, folder: Path, device: torch.device, layers: Sequence[int] = ()) -> None:
        """`layers`: the layers whose outputs are the features, side by side; -1: the embeddings.
        The last layer's output is normed. Empty: only the last normed state.
        """
        model = load_whole_model(folder)
        self._model: nn.Module = model.base_model.eval().requires_grad_(False).to(device)
        self._device, self._layers = device, tuple(layers)
        self.embed: nn.Module = model.get_input_embeddings()
        self.norm: nn.Module = model.base_model.get_submodule("norm")
        lm_head = model.get_output_embeddings()
        assert isinstance(lm_head, nn.Module)
        self.lm_head = lm_head.requires_grad_(False).to(device)

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden_size]: the table behind `embed`, which may scale what it reads."""
        weight = self.embed.weight
        assert isinstance(weight, Tensor)
        return weight

    @torch.no_grad()
    def batch(self, texts: Sequence[DistilledText], window: int) -> TextBatch:
        """Texts with their features, [texts, length, layers * hidden_size]."""
        tokens, said = (part.to(self._device) for part in text_batch(texts, window))
        states = self._model(
            input_ids=tokens, use_cache=False, output_hidden_states=bool(self._layers)
        )
        last = states.last_hidden_state.float()
        if not self._layers:
            return TextBatch(tokens, last, said, last)
        # The input of layer k is the output of layer k - 1.
        features = torch.cat([states.hidden_states[layer + 1] for layer in self._layers], dim=-1)
        return TextBatch(tokens, features.float(), said, last)
