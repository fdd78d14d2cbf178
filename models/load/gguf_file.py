"""GGUF files, llama.cpp's format, as folders in Hugging Face format.

A file is unpacked once, by transformers' own tables: its tensors as float32, its tokenizer and its
chat template. The folder lies in draftline's cache, and is loaded as any other.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Regex, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
)
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.utils import logging

from ...core.errors import CheckpointError
from .gguf_blocks import quantized as quantized_of
from .public_models import CACHE, made_whole
from .quantized_layouts import KEPT_FILE, QuantizedWeight, stored_parts

if TYPE_CHECKING:
    from gguf import GGUFReader

# Architectures that a file may name, with transformers' names. Mistral's files name llama.
KNOWN = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
# Llama 3's rotary frequencies are stored as a tensor, which follows from these.
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LEN = 1.0, 4.0, 8192
ROPE_FREQS = "rope_freqs.weight"
WEIGHT = ".weight"
FLOAT32_BYTES = 4
# Settings that transformers takes from elsewhere, and the attribute that must agree.
CHECKED = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Those that it leaves at their defaults.
TAKEN = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
GEMMA2_27B_LAYERS = 46


def unpacked(file: Path, cache: Path = CACHE) -> Path:
    """The folder that a GGUF file was unpacked to, which is done now if it was not.

    The folder is named after the file's path, size and time of change. Raises `CheckpointError` for
    what is no GGUF file, is damaged, or holds a model that is not known.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = cache / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with made_whole(folder) as fresh:
            unpack(file, fresh)
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into an empty folder. Raises `CheckpointError`."""
    reader = _opened(file)
    architecture = _check_known(file, reader)
    room = shutil.disk_usage(folder).free
    needed = FLOAT32_BYTES * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if needed > room:
        raise CheckpointError(
            f"{file} takes {needed / 1e9:.1f} GB as float32, and {folder.parent} has room for "
            f"{room / 1e9:.1f} GB"
        )
    try:
        # In a folder of its own: beside a config.json or tokenizer.json these would be read.
        with _quiet(), tempfile.TemporaryDirectory() as alone:
            (Path(alone) / file.name).symlink_to(file.resolve())
            config = AutoConfig.from_pretrained(alone, gguf_file=file.name)
            if config.model_type == "mistral":
                # Such files name the architecture llama, whose attention has no window.
                config = LlamaConfig(**{**config.to_dict(), "model_type": "llama"})
            for name, attribute in TAKEN.items():
                if (value := _value(reader, f"{architecture}.{name}")) is not None:
                    setattr(config, attribute, value)
            # Tensors are float32 here, whatever they are in the file.
            model = AutoModelForCausalLM.from_pretrained(
                alone, gguf_file=file.name, config=config, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
            _split_as_named(file, reader, tokenizer)
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError) as error:
        raise CheckpointError(
            f"{file} cannot be read as {architecture}: {type(error).__name__}: {error}"
        ) from error
    processor = gguf_utils.TENSOR_PROCESSORS.get(architecture, gguf_utils.TensorProcessor)(
        config=model.config.to_dict()
    )
    names = _names(model, processor)
    _check_tensors(file, reader, model.config.model_type, names)
    _check_settings(file, reader, architecture, model.config)
    _complete(model.config)
    if (scaling := _rope_scaling(file, reader, model.config)) is not None:
        model.config.rope_parameters = {**model.config.rope_parameters, **scaling}
    delattr(model.config, "quantization_config")
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    try:
        save_torch_state_dict(model.state_dict(), folder, shared_tensors_to_discard=_tied(model))
        save_file(_kept(file, reader, model, names, processor), folder / KEPT_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"{folder.parent} cannot be written: {error}") from error


def _names(model: PreTrainedModel, processor: gguf_utils.TensorProcessor) -> dict[str, str]:
    """The model's names of the file's tensors; two of these may be one of the model."""
    found = gguf_utils.get_gguf_hf_weights_map(model, processor)
    # The model's names of experts do not end as those of weights.
    return {
        name if name.endswith((WEIGHT, ".bias")) else name + WEIGHT: own
        for name, own in found.items()
    }


def _kept(
    file: Path, reader: GGUFReader, model: PreTrainedModel, names: Mapping[str, str],
    processor: gguf_utils.TensorProcessor,
) -> dict[str, Tensor]:  # fmt: skip
    """The parts of the matrices whose blocks have the very values that were unpacked.

    Raises `CheckpointError` for a scale that is not finite.
    """
    # The experts' gates, and what these multiply, are one tensor of the model, in this order.
    stored: dict[str, list[Any]] = {}
    for tensor in sorted(reader.tensors, key=lambda one: one.name):
        stored.setdefault(names.get(tensor.name, ""), []).append(tensor)
    kept: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name not in stored or weight.ndim < 2:
            continue
        tensors, experts = stored[name], weight.shape[:-2]
        both = zip(tensors, weight.chunk(len(tensors), dim=-2), strict=True)
        found = [_quantized(file, tensor, values, processor) for tensor, values in both]
        parts = [part for part in found if part is not None]
        if len(parts) == len(found):
            for number, part in enumerate(parts):
                kept |= stored_parts(f"{name}.{number}" if experts else name, part, experts)
    return kept


def _quantized(
    file: Path, tensor: Any, values: Tensor, processor: gguf_utils.TensorProcessor
) -> QuantizedWeight | None:
    """A tensor as it is stored, the matrices of all experts one behind the other; None: of a kind
    that is not kept, or of other values than these."""
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    try:
        found = quantized_of(data, tensor.tensor_type.name)
    except ValueError as error:
        raise CheckpointError(f"{file}: tensor {tensor.name}: {error}; fetch it again") from error
    if found is None:
        return None
    # Llama's files have the rows of queries and keys in another order.
    rows = np.arange(len(data), dtype=np.int64)[:, None]
    order = torch.from_numpy(processor.process(rows, tensor.name).weights[:, 0].copy())
    ordered = found.of_rows(order)
    is_same = torch.equal(ordered.dequantized(torch.float32), values.flatten(0, -2))
    return ordered if is_same else None


class _Split(NamedTuple):
    """How a byte-level tokenizer splits text before it merges.

    first          done before text becomes bytes
    by_bytes       whether GPT-2's expression splits the rest
    is_normalized  whether text is brought into form C first
    takes_whole    whether a part that is a token is taken without merging
    """

    first: Any
    by_bytes: bool = False
    is_normalized: bool = False
    takes_whole: bool = False


def _split_by(digits: str) -> Any:
    """By the expression of GPT-4 with so many digits together."""
    return pre_tokenizers.Split(
        Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "isolated",
    )


# By the name in the file, as the tokenizers of these models have it in Hugging Face's format.
SPLITS = {
    "gpt-2": _Split(None, by_bytes=True),
    "smollm": _Split(pre_tokenizers.Digits(individual_digits=True), by_bytes=True),
    "llama-bpe": _Split(_split_by(r"\p{N}{1,3}"), takes_whole=True),
    "qwen2": _Split(_split_by(r"\p{N}"), is_normalized=True),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars. One of them has no switch."""
    # Typed as anything: the name is not one that it exports.
    module: Any = gguf_utils
    is_shown, bar = logging.is_progress_bar_enabled(), module.tqdm
    logging.disable_progress_bar()
    module.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar
        if is_shown:
            logging.enable_progress_bar()


def _tied(model: PreTrainedModel) -> list[str]:
    """Names of parameters that are others, too."""
    return list(model.all_tied_weights_keys)


def _opened(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package gguf: pip install 'draftline[gguf]'"
        ) from error
    try:
        return GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{file} is no GGUF file, or is damaged ({error}); fetch it again"
        ) from error


def _split_as_named(file: Path, reader: GGUFReader, tokenizer: Any) -> None:
    """Have a byte-level tokenizer split text as the file names it, which transformers does not.

    Raises `CheckpointError` for a way that is not known.
    """
    if _value(reader, "tokenizer.ggml.model") != "gpt2":
        return
    name = _value(reader, "tokenizer.ggml.pre")
    if name not in SPLITS:
        raise CheckpointError(
            f"{file}: how its tokenizer splits text is not known (tokenizer.ggml.pre is {name}); "
            f"known: {', '.join(SPLITS)}; use the model's folder in Hugging Face format"
        )
    tokens, split = tokenizer.backend_tokenizer, SPLITS[name]
    parts = [] if split.first is None else [split.first]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.by_bytes))
    tokens.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokens.normalizer = normalizers.NFC() if split.is_normalized else None
    tokens.model.ignore_merges = split.takes_whole


def _check_known(file: Path, reader: GGUFReader) -> str:
    """The architecture that the file names, if it is known and whole."""
    architecture = _value(reader, "general.architecture")
    if architecture not in KNOWN:
        raise CheckpointError(
            f"{file} holds a {architecture} model; GGUF files of these are read: {', '.join(KNOWN)}"
        )
    if (count := _value(reader, "split.count")) is not None and count > 1:
        raise CheckpointError(
            f"{file} is one of {count} parts; join them by `llama-gguf-split --merge`"
        )
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    if scaling not in {None, "none"}:
        raise CheckpointError(
            f"{file} scales its positions ({architecture}.rope.scaling.type is {scaling}), which "
            "is not read from GGUF files; use the model's folder in Hugging Face format"
        )
    return architecture


def _check_tensors(file: Path, reader: GGUFReader, kind: str, names: Iterable[str]) -> None:
    """Raise `CheckpointError` for tensors that would be left out."""
    taken = {*names, ROPE_FREQS}
    stored = {tensor.name for tensor in reader.tensors}
    if left := sorted(stored - taken):
        raise CheckpointError(
            f"{file} has tensors that {kind} has no place for: {left[0]}"
            + (f" and {len(left) - 1} more" if len(left) > 1 else "")
        )
    # The head may be the embedding.
    missing = sorted(taken - stored - {ROPE_FREQS, "output.weight"})
    if missing:
        raise CheckpointError(
            f"{file} lacks the tensor {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; fetch it again"
        )


def _check_settings(file: Path, reader: GGUFReader, architecture: str, config: Any) -> None:
    """Raise `CheckpointError` for a setting of the model that transformers would not read."""
    read = TAKEN | gguf_utils.GGUF_TO_TRANSFORMERS_MAPPING["config"][KNOWN[architecture]]
    found = config.to_dict()
    found.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
    for key in reader.fields:
        owner, _, name = key.partition(".")
        if owner != architecture or key.startswith(f"{architecture}.rope.scaling."):
            continue
        value, attribute = _value(reader, key), CHECKED.get(name)
        if attribute is None and read.get(name) is None:
            raise CheckpointError(
                f"{file} has a setting that is not known: {key} is {value}; use the model's folder "
                "in Hugging Face format"
            )
        if attribute is not None and (taken := found.get(attribute)) != value:
            raise CheckpointError(
                f"{file}: {key} is {value}, and {config.model_type} is read with {taken}; use the "
                "model's folder in Hugging Face format"
            )


def _complete(config: Any) -> None:
    """What the file does not say, as llama.cpp takes it."""
    if config.model_type == "gemma2" and config.num_hidden_layers == GEMMA2_27B_LAYERS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _rope_scaling(file: Path, reader: GGUFReader, config: Any) -> dict[str, Any] | None:
    """What Llama 3's stored factors of its rotary frequencies mean; None where there are none."""
    stored = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    if stored is None:
        return None
    found = np.asarray(stored.data, dtype=np.float32).ravel()
    theta = config.rope_parameters["rope_theta"]
    wavelens = 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    for factor in LLAMA3_FACTORS:
        smooth = (LLAMA3_LEN / wavelens - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors = np.where(wavelens < LLAMA3_LEN / LLAMA3_HIGH, 1.0, between)
        factors = np.where(wavelens > LLAMA3_LEN / LLAMA3_LOW, factor, factors)
        if np.allclose(found, factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH,
                "original_max_position_embeddings": LLAMA3_LEN,
            }
    raise CheckpointError(
        f"{file}: the factors of {ROPE_FREQS} are those of no known model; use its folder in "
        "Hugging Face format"
    )


def _value(reader: GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()
