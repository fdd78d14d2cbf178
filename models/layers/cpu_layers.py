"""A stage's layers by draftline's CPU kernels (`kernels/cpu/source/layers.cpp`).

One call runs all layers. A row's result is bitwise independent of the other rows of the step, of
its tree and of the number of threads. Products add in the order of their inputs, attention in the
order of positions; everything else is row-wise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ...core.arrays import Int32
from ...core.steps import SamplingRows
from ...kernels.cpu.build import vectors
from ...kernels.cpu.packed_linear import (
    NOTHING,
    PackedWeight,
    pack_quantized,
    pack_weights,
    packed_linear,
    placed,
)
from ..load.chosen_layers import config_of_layers
from ..load.model_info import head_dim, num_kv_heads
from ..load.quantized_layouts import QuantizedWeight, side_by_side
from ..load.supported import base_and_layers, empty_model, runs_by_layers
from .fast_modules import (
    ATTENTIONS,
    GATED_MLPS,
    NORMS,
    FastAttention,
    FastGatedMlp,
    FastLinear,
    FastRmsNorm,
    KeptLinear,
    Rotation,
    dequantized,
    eps_of,
)
from .model_slice import ModelSlice

# The numbering of `kernels/cpu/source/layers.cpp`.
ACTIVATIONS: dict[type[nn.Module], int] = {SiLUActivation: 0, nn.SiLU: 0, GELUTanh: 1}
HEAD_NORMS, POST_NORMS, QKV_BIAS, OUT_BIAS, MLP_BIAS = 1, 2, 4, 8, 16
NOTHING_PACKED = PackedWeight(NOTHING)
# x + attention(norm(x)), then the same of the feed-forward block.
PRE_NORM_LAYERS: tuple[type[nn.Module], ...] = (
    llama.LlamaDecoderLayer,
    mistral.MistralDecoderLayer,
    qwen2.Qwen2DecoderLayer,
    qwen3.Qwen3DecoderLayer,
    gemma.GemmaDecoderLayer,
)
# x + norm(attention(norm(x))), then the same of the feed-forward block.
POST_NORM_LAYERS: tuple[type[nn.Module], ...] = (
    gemma2.Gemma2DecoderLayer,
    gemma3.Gemma3DecoderLayer,
)


def cpu_obstacle(config: PretrainedConfig, dtype: str, device: torch.device) -> str | None:
    """Why the CPU kernels cannot run a model's layers; None if they can. No weight is read."""
    if device.type != "cpu":
        return f"they are of CPUs, and the stage is on {device}"
    if dtype != "float32":
        return f"they compute in float32, not in {dtype}"
    if not runs_by_layers(config):
        return f"they do not know the layers of {config.model_type}"
    # All layers of these kinds are alike.
    [layer] = base_and_layers(empty_model(config_of_layers(config, [0])))[1]
    return _layer_obstacle(layer, config.model_type)


def _layer_obstacle(layer: Any, kind: str) -> str | None:
    if type(layer) not in (*PRE_NORM_LAYERS, *POST_NORM_LAYERS):
        return f"they do not know the layers of {kind}"
    if type(layer.self_attn) not in ATTENTIONS:
        return f"they do not know the attention of this {kind}"
    if type(layer.mlp) not in GATED_MLPS or type(layer.mlp.act_fn) not in ACTIVATIONS:
        return f"they do not know the feed-forward block of this {kind}"
    if layer.self_attn.head_dim % 2:
        return "heads of odd size cannot be halved"
    norms = {eps_of(child) for child in layer.modules() if type(child) in NORMS}
    return "the norms of a layer differ in epsilon" if len(norms) > 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What the kernels' `Layers` take of one layer."""

    vectors: Tensor
    weights: tuple[PackedWeight, ...]
    shape: tuple[int, ...]
    numbers: tuple[float, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """In their order."""
        return [self.vectors, *(tensor for weight in self.weights for tensor in weight)]


class CpuLayers:
    """Runs a slice's layers, its last norm and its head. The CPU kernels must be loaded.

    The slice's weights are moved, layer by layer, so that memory never holds more than one layer
    twice. Its modules cannot run afterwards.
    """

    def __init__(self, part: ModelSlice) -> None:
        assert part.fast
        kinds = sorted({kind or "" for kind in part.layer_types})
        self._kinds = [kind or None for kind in kinds]
        layers = [
            _take_layer(layer, kinds.index(kind or ""))
            for layer, kind in zip(part.layers, part.layer_types, strict=True)
        ]
        # Kept here, too, so that their bytes can be counted.
        self._tensors = [tensor for layer in layers for tensor in layer.tensors]
        self._layers = torch.classes.draftline.Layers(
            self._tensors,
            [value for layer in layers for value in layer.shape],
            [value for layer in layers for value in layer.numbers],
            part.config.hidden_size, num_kv_heads(part.config), head_dim(part.config),
        )  # fmt: skip
        self._norm, self._head = _take_norm(part.norm), _take_head(part.head)
        weights = [one for layer in layers for one in layer.weights if one is not NOTHING_PACKED]
        if self._head is not None:
            weights.append(self._head[0])
        # By kind, for the log.
        self.num_weights = Counter(weight.kind for weight in weights)

    def __call__(
        self, states: Tensor, tables: Mapping[str | None, Rotation], stops: Sequence[int] = ()
    ) -> Tensor:
        """[rows, (1 + stops) * hidden_size] of hidden states [rows, hidden_size]: those after all
        layers, and behind them those after so many of the layers, rising; within `computing` of a
        step.

        `tables` are those of a flat `RotaryTable`, of all positions.
        """
        return torch.ops.draftline.run_layers(
            self._layers, states.contiguous(), self._rotations(tables), stops
        )

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer's states [rows, hidden_size] as the head reads them."""
        assert self._norm is not None
        return torch.ops.draftline.rms_norm(hidden.contiguous(), *self._norm)

    def logits(self, hidden: Tensor, softcap: float | None = None) -> Tensor:
        """float32 [rows, vocabulary] of the last layer's states [rows, hidden_size].

        `softcap` bounds them by tanh, as Gemma 2 does.
        """
        out = self.project(self.normed(hidden))
        return out if softcap is None else torch.ops.draftline.soft_cap(out, softcap)

    def project(self, normed: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of normed states [rows, hidden_size], by the output head."""
        assert self._head is not None
        weight, outputs, bias = self._head
        out = packed_linear(normed, weight, outputs)
        if bias is not None:
            out.add_(bias)
        return out

    def decode(  # noqa: PLR0917 - the operator's
        self,
        tokens: Int32,
        slots: Int32,
        positions: Int32,
        embed: nn.Embedding,
        softcap: float | None,
        sampling: SamplingRows,
        end_ids: Int32,
        tables: Mapping[str | None, Rotation],
        stops: Sequence[int] = (),
        recorded: Tensor | None = None,
    ) -> Int32:
        """Decode several tokens after `tokens`, int32 [rows]; returns int32 [passes, rows]. Ends
        early once all rows have reached one of their `end_ids`, int32 [rows, n], or before a pass
        with logits that are not finite. If that is the first pass, it is returned, with -1 for
        these rows.

        Within `computing` of a step of a row a request, whose `sampling` is unfiltered.

        slots, positions  int32 [passes, rows]  of the rows of each pass; the first are the step's
        recorded  float32 [passes, rows, (1 + stops) * hidden_size]  is filled with what `__call__`
                  returns, of each pass; `stops` as there
        """
        assert self._norm is not None
        assert self._head is not None
        weight, outputs, bias = self._head
        chosen = torch.ops.draftline.decode(
            self._layers, torch.from_numpy(tokens), torch.from_numpy(slots),
            torch.from_numpy(positions), embed.weight, *self._norm, weight, outputs, bias, softcap,
            torch.from_numpy(sampling.temperature), torch.from_numpy(sampling.seed),
            torch.from_numpy(sampling.position), torch.from_numpy(end_ids),
            self._rotations(tables), stops, recorded,
        )  # fmt: skip
        return chosen.numpy()

    def _rotations(self, tables: Mapping[str | None, Rotation]) -> list[Tensor]:
        return [
            half
            for kind in self._kinds
            for half in (tables[kind] if kind in tables else tables[None])
        ]


def _take_layer(layer: Any, rotation: int) -> _Layer:
    attention: FastAttention = layer.self_attn
    mlp: FastGatedMlp = layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    flags = 0
    if type(layer) in POST_NORM_LAYERS:
        flags |= POST_NORMS
        norms[1:] = [
            layer.pre_feedforward_layernorm, layer.post_attention_layernorm,
            layer.post_feedforward_layernorm,
        ]  # fmt: skip
    if attention.q_norm is not None and attention.k_norm is not None:
        flags |= HEAD_NORMS
        norms += [attention.q_norm, attention.k_norm]
    biases = {
        QKV_BIAS: attention.project.bias, OUT_BIAS: attention.out.bias,
        MLP_BIAS: _joined(mlp.gate.bias, mlp.up.bias, mlp.down.bias),
    }  # fmt: skip
    flags |= sum(flag for flag, bias in biases.items() if bias is not None)
    vectors_of = [_weight_of(norm) for norm in norms]
    vectors_of += [bias for bias in biases.values() if bias is not None]
    shape = (
        attention.layer, attention.num_heads, mlp.gate.num_outputs,
        ACTIVATIONS[type(mlp.activation)], attention.window or 0, rotation, flags,
    )  # fmt: skip
    numbers = (attention.scaling, attention.softcap or 0.0, layer.input_layernorm.eps)
    weights = (
        *_take(3, attention.project), *_take(1, attention.out), *_take(2, mlp.gate, mlp.up),
        *_take(1, mlp.down),
    )  # fmt: skip
    return _Layer(torch.cat(vectors_of), weights, shape, numbers)


def _joined(*biases: Tensor | None) -> Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.cat(found) if found else None


def _weight_of(norm: FastRmsNorm) -> Tensor:
    return norm.scale / len(norm.scale) ** 0.5


def _take(most: int, *linears: FastLinear | KeptLinear) -> list[PackedWeight]:
    """The packed weights of layers with the same input; they are removed from the layers.

    One with the outputs of all where these are alike, else `most`; the others are empty.
    """
    weights: list[Tensor | QuantizedWeight] = []
    for linear in linears:
        if isinstance(linear, KeptLinear):
            weights += linear.weights
            linear.weights = []
        else:
            weights.append(linear.weight.t())
            linear.weight = linear.weight.new_empty(0)
    together = _packed(weights)
    packed = [_packed([weight]) for weight in weights] if together is None else [together]
    return [placed(one) for one in packed if one] + [NOTHING_PACKED] * (most - len(packed))


def _packed(weights: Sequence[Tensor | QuantizedWeight]) -> PackedWeight | None:
    """Weights side by side, in as few bits as the kernels know; None where their kinds differ."""
    panel = vectors().panel
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return pack_weights([dequantized(weight).t() for weight in weights], panel)
    joined = side_by_side(quantized) if len(quantized) == len(weights) else None
    if joined is None:
        return None
    packed = pack_quantized(
        joined.codes, joined.scales, joined.zeros, joined.group_of, vectors(), joined.minima
    )
    return packed or pack_weights([dequantized(joined).t()], panel)


def _take_norm(norm: Any) -> tuple[Tensor, float] | None:
    return None if norm is None else (_weight_of(norm), norm.eps)


def _take_head(head: Any) -> tuple[PackedWeight, int, Tensor | None] | None:
    if head is None:
        return None
    outputs = head.num_outputs
    [weight] = _take(1, head)
    return weight, outputs, head.bias
