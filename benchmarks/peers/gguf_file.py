"""A Llama checkpoint as a GGUF file in float32, with its byte-level BPE tokenizer.

The format is that of ggml's `docs/gguf.md`, version 3: a header, keys with values, what the tensors
are, and their data, each part little-endian and the data aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig

from ...core.errors import DraftlineError

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
# Types of values; a tensor's type 0 is float32.
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
PACKED = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}
TENSOR_FLOAT32 = 0
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3

MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip

# Type and value by key; the type of an array's items stands behind that of the array.
Values = Mapping[str, tuple[int | tuple[int, int], Any]]


def write_checkpoint(checkpoint: Path, path: Path) -> None:
    """Write a Llama checkpoint of one safetensors file, and its tokenizer if it has one.

    Raises `DraftlineError` for a tokenizer that is not byte-level BPE as GPT-2 has it.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    arrays = {}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        array = tensor.float().numpy()
        arrays[gguf_name(name)] = array if count is None else reordered(array, count)
    tokenizer = checkpoint / "tokenizer.json"
    words = tokenizer_values(json.loads(tokenizer.read_text("utf-8"))) if tokenizer.exists() else {}
    write_gguf(path, {**model_values(config), **(words or NO_TOKENIZER)}, arrays)


def model_values(config: Any) -> Values:
    """What llama.cpp asks of a Llama model's shape; `config` is that of transformers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    return {
        "general.architecture": (STRING, "llama"),
        "general.file_type": (UINT32, 0),
        **{f"llama.{key}": (UINT32, number) for key, number in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config.rms_norm_eps),
        "llama.rope.freq_base": (FLOAT32, config.rope_parameters["rope_theta"]),
    }


NO_TOKENIZER: Values = {"tokenizer.ggml.model": (STRING, "no_vocab")}


def tokenizer_values(tokenizer: Mapping[str, Any]) -> Values:
    """The words of a `tokenizer.json`. Raises `DraftlineError`."""
    words, splits = tokenizer["model"], tokenizer["pre_tokenizer"]
    if words["type"] != "BPE" or splits["type"] != "ByteLevel" or splits["add_prefix_space"]:
        raise DraftlineError("only byte-level BPE as GPT-2 has it can be written for llama.cpp")
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ids = {**words["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [CONTROL_TOKEN if ids[token] in special else NORMAL_TOKEN for token in tokens]
    merges = [one if isinstance(one, str) else " ".join(one) for one in words["merges"]]
    end = min(special, default=0)
    return {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": ((ARRAY, STRING), tokens),
        "tokenizer.ggml.token_type": ((ARRAY, INT32), kinds),
        "tokenizer.ggml.merges": ((ARRAY, STRING), merges),
        "tokenizer.ggml.bos_token_id": (UINT32, end),
        "tokenizer.ggml.eos_token_id": (UINT32, end),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
    }


def write_gguf(path: Path, values: Values, arrays: Mapping[str, np.ndarray]) -> None:
    """Write values and float32 arrays, C-contiguous, in their order."""
    head = [MAGIC, struct.pack("<IQQ", VERSION, len(arrays), len(values))]
    head += [_string(key) + _value(*value) for key, value in values.items()]
    offset = 0
    for name, array in arrays.items():
        # The dimension that lies closest in memory stands first.
        shape = array.shape[::-1]
        head.append(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        head.append(struct.pack("<IQ", TENSOR_FLOAT32, offset))
        offset += _aligned(array.nbytes)
    with path.open("wb") as file:
        file.write(b"".join(head))
        file.write(b"\0" * (_aligned(file.tell()) - file.tell()))
        for array in arrays.values():
            file.write(array.astype("<f4", copy=False).tobytes())
            file.write(b"\0" * (_aligned(array.nbytes) - array.nbytes))


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor of Hugging Face's."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys with the halves of each head interleaved: llama.cpp rotates neighbours."""
    outputs, inputs = weight.shape
    halves = weight.reshape(heads, 2, outputs // heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs, inputs)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int | tuple[int, int], value: Any) -> bytes:
    if isinstance(kind, tuple):
        return struct.pack("<I", ARRAY) + _items(kind[1], value)
    return struct.pack("<I", kind) + _packed(kind, value)


def _items(kind: int, items: Sequence[Any]) -> bytes:
    packed = b"".join(_packed(kind, item) for item in items)
    return struct.pack("<IQ", kind, len(items)) + packed


def _packed(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack(PACKED[kind], value)
