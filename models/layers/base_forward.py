"""A stage's part of any decoder, by the forward of transformers' own modelling code.

What stands between the layers of a model differs by its kind: scaled embeddings, positions that are
added, kinds of layers, scaled logits. So the whole forward runs, with the layers of other stages as
pass-throughs, and the first of the stage's own layers reads what the stage before returned. The
stage's attention is behind transformers' attention interface (`attention/backend.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.backend import attending
from ..attention.kernel_attention import StepKernels
from ..attention.latent import has_latents, keep_latents
from ..attention.step_attention import StepAttention
from ..load.partition import LayerSpan
from ..load.supported import base_and_layers
from ..recurrence.modules import keep_in_pool, state_shape, stateful_modules
from ..recurrence.state_pool import StateShape, StepStates, keeping


def attending_layers(layers: Sequence[nn.Module]) -> list[int]:
    """Those of a model whose keys and values are kept, from 0: with states, not all."""
    is_hybrid = any(any(stateful_modules(layer)) for layer in layers)
    return [
        number
        for number, layer in enumerate(layers)
        if not is_hybrid or any(hasattr(module, "is_causal") for module in layer.modules())
    ]


@dataclass(slots=True)
class _Run:
    """Layers `first` to before `last` of the model run.

    states  [1, rows, hidden_size] that the first of them reads, or layer 0 where none runs; None:
            what comes to it
    result  behind the last of them, or before layer 0 where none runs
    """

    first: int
    last: int
    states: Tensor | None
    result: Tensor | None = None

    def found(self) -> Tensor:
        """The result, [rows, hidden_size]."""
        assert self.result is not None, "the model did not call its layers"
        return self.result[0]


class BaseForward:
    """The modules of one stage; others stay on the meta device. One thread runs it at a time."""

    def __init__(
        self, whole: Any, span: LayerSpan, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Takes over `whole`, a causal language model with draftline's attention.

        Raises `CheckpointError` where its layers cannot be told.
        """
        self._whole, self._span = whole, span
        self._run = _Run(0, 0, None)
        base, places = base_and_layers(whole)
        self._base: Any = getattr(whole, base)
        self.layers = tuple(places)
        # Layers of the stage whose keys and values are kept, from 0.
        self.kv_layers, self.state_shapes = list[int](), list[StateShape]()
        with_kv = attending_layers(self.layers)
        for number, layer in enumerate(self.layers):
            places[number] = _Switch(self, number, layer)
            if span.first <= number < span.last:
                self._keep_states(layer)
                self._attend(layer)
                if number in with_kv:
                    self.kv_layers.append(number - span.first)
        self.embed: nn.Module = self._base.get_input_embeddings()
        if not span.is_first:
            like = torch.empty(0, whole.config.hidden_size, dtype=dtype, device=device)
            self._base.set_input_embeddings(_NoEmbedding(like))
        # The model's own forward scales or bounds the logits.
        self._given = _Given(self._base)
        setattr(whole, base, self._given)

    def _attend(self, layer: nn.Module) -> None:
        """Say to a layer's modules where its keys and values are kept."""
        for module in [*layer.modules()]:
            # An attribute of modules that their types do not know.
            object.__setattr__(module, "draftline_layer", len(self.kv_layers))
            if has_latents(module):
                keep_latents(module)

    def _keep_states(self, layer: nn.Module) -> None:
        for module in stateful_modules(layer):
            keep_in_pool(module, len(self.state_shapes))
            self.state_shapes.append(state_shape(module, self._whole.config.hidden_size))

    @property
    def wants_torch(self) -> bool:
        """Whether its attention has what torch's own computes alone: chunks or sinks."""
        types = getattr(self._whole.config, "layer_types", None) or ()
        modules = [module for layer in self.layers for module in layer.modules()]
        return "chunked_attention" in types or any(hasattr(module, "sinks") for module in modules)

    def embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What the first layer reads, [rows, hidden_size], of int64 tokens at int64 positions."""
        run = _Run(0, 0, None)
        self._go(run, token_ids, positions)
        return run.found()

    def run(
        self, states: Tensor, token_ids: Tensor, positions: Tensor,
        attention: StepAttention | StepKernels, layers: slice, kept: StepStates | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [rows, hidden_size], in and out, of some of the stage's layers.

        kept  the step's, where `state_shapes` has any
        """
        first, last, _ = layers.indices(self._span.last - self._span.first)
        if first == last:
            return states
        run = _Run(self._span.first + first, self._span.first + last, states[None])
        with attending(attention), keeping(kept):
            self._go(run, token_ids, positions)
        return run.found()

    def normed(self, states: Tensor) -> Tensor:
        """The last layer's states [rows, hidden_size] as the head reads them."""
        if not len(states):
            return states
        positions = torch.arange(len(states), device=states.device)
        return self._go(_Run(0, 0, states[None]), torch.zeros_like(positions), positions)[0]

    def projected(self, normed: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of normed states."""
        if not len(normed):
            return normed.new_empty(0, self._whole.get_output_embeddings().out_features)
        self._given.states = normed[None]
        # Some kinds compare their number with that of the states.
        token_ids = torch.zeros(1, len(normed), dtype=torch.int64, device=normed.device)
        return self._whole(input_ids=token_ids, use_cache=False).logits[0]

    def prune_head(self, head: nn.Module) -> None:
        """Give the model another head."""
        self._whole.set_output_embeddings(head)

    def _go(self, run: _Run, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What the model's last norm gives."""
        self._run = run
        return self._base(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state

    def passes(self, number: int, layer: nn.Module, states: Tensor, *args: Any, **kw: Any) -> Any:
        """What stands where layer `number` stands: the layer, or nothing."""
        run = self._run
        if number == run.first and run.states is not None:
            states = run.states
        if run.first == run.last and number == 0:
            run.result = states
        if not run.first <= number < run.last:
            return (states,) if _returns_tuple(layer) else states
        out = layer(states, *args, **kw)
        if number == run.last - 1:
            run.result = out if isinstance(out, Tensor) else out[0]
        return out


def _returns_tuple(layer: nn.Module) -> bool:
    """Whether it returns its states in a tuple, which its model takes them out of."""
    forward = inspect.unwrap(type(layer).forward)
    # Others say that they return more, and return a tensor.
    return forward.__annotations__.get("return") == tuple[Tensor]


class _Switch(nn.Module):
    """Stands where a layer stands."""

    def __init__(self, forward: BaseForward, number: int, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        self._passes = forward.passes

    def __getattr__(self, name: str) -> Any:
        """Also what the model's forward asks the layer about."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        return self._passes(self.number, self.layer, hidden_states, *args, **kwargs)


class _NoEmbedding(nn.Module):
    """Zeros in place of embeddings that another stage holds."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` [0, hidden_size], of the stage's dtype and device."""
        super().__init__()
        self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """[..., hidden_size] of tokens [...]."""
        return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])


class _Output(dict[str, Any]):
    """Outputs of a base model: its last states, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


class _Given(nn.Module):
    """A base model whose result is known."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.states: Tensor | None = None
        # Not as a module of this one.
        self._of = (base,)

    def __getattr__(self, name: str) -> Any:
        """Some kinds call a part of their base model, or read a number of it."""
        value = getattr(self._of[0], name, None)
        return value if isinstance(value, int | float) else self

    def forward(self, *_args: object, **_kwargs: object) -> _Output:
        """The result."""
        return _Output(last_hidden_state=self.states)
