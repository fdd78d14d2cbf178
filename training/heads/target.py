"""The target of a head in training: its states of texts, and the modules that a head shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class HiddenStates(Protocol):
    """Computes a target's hidden states of texts, in this process or elsewhere."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose outputs it gives, ascending; -1: the embeddings. The last one is among them,
        normed."""
        ...

    def launch(self, tokens: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to compute those of texts int64 [texts, length], of each its first `lengths`.

        The returned function waits for float32 [texts, length, len(layers) * hidden_size]; what
        stands behind a text's end means nothing, but is finite.
        """
        ...


def state_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers of a `HiddenStates` for a head that reads those of `layers`."""
    return tuple(sorted({*layers, num_layers - 1}))


class WholeModel:
    """The `HiddenStates` of a model in this process, computed when they are waited for."""

    def __init__(self, base_model: nn.Module, layers: tuple[int, ...]) -> None:
        self._model = base_model
        self._layers = layers

    @property
    def layers(self) -> tuple[int, ...]:
        """See `HiddenStates`."""
        return self._layers

    def launch(self, tokens: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:  # noqa: ARG002
        """See `HiddenStates`."""
        return lambda: self._states(tokens)

    @torch.no_grad()
    def _states(self, tokens: Tensor) -> Tensor:
        reads_between = len(self._layers) > 1
        states = self._model(input_ids=tokens, use_cache=False, output_hidden_states=reads_between)
        if not reads_between:
            return states.last_hidden_state.float()
        # The input of layer k is the output of layer k - 1.
        every = [states.hidden_states[layer + 1] for layer in self._layers]
        return torch.cat(every, dim=-1).float()


class CappedHead(nn.Module):
    """An output head whose logits stay below a bound (Gemma 2): `cap * tanh(logits / cap)`."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self._head, self._cap = head, cap

    @property
    def weight(self) -> nn.Parameter:
        """[vocabulary, hidden_size]."""
        return self._head.get_parameter("weight")

    def forward(self, states: Tensor) -> Tensor:
        """[..., vocabulary] of normed states [..., hidden_size]."""
        return self.capped(self._head(states))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits below the bound."""
        return torch.tanh(logits / self._cap) * self._cap


def logits_of(lm_head: nn.Module, states: Tensor, tokens: Tensor) -> Tensor:
    """[..., tokens]: an output head's logits of some tokens alone, of states [..., hidden_size]."""
    bias = getattr(lm_head, "bias", None)
    weight = lm_head.get_parameter("weight")[tokens]
    logits = functional.linear(states, weight, None if bias is None else bias[tokens])
    return lm_head.capped(logits) if isinstance(lm_head, CappedHead) else logits


def _last_norm(base: nn.Module) -> nn.Module:
    """What stands behind a model's layers; its name differs by the kind of model."""
    *_, norm = (
        module
        for module in base.children()
        if {weight.ndim for weight in module.parameters()} == {1}
    )
    return norm


class Target:
    """A frozen model.

    embed    token ids to embeddings
    norm     last states to normed ones
    project  normed states to the products of its output head
    lm_head  normed states to logits, these products but for models that bound them
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        layers: Sequence[int] = (),
        states: HiddenStates | None = None,
        keep: Callable[[HiddenStates], HiddenStates] | None = None,
    ) -> None:
        """Load it in float32.

        layers  whose outputs are the features, side by side; -1: the embeddings. The last layer's
                output is normed. Empty: only the last normed state
        states  computes them, of `state_layers(layers)`; the model's decoder layers are not loaded
                then. None: they are computed on `device`
        keep    makes of what computes them what keeps them for later epochs, too
        """
        model = load_whole_model(folder, with_layers=states is None)
        model.requires_grad_(False)
        self._device = device
        self.embed: nn.Module = model.get_input_embeddings().to(device)
        self.norm = _last_norm(model.base_model).to(device)
        lm_head = model.get_output_embeddings()
        assert isinstance(lm_head, nn.Module)
        self.project: nn.Module = lm_head.to(device)
        cap = getattr(model.config, "final_logit_softcapping", None)
        self.lm_head = self.project if cap is None else CappedHead(self.project, cap)
        wanted = state_layers(layers, model.config.num_hidden_layers)
        states = states or WholeModel(model.base_model.to(device), wanted)
        self._states = states if keep is None else keep(states)
        assert self._states.layers == wanted, f"states are of {self._states.layers}, not {wanted}"
        # Columns of features among the states, in blocks of a layer's width.
        self._places = [wanted.index(layer) for layer in layers or wanted[-1:]]

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden_size]: the table behind `embed`, which may scale what it reads."""
        weight = self.embed.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def state_bytes(self) -> int:
        """Of the states of one token, float32."""
        return len(self._states.layers) * self.lm_head.get_parameter("weight").shape[1] * 4

    def batch(self, texts: Sequence[DistilledText], window: int) -> TextBatch:
        """Texts with their features, [texts, length, layers * hidden_size]."""
        return self.launch(texts, window)()

    def launch(self, texts: Sequence[DistilledText], window: int) -> Callable[[], TextBatch]:
        """As `batch`, whose result the returned function waits for."""
        tokens, answers = (part.to(self._device) for part in text_batch(texts, window))
        wait = self._states.launch(tokens, [min(len(text.tokens), window) for text in texts])

        def batch() -> TextBatch:
            states = wait().to(self._device)
            by_layer = states.unflatten(-1, (len(self._states.layers), -1))
            features = by_layer[..., self._places, :].flatten(-2)
            return TextBatch(tokens, features, answers, by_layer[..., -1, :])

        return batch
