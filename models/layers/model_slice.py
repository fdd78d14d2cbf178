"""One stage's part of a transformers model, with only its own tensors in memory.

The tensors come from safetensors into a model that is built on the meta device. Also the whole
model, for uses outside the engine's steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ...core.arrays import Int64
from ...core.errors import CheckpointError, ConfigError
from ...core.progress import Progress, Work, unseen
from ...kernels.cpu.packed_linear import PackedWeight
from ...kernels.quantized.kept_weight import KeptWeight
from ..attention.kernel_attention import StepKernels
from ..attention.step_attention import StepAttention
from ..load.checkpoint import WeightFiles, listed, one_ahead, read_config, resolve_model_path
from ..load.chosen_layers import ChosenLayers, config_of_layers
from ..load.converted_files import ConvertedFiles, converted
from ..load.model_info import num_kv_heads
from ..load.mtp_tensors import is_of_mtp
from ..load.partition import LayerSpan
from ..load.quantized_files import KeptFiles, QuantizedFiles, open_weights, read_kv_scales
from ..load.rounding import rounded
from ..load.supported import base_and_layers, check_supported, empty_model, naming, runs_by_layers
from .base_forward import BaseForward
from .experts import ChosenExperts, ExpertForm
from .fast_modules import (
    FastLinear,
    KeptLinear,
    Rotation,
    can_be_fast,
    fast_linear,
    make_fast,
)
from .fused_modules import FusedLayer, FusedOps, can_be_fused, make_fused
from .linear_layers import (
    NONE,
    CpuLinear,
    GpuHead,
    GpuLinear,
    GpuLinears,
    GpuPackedLinear,
    PackedLinear,
    Put,
    QuantizedLinear,
    by_output,
    can_keep,
    check_quantization,
    gpu_head,
    is_quantized,
    put_for_cpu_kernels,
    put_on_cpu,
    put_packed,
    sum_exactly,
)

logger = logging.getLogger(__name__)

MILLION = 1e6
Projection = Callable[[Tensor], Tensor]
# Files that can be read as they are stored.
Quantized = QuantizedFiles | KeptFiles | ConvertedFiles
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tensors(
    model: PreTrainedModel, span: LayerSpan | None, files: WeightFiles,
    dtype: torch.dtype, device: torch.device, *, quantization: str = NONE, keep: Put | None = None,
    experts: ExpertForm | None = None, progress: Progress = unseen,
) -> None:  # fmt: skip
    """Fill the parameters that `span` needs; all others stay on the meta device. None: all but the
    decoder layers.

    Tensor by tensor: the host never holds more than one beside what `device` holds, or two where
    that is a GPU, to which one is copied while the next is read; of a quantised checkpoint `device`
    holds the parts of one weight beside. `keep` takes the weights that are stored quantised, and of
    a `quantization` those of linear layers within the decoder layers; None: stored ones are
    dequantised. `experts` takes those of mixtures that it keeps; None: all are dequantised.

    Raises `CheckpointError` naming tensors that are missing, unexpected, of another shape or
    corrupt.
    """
    # With the buffers that checkpoints store.
    parameters = model.state_dict(keep_vars=True)
    files = converted(files, model)
    _check_unexpected(model, parameters.keys(), files)
    parts = _parts(model)
    every = not runs_by_layers(model.config)
    wanted = [name for name in parameters if _belongs(name, parts, span, every=every)]
    source_of = {name: _source(name, model, files.names) for name in wanted}
    missing = sorted(set(source_of.values()) - files.names)
    if missing:
        raise CheckpointError(f"{files.folder}: {listed(missing)} missing; fetch it again")
    loaded: dict[str, Tensor] = {}
    kept = {} if keep is None else _kept(model, source_of, files, quantization)
    put = keep or put_packed(dtype)
    chosen = None if experts is None else experts.choose(model, wanted, files)
    by_expert = set[str]() if chosen is None else chosen.names
    sources = sorted(
        {source for name, source in source_of.items() if name not in kept.keys() | by_expert}
    )
    tensors = files.read(sources)
    size = sum(parameters[name].numel() for name in {*sources, *kept, *by_expert})
    with progress("loading weights", total=size / MILLION, unit="million") as work:
        if experts is not None and chosen is not None:
            _put_experts(model, experts, chosen, work)
        for name, source in kept.items():
            assert isinstance(files, Quantized)
            weight = files.read_quantized(source).to(device)
            _check_shape(name, weight.shape, parameters[name], files)
            put(model, name, weight)
            work.advance(weight.codes.numel() / MILLION)
        for name, tensor in one_ahead(tensors) if device.type == "cuda" else tensors:
            _check_shape(name, tensor.shape, parameters[name], files)
            _check_type(name, tensor, files)
            placed = tensor.to(device, dtype)
            if quantization != NONE and is_quantized(model, name):
                try:
                    put(model, name, rounded(by_output(model, name, placed), quantization))
                except ValueError as error:
                    raise CheckpointError(f"{files.folder}: tensor {name}: {error}") from error
            else:
                is_parameter = isinstance(parameters[name], nn.Parameter)
                loaded[name] = nn.Parameter(placed, requires_grad=False) if is_parameter else placed
            work.advance(tensor.numel() / MILLION)
    if model.config.tie_word_embeddings:
        _tie_equal(loaded, model, files.folder)
    for name, source in source_of.items():
        if name in kept or source not in loaded:
            continue
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, loaded[source])


def _put_experts(
    model: PreTrainedModel, form: ExpertForm, chosen: ChosenExperts, work: Work
) -> None:
    """Load the experts that are kept; the log says as what, and which are not."""
    kinds = Counter[str]()
    for owner, matrices in chosen.kept.items():
        module = form.put(model, owner, matrices)
        kinds["+".join(sorted(module.kinds()))] += 1
        work.advance(sum(stored.shape.numel() for stored in matrices) / MILLION)
    if kinds:
        kept = " ".join(f"{kind}:{count}" for kind, count in kinds.items())
        logger.info("event=experts_kept layers=%d weights=%r", len(chosen.kept), kept)
    for reason, count in (+chosen.widened).items():
        logger.warning("event=experts_widened layers=%d reason=%r", count, reason)


def _kept(
    model: PreTrainedModel, source_of: Mapping[str, str], files: WeightFiles, quantization: str
) -> dict[str, str]:
    """The weights that stay as they are stored, with the checkpoint's names of them."""
    if not isinstance(files, Quantized):
        return {}
    head = _parts(model)[2]
    return {
        name: source
        for name, source in source_of.items()
        if source in files.quantized and can_keep(model, name)
        # A head that is stored beside its embedding is compared with that.
        if not (name.startswith(head) and name == source and model.config.tie_word_embeddings)
        # That of other decoders may be cut to some of its rows.
        if runs_by_layers(model.config) or not name.startswith(head)
        if quantization == NONE or not is_quantized(model, name)
    }


def _belongs(
    name: str, parts: tuple[str, str, str], span: LayerSpan | None, *, every: bool
) -> bool:
    """Whether a stage needs a tensor; `every` one what is in neither of `parts`."""
    layers, embedding, head = parts
    if span is None:
        return not name.startswith(layers)
    if name.startswith(layers):
        return span.first <= int(name.removeprefix(layers).split(".")[0]) < span.last
    if name.startswith(embedding):
        return span.is_first
    if name.startswith(head):
        return span.is_last
    return span.is_last or every


def _parts(model: Any) -> tuple[str, str, str]:
    """How the names of tensors begin that are in layers, in the embedding and in the head."""
    modules = base_and_layers(model)[1], model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    layers, embedding, head = (f"{names[id(module)]}." for module in modules)
    return layers, embedding, head


def _source(name: str, model: PreTrainedModel, stored: frozenset[str]) -> str:
    """The checkpoint's name of a parameter: of a tied pair, the other's where only that is there.

    A stored head takes precedence over `tie_word_embeddings`, as in transformers.
    """
    if not model.config.tie_word_embeddings or name in stored:
        return name
    pair = _tied(model)
    return next((other for other in pair if other in stored), name) if name in pair else name


def _tied(model: PreTrainedModel) -> tuple[str, str]:
    """The parameters that `tie_word_embeddings` ties."""
    _, embedding, head = _parts(model)
    return f"{embedding}weight", f"{head}weight"


def _tie_equal(loaded: dict[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
    """Keep one of a stored pair with equal weights; log a warning if they differ."""
    embedding, head = _tied(model)
    if embedding not in loaded or head not in loaded:
        return
    if torch.equal(loaded[embedding], loaded[head]):
        loaded[head] = loaded[embedding]
    else:
        logger.warning(
            "event=head_not_tied model=%s reason='config.json says tie_word_embeddings, and the "
            "stored lm_head differs from the embedding: it is used'",
            folder,
        )


def _check_unexpected(model: PreTrainedModel, known: Iterable[str], files: WeightFiles) -> None:
    extra = sorted(files.names.difference(known))
    unexpected = [
        name
        for name in extra
        if not files.is_incidental(name) and not is_of_mtp(name, model.config)
    ]
    if unexpected:
        raise CheckpointError(
            f"{files.folder}: {listed(unexpected)} unexpected in a "
            f"{model.config.model_type} model; config and weights do not belong together"
        )


def _check_shape(name: str, shape: torch.Size, wanted: Tensor, files: WeightFiles) -> None:
    if shape != wanted.shape:
        raise CheckpointError(
            f"{files.folder}: tensor {name} has shape {tuple(shape)}, the config says "
            f"{tuple(wanted.shape)}; config and weights do not belong together"
        )


def _check_type(name: str, tensor: Tensor, files: WeightFiles) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{files.folder}: tensor {name} is {tensor.dtype}, and config.json has no "
            "quantization_config that says what it means; fetch both again"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ModelSlice:
    """Modules of one stage; `embed` and `head` with `norm` only where the span has them.

    layer_types  the kind of attention of each layer (`full_attention`, ...), or None for all alike
    kv_scales    float32 [num_kv_layers, 2, kv_heads] the checkpoint's divisors of keys and values
                 for a cache of FP8; None: it has none
    fast         the modules are those of `fast_modules.py` or `fused_modules.py`: no batch
                 dimension, flat rotations
    forward      runs the layers of a kind of which more than its layers is needed; None: the layers
                 run one after the other
    """

    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    layers: tuple[nn.Module, ...]
    layer_types: tuple[str | None, ...]
    rotary: nn.Module | None
    embed: nn.Module | None
    norm: nn.Module | None
    head: Projection | None
    fast: bool
    kv_scales: Tensor | None = None
    forward: BaseForward | None = None

    @property
    def num_kv_layers(self) -> int:
        """Layers whose keys and values are kept."""
        return len(self.layers) if self.forward is None else len(self.forward.kv_layers)

    @property
    def softcap(self) -> float | None:
        """Bound of the logits, by tanh, that is not applied by `forward`; None: none.

        Only counts if the model's kind has such a setting, since a config keeps unknown fields.
        """
        name = "final_logit_softcapping"
        if self.forward is not None:
            return None
        return getattr(self.config, name) if hasattr(type(self.config), name) else None


def load_slice(
    model: str | Path, span: LayerSpan, dtype: str = "float32", device: str = "cpu",
    quantization: str = "none", *, fused: bool = False, keep: bool = False,
    experts_by_kernels: bool = False, progress: Progress = unseen,
) -> ModelSlice:  # fmt: skip
    """Load a stage's modules; with `fused`, those of `fused_modules.py` where supported.

    Linear layers keep quantised weights with `fused`, but for a head of other decoders, and with
    `keep`, for stages that `CpuLayers` runs. In others the weights of a quantised checkpoint are
    taken back to `dtype`.
    `quantization`, the stage's own rounding, rounds what is taken back. Activations are not
    quantised. Experts of mixtures keep quantised weights, too (`experts.py`);
    `experts_by_kernels`: the CPU kernels compute them, and are loaded; other layers of the mixture
    then also keep theirs.

    Raises `CheckpointError`, or `ConfigError` (`dtype`, `span`, `quantization`).
    """
    check_quantization(quantization)
    if dtype not in DTYPES:
        raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder = resolve_model_path(model)
    config = read_config(folder)
    check_supported(config, folder)
    if span.num_layers != config.num_hidden_layers:
        raise ConfigError(
            "span", f"is of {span.num_layers} layers, the model has {config.num_hidden_layers}"
        )
    with naming(folder, config):
        whole = empty_model(config)
    files = open_weights(folder, config, DTYPES[dtype], torch.device(device))
    put = put_for_cpu_kernels if keep else put_on_cpu if experts_by_kernels else None
    if fused and (
        not runs_by_layers(config) or can_be_fused(base_and_layers(whole)[1][span.first])
    ):
        put = put_packed(DTYPES[dtype])
    experts = ExpertForm(
        DTYPES[dtype], torch.device(device), quantization, by_kernels=experts_by_kernels
    )
    load_tensors(
        whole, span, files, DTYPES[dtype], torch.device(device),
        quantization=quantization, keep=put, experts=experts, progress=progress,
    )  # fmt: skip
    scales = read_kv_scales(
        files, whole.base_model_prefix, span.first, span.last, num_kv_heads(config)
    )
    part = cut_slice(whole, span, DTYPES[dtype], torch.device(device), fused=fused)
    if put is not None and not keep and (quantization != NONE or isinstance(files, Quantized)):
        kinds = Counter(map(_kind, _products(part)))
        kept = " ".join(f"{kind}:{count}" for kind, count in kinds.items())
        # Of gpt-oss's checkpoint the experts alone are quantised.
        if kept:
            logger.info("event=quantized_weights_kept layers=%d weights=%r", len(part.layers), kept)
    if scales is None:
        return part
    if part.forward is not None:
        scales = scales[part.forward.kv_layers]
    return replace(part, kv_scales=scales.to(device))


Product = GpuLinear | GpuPackedLinear | GpuHead | CpuLinear | PackedLinear


def _products(part: ModelSlice) -> Iterator[Product]:
    """Of the modules of a stage that keep weights as they are stored."""
    for layer in part.layers:
        for module in layer.modules():
            if isinstance(module, CpuLinear | PackedLinear):
                yield module
            for value in vars(module).values():
                if isinstance(value, GpuLinear | GpuPackedLinear):
                    yield value
                elif isinstance(value, GpuLinears):
                    yield from value.parts
    if isinstance(part.head, GpuHead | GpuPackedLinear):
        yield part.head


def _kind(product: Product) -> str:
    weight = product.weight
    if isinstance(weight, KeptWeight | PackedWeight):
        return weight.kind
    return f"{weight.dtype}".partition(".")[2]


def cut_slice(
    whole: Any, span: LayerSpan, dtype: torch.dtype, device: torch.device, *, fused: bool
) -> ModelSlice:
    """The stage's modules of a model in which only these have their tensors."""
    if not runs_by_layers(whole.config):
        return _forward_slice(whole, span, dtype, device)
    inner = whole.base_model
    layers = inner.layers[span.first : span.last]
    layer_types = tuple(getattr(layer.self_attn, "layer_type", None) for layer in layers)
    for index, layer in enumerate(layers):
        layer.self_attn.draftline_layer = index
    fused = fused and can_be_fused(layers[0])
    fast = not fused and can_be_fast(layers[0], dtype, device)
    fused_ops = FusedOps.load("triton") if fused else None
    if device.type == "cuda":
        sum_exactly()

    def ready(module: nn.Module) -> nn.Module:
        module = module.to(device)
        if fused_ops is not None:
            return make_fused(module, fused_ops)
        return make_fast(module) if fast else module

    return ModelSlice(
        config=whole.config,
        dtype=dtype,
        device=device,
        layers=tuple(map(ready, layers)),
        layer_types=layer_types,
        rotary=inner.rotary_emb.to(device),
        embed=inner.embed_tokens.to(device) if span.is_first else None,
        norm=ready(inner.norm) if span.is_last else None,
        head=_head(whole.lm_head.to(device), fused_ops, fast=fast) if span.is_last else None,
        fast=fast or fused,
    )


def _forward_slice(
    whole: Any, span: LayerSpan, dtype: torch.dtype, device: torch.device
) -> ModelSlice:
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    head = whole.get_output_embeddings()
    forward = BaseForward(whole, span, dtype, device)
    return ModelSlice(
        config=whole.config,
        dtype=dtype,
        device=device,
        layers=forward.layers[span.first : span.last],
        layer_types=(),
        rotary=None,
        embed=forward.embed if span.is_first else None,
        norm=None,
        head=head if span.is_last else None,
        fast=False,
        forward=forward,
    )


def _head(
    linear: nn.Linear | QuantizedLinear | PackedLinear, fused_ops: FusedOps | None, *, fast: bool
) -> Projection:
    if fused_ops is not None:
        assert not isinstance(linear, QuantizedLinear)
        return gpu_head(fused_ops.few_rows, linear)
    assert not isinstance(linear, PackedLinear)
    return fast_linear(linear) if fast else linear


def with_pruned_head(part: ModelSlice, rows: Int64) -> ModelSlice:
    """The slice with these rows of its head, int64 [n], in their order."""
    assert part.head is not None
    head = _pruned_head(part.head, rows)
    if part.forward is not None:
        assert isinstance(head, nn.Module)
        part.forward.prune_head(head)
    return replace(part, head=head)


def _pruned_head(head: Projection, rows: Int64) -> Projection:
    if isinstance(head, GpuHead):
        return head.of_rows(torch.from_numpy(rows).to(head.weight.device))
    if isinstance(head, GpuPackedLinear):
        return head.of_rows(torch.from_numpy(rows).to(head.weight.codes.device))
    if isinstance(head, KeptLinear):
        return head.of_rows(torch.from_numpy(rows))
    assert isinstance(head, FastLinear | nn.Linear)
    is_fast = isinstance(head, FastLinear)
    weight = head.weight.t() if is_fast else head.weight
    kept = torch.from_numpy(rows).to(weight.device)
    pruned = nn.Linear(weight.shape[1], len(kept), bias=head.bias is not None, device="meta")
    pruned.weight = nn.Parameter(weight[kept].contiguous(), requires_grad=False)
    if head.bias is not None:
        pruned.bias = nn.Parameter(head.bias[kept].contiguous(), requires_grad=False)
    return FastLinear(pruned) if is_fast else pruned


def is_table(embed: nn.Module | None) -> TypeGuard[nn.Embedding]:
    """Whether the module does nothing but look rows up."""
    return type(embed) is nn.Embedding and embed.max_norm is None


def embedded(embed: nn.Module, token_ids: Tensor) -> Tensor:
    """Hidden states [rows, hidden_size] of int64 tokens [rows], as the module computes them."""
    if is_table(embed):
        # The module's computation without its call overhead, which takes longer than the lookup.
        return torch.embedding(embed.weight, token_ids)
    return embed(token_ids)


def run_layers(
    part: ModelSlice, states: Tensor, positions: Tensor,
    rotations: dict[str | None, Rotation], attention: StepAttention | StepKernels,
    *, span: slice = slice(None),
) -> Tensor:  # fmt: skip
    """Hidden states [rows, hidden_size], in and out; `positions` int [rows].

    `span`: which of the slice's layers run.
    """
    if not part.fast:
        states = states.unsqueeze(0)
    addend: Tensor | None = None
    for layer, kind in zip(part.layers[span], part.layer_types[span], strict=True):
        options = {
            "attention_mask": attention,
            "position_embeddings": rotations[kind if kind in rotations else None],
            "position_ids": positions[None],
        }
        if isinstance(layer, FusedLayer):
            states, addend = layer.run(states, addend, **options)
            continue
        if addend is not None:
            states, addend = states.add_(addend), None
        states = layer.forward(states, **options)
    if addend is not None:
        states = states.add_(addend)
    return states if part.fast else states[0]


def load_whole_model(
    model: str | Path, dtype: torch.dtype = torch.float32, *, attention: str | None = None,
    with_layers: bool = True, layers: Sequence[int] = (),
) -> PreTrainedModel:  # fmt: skip
    """The model on the CPU, in `dtype` also where its checkpoint is quantised, for inference.

    attention    transformers' name of an implementation; None: the one that it picks
    with_layers  else the decoder layers stay on the meta device, and only what is around them loads
    layers       of the checkpoint, without repetition: the model consists of them alone, numbered
                 from 0; empty: of all

    Raises `CheckpointError`.
    """
    folder, device = resolve_model_path(model), torch.device("cpu")
    config = read_config(folder)
    files = open_weights(folder, config, dtype, device)
    if layers:
        config = config_of_layers(config, layers)
    with init_empty_weights(include_buffers=False):
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if layers:
        files = ChosenLayers(files, _parts(whole)[0], layers)
    count = config.num_hidden_layers
    load_tensors(whole, LayerSpan(0, count, count) if with_layers else None, files, dtype, device)
    return whole.eval()
