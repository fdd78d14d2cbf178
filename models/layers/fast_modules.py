"""Faster equivalents of some of transformers' modules, for float32 on CPUs.

A pass over few tokens spends its time in dispatching small operations. Each replacement computes
the same as its original, with fewer operations; the decoder layers themselves stay. Modules that
are not in the tables below stay unchanged. Chosen once, at load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ..attention.kernel_attention import StepKernels
from ..attention.step_attention import StepAttention
from ..load.quantized_layouts import QuantizedWeight
from .linear_layers import QuantizedLinear

Rotation = tuple[Tensor, Tensor]
# RMSNorm classes by what their weight is added to before it scales.
NORMS: dict[type[nn.Module], float] = {
    llama.LlamaRMSNorm: 0.0,
    mistral.MistralRMSNorm: 0.0,
    qwen2.Qwen2RMSNorm: 0.0,
    qwen3.Qwen3RMSNorm: 0.0,
    gemma.GemmaRMSNorm: 1.0,
    gemma2.Gemma2RMSNorm: 1.0,
    gemma3.Gemma3RMSNorm: 1.0,
}
# down_proj(act_fn(gate_proj(x)) * up_proj(x))
GATED_MLPS: tuple[type[nn.Module], ...] = (
    llama.LlamaMLP,
    mistral.MistralMLP,
    qwen2.Qwen2MLP,
    qwen3.Qwen3MLP,
    gemma.GemmaMLP,
    gemma2.Gemma2MLP,
    gemma3.Gemma3MLP,
)
# Projections, norms of query and key heads where there are any, full rotary embedding, attention.
ATTENTIONS: tuple[type[nn.Module], ...] = (
    llama.LlamaAttention,
    mistral.MistralAttention,
    qwen2.Qwen2Attention,
    qwen3.Qwen3Attention,
    gemma.GemmaAttention,
    gemma2.Gemma2Attention,
    gemma3.Gemma3Attention,
)


class AttentionOptions(NamedTuple):
    """Options of attention besides queries, keys and values; see `StepAttention.attend`."""

    scaling: float
    window: int | None
    softcap: float | None


def options_of(attention: Any) -> AttentionOptions:
    """The options that an attention module's forward passes to the attention interface.

    Its config and attributes may hold settings that its forward does not use, as Gemma 3's softcap.
    """
    noted = _NotedOptions()
    with torch.device("meta"):
        # Without weights: those of `attention` may be quantised, or of any size.
        twin: Any = type(attention)(attention.config, attention.layer_idx)
        twin.draftline_layer = attention.draftline_layer
        states = torch.empty(1, 1, twin.q_proj.in_features)
        turn = torch.empty(1, 1, twin.head_dim)
        twin(hidden_states=states, position_embeddings=(turn, turn), attention_mask=noted)
    assert noted.options is not None
    return noted.options


class _NotedOptions:
    """A fake of a step's attention that records the options of the call."""

    def __init__(self) -> None:
        self.options: AttentionOptions | None = None

    def write_heads(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store nothing."""

    def attend(
        self, _layer: int, query: Tensor, scaling: float,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """A tensor of the right shape."""
        self.options = AttentionOptions(scaling, window, softcap)
        return query


class RotaryTable:
    """Cosines and sines of all positions, made by the model's own rotary module.

    The module's result for a position depends on nothing else (batch-dependent kinds are refused
    at load), so a row of the table equals what the module computes. Grows when needed.
    """

    def __init__(
        self, rotary: nn.Module, layer_types: Iterable[str], like: Tensor, *, flat: bool = False
    ) -> None:
        """`like` gives dtype and device of the hidden states.

        `flat` is for `FastAttention`: rotations are [rows, 1, width], and the first half of the
        sines is negated, which `rotate_half` does to the heads otherwise.
        """
        self._rotary = rotary
        self._like = like
        self._flat = flat
        by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        self._types = tuple(sorted(set(layer_types))) if by_type else (None,)
        # Replaced when it grows, so that old references stay valid.
        self.tables: Mapping[str | None, Rotation] = {}
        self._num_positions = 0

    def rotations(self, positions: Tensor, largest: int) -> dict[str | None, Rotation]:
        """Cosine and sine [1, rows, width] by layer type (None: for all) at int64 `positions`.

        `largest` is the largest of them, given by the caller to avoid a device synchronisation.
        """
        return self.look_up(self.tables_of(largest), positions)

    def tables_of(self, largest: int) -> Mapping[str | None, Rotation]:
        """Cosines and sines of the positions up to `largest`, or of more, by layer type."""
        if largest >= self._num_positions:
            self._grow(max(2 * self._num_positions, largest + 1, 256))
        return self.tables

    def look_up(
        self, tables: Mapping[str | None, Rotation], positions: Tensor
    ) -> dict[str | None, Rotation]:
        """As `rotations`, from `tables` of this object; `positions` int32 or int64."""
        axis = 0 if self._flat else 1
        return {
            layer_type: (cos.index_select(axis, positions), sin.index_select(axis, positions))
            for layer_type, (cos, sin) in tables.items()
        }

    def reserve(self, num_positions: int) -> None:
        """Hold the positions below `num_positions` from now on."""
        if num_positions > self._num_positions:
            self._grow(num_positions)

    def _grow(self, num_positions: int) -> None:
        self._num_positions = num_positions
        tables: dict[str | None, Rotation] = {}
        all_positions = torch.arange(self._num_positions, device=self._like.device)[None]
        for layer_type in self._types:
            kind = {} if layer_type is None else {"layer_type": layer_type}
            cos, sin = self._rotary(self._like, all_positions, **kind)
            tables[layer_type] = _flattened(cos, sin) if self._flat else (cos, sin)
        self.tables = tables


def _flattened(cos: Tensor, sin: Tensor) -> Rotation:
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos.transpose(0, 1).contiguous(), sin.transpose(0, 1).contiguous()


def can_be_fast(layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `make_fast` applies to a decoder layer."""
    kinds = nn.Linear | QuantizedLinear
    known = type(layer.self_attn) in ATTENTIONS and isinstance(layer.self_attn.q_proj, kinds)
    return known and dtype == torch.float32 and device.type == "cpu"


def make_fast(module: Any) -> Any:
    """A module's fast replacement; an unknown module itself, with its known children replaced.

    A decoder layer then takes hidden states [rows, hidden_size] and rotations of
    `RotaryTable(..., flat=True)`.
    """
    if type(module) in NORMS:
        return FastRmsNorm(module)
    if type(module) in GATED_MLPS:
        return FastGatedMlp(module)
    if type(module) in ATTENTIONS:
        return FastAttention(module)
    for name, child in list(module.named_children()):
        setattr(module, name, make_fast(child))
    return module


class FastLinear:
    """A linear layer whose weight lies input-major: BLAS is up to twice as fast for few rows.

    No `nn.Module`: looking one up in another and calling it takes as long as a small operation.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, *linears: nn.Linear) -> None:
        """Several layers of the same input become one, their outputs side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.weight = weight.t().contiguous()
        self.bias: Tensor | None = None
        if linears[0].bias is not None:
            self.bias = torch.cat([linear.bias.detach() for linear in linears])

    @property
    def num_outputs(self) -> int:
        """Of all together."""
        return self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)


class KeptLinear:
    """The same of layers with quantised weights, until the CPU kernels take them over.

    weights  of each layer, [outputs, inputs]
    """

    __slots__ = ("bias", "num_outputs", "weights")

    def __init__(self, *linears: nn.Linear | QuantizedLinear) -> None:
        self.weights = [linear.weight for linear in linears]
        self.num_outputs = sum(weight.shape[0] for weight in self.weights)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.bias: Tensor | None = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs], slowly."""
        out = torch.cat([x @ dequantized(weight).t() for weight in self.weights], dim=1)
        return out if self.bias is None else out + self.bias

    def of_rows(self, rows: Tensor) -> KeptLinear:
        """These outputs of a single layer alone, int64 [n], in their order."""
        [weight] = self.weights
        assert isinstance(weight, QuantizedWeight)
        pruned = QuantizedLinear(weight.of_rows(rows))
        if self.bias is not None:
            pruned.bias = nn.Parameter(self.bias[rows], requires_grad=False)
        return KeptLinear(pruned)


def dequantized(weight: QuantizedWeight | Tensor) -> Tensor:
    """float32 [outputs, inputs] of a weight, quantised or not."""
    return weight.dequantized(torch.float32) if isinstance(weight, QuantizedWeight) else weight


def fast_linear(*linears: nn.Linear | QuantizedLinear) -> FastLinear | KeptLinear:
    """One layer of several of the same input, their outputs side by side."""
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    return FastLinear(*plain) if len(plain) == len(linears) else KeptLinear(*linears)


def eps_of(norm: Any) -> float:
    """The epsilon of a module of `NORMS`."""
    return getattr(norm, "variance_epsilon", None) or norm.eps


class FastRmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight)."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        weight = norm.weight.detach()
        eps = eps_of(norm)
        self.eps = eps
        self.scale = (weight + NORMS[type(norm)]) * len(weight) ** 0.5
        self.floor = torch.tensor([(len(weight) * eps) ** 0.5])

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of `x`."""
        length = vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.floor)).mul_(self.scale)

    __call__ = forward  # There are no hooks to run.


class FastGatedMlp(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate = fast_linear(mlp.gate_proj)
        self.up = fast_linear(mlp.up_proj)
        self.down = fast_linear(mlp.down_proj)
        self.activation: nn.Module = mlp.act_fn
        self.act = mlp.act_fn.forward

    def forward(self, x: Tensor) -> Tensor:
        """`x` [rows, hidden_size], in and out."""
        return self.down(self.act(self.gate(x)).mul_(self.up(x)))

    __call__ = forward


class FastAttention(nn.Module):
    """Projections in one product, rotation in place, keys and values stored by one copy."""

    def __init__(self, attention: Any, linear: Callable[..., Any] = fast_linear) -> None:
        """`linear` makes one layer of several of the same input."""
        super().__init__()
        self.layer: int = attention.draftline_layer
        self.head_dim: int = attention.head_dim
        self.scaling, self.window, self.softcap = options_of(attention)
        self.project = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = linear(attention.o_proj)
        num_queries, num_keys = (
            one.weight.shape[0] // self.head_dim for one in (attention.q_proj, attention.k_proj)
        )
        self.num_heads: int = num_queries
        self.num_rotated: int = num_queries + num_keys
        self.q_norm = _fast_norm(attention, "q_norm")
        self.k_norm = _fast_norm(attention, "k_norm")

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation,
        attention_mask: StepAttention | StepKernels, **_unused: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """`hidden_states` [rows, hidden_size], in and out."""
        num_rows = len(hidden_states)
        heads = self.project(hidden_states).view(num_rows, -1, self.head_dim)
        self.turn(heads, position_embeddings)
        attention_mask.write(
            self.layer, heads[:, self.num_heads :].view(num_rows, 2, -1, self.head_dim)
        )
        query = heads[:, : self.num_heads]
        out = attention_mask.attend(self.layer, query, self.scaling, self.window, self.softcap)
        return self.out(out.reshape(num_rows, -1)), None

    __call__ = forward

    def turn(self, heads: Tensor, rotation: Rotation) -> None:
        """Normalise (where the model does) and rotate query and key heads in place.

        `heads` is [rows, heads, head_dim], those of values last.
        """
        if self.q_norm is not None and self.k_norm is not None:
            query, key = heads[:, : self.num_heads], heads[:, self.num_heads : self.num_rotated]
            query.copy_(self.q_norm(query))
            key.copy_(self.k_norm(key))
        rotated = heads[:, : self.num_rotated]
        cos, sin = rotation
        turned = torch.roll(rotated, self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(turned, sin)


def _fast_norm(attention: Any, name: str) -> FastRmsNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None else FastRmsNorm(norm)
