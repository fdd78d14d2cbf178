"""Sizes and special tokens of a model, read without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from .checkpoint import composite_type, read_config, read_json, resolve_model_path
from .supported import keeps_states


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes and special tokens of a model.

    composite_type   model_type of the composite model whose text part this is; None: of none
    keeps_states     whether layers keep a state of each text
    max_context_len  most tokens of a request, prompt included
    eos_token_ids    every token that ends an answer; may be empty
    dtype            of the checkpoint's weights, as torch names it; of a quantised checkpoint that
                     of the model that was quantised
    """

    path: Path
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str = "float32"
    composite_type: str | None = None
    keeps_states: bool = False


def read_model_info(model: str | Path) -> ModelInfo:
    """Read the info of a model folder or hub id. Raises `CheckpointError`."""
    folder = resolve_model_path(model)
    config = read_config(folder)
    return ModelInfo(
        path=folder,
        model_type=config.model_type,
        vocab_size=_size(folder, config, "vocab_size"),
        hidden_size=_size(folder, config, "hidden_size"),
        num_layers=_size(folder, config, "num_hidden_layers"),
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        max_context_len=_max_context_len(folder, config),
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=getattr(config, "bos_token_id", None),
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        composite_type=composite_type(folder, config),
        keeps_states=keeps_states(config),
    )


def _size(folder: Path, config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise CheckpointError(
            f"{folder}: model_type {config.model_type!r} has no {name}: it generates no text"
        )
    return value


def _max_context_len(folder: Path, config: PretrainedConfig) -> int:
    for name in ("max_position_embeddings", "seq_length"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise CheckpointError(f"{folder / 'config.json'} does not say max_position_embeddings")


def declared(config: PretrainedConfig, name: str) -> Any:
    """A setting that the kind of model has; None: it has none. A config keeps unknown fields."""
    kind = type(config)
    return getattr(config, name) if hasattr(kind, name) or name in kind.attribute_map else None


def _num_heads(config: PretrainedConfig) -> int:
    num_heads = getattr(config, "num_attention_heads", None)
    if num_heads is None:
        raise CheckpointError(f"model_type {config.model_type!r} has no attention heads")
    return num_heads


def head_dim(config: PretrainedConfig) -> int:
    """Width of one attention head."""
    return declared(config, "head_dim") or config.hidden_size // _num_heads(config)


def num_kv_heads(config: PretrainedConfig) -> int:
    """Number of key/value heads; the number of query heads where they are not grouped."""
    return declared(config, "num_key_value_heads") or _num_heads(config)


class KvShape(NamedTuple):
    """What a layer keeps of a token: keys and values of heads, or a latent.

    head_dim     width of a value, and of a key but for `rotated_dim`
    rotated_dim  of a latent, which is key and value at once (`models/attention/latent.py`): numbers
                 that only the key has; 0: no latent
    """

    num_heads: int
    head_dim: int
    rotated_dim: int = 0

    @property
    def num_numbers(self) -> int:
        """Of a token."""
        num_sides = 1 if self.rotated_dim else 2
        return num_sides * self.num_heads * (self.head_dim + self.rotated_dim)


def kv_shape(config: PretrainedConfig) -> KvShape:
    """Of a layer with attention."""
    rank = declared(config, "kv_lora_rank")
    if rank is not None:
        return KvShape(1, rank, config.qk_rope_head_dim)
    return KvShape(num_kv_heads(config), head_dim(config))


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """As in `generate`: from generation_config.json if present, else from the config."""
    value = getattr(config, "eos_token_id", None)
    generation = folder / "generation_config.json"
    if generation.is_file():
        value = read_json(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
