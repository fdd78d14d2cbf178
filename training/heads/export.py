"""A trained head as a checkpoint in the published form, a student as a model's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...models.heads.dflash_config import DFlashConfig, published_fields
from ...models.heads.dspark import DSparkConfig, published_markov_fields
from ...models.heads.feature_head import FeatureHead
from ...models.heads.feature_head_config import FeatureHeadConfig, published_pair_fields
from ...models.heads.head_tensors import MEDUSA_FILE
from ...models.heads.load_head import OUTPUT, TOKEN_MASK, Head, HeadConfig, has_target_rows
from ...models.heads.medusa import Medusa, MedusaConfig
from ...models.heads.p_eagle import PEagleConfig, published_mask_fields
from ...models.heads.spec_former import SpecFormerConfig
from ...models.load.checkpoint import SINGLE_FILE
from .feature_passes import vocabulary_of
from .student import Student

RECORD = "training.json"
# Of a model: how it is sampled, and which tokens end an answer.
GENERATION = "generation_config.json"
# The name of EAGLE-3's only layer in its project; speculators number layers.
PAIR_LAYER = "midlayer."


def export_head(
    head: Head, folder: Path, fields: dict[str, object], record: dict[str, object]
) -> None:
    """Write a head as its project publishes it: bfloat16 safetensors and config.json.

    fields  further fields of its config.json, besides the sizes
    record  how it was trained, for training.json
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(head), folder / (MEDUSA_FILE if isinstance(head, Medusa) else SINGLE_FILE))
    written = {**_sizes(head.config), **fields}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    _write_record(folder, record)


def export_student(
    student: Student, folder: Path, tokenizer: PreTrainedTokenizerBase, record: dict[str, object]
) -> None:
    """Write a student as a model's folder, of transformers and bfloat16, with its tokenizer. It is
    rounded itself.

    record  how it was trained, for training.json
    """
    model = student.model.bfloat16()
    # Its weights are plain ones, whatever those that it began with were.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    begun = Path(student.config.folder) / GENERATION
    if begun.is_file():
        shutil.copyfile(begun, folder / GENERATION)
    _write_record(folder, record)


def _write_record(folder: Path, record: dict[str, object]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _tensors(head: Head) -> dict[str, Tensor]:
    """Floating-point tensors as bfloat16; token maps unchanged."""
    tensors = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
        if not (name == OUTPUT and has_target_rows(head.config))
    }
    if not isinstance(head, FeatureHead) or head.config.fusion != "pair":
        return tensors
    if head.config.has_token_map:
        is_drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        is_drafted[vocabulary_of(head).cpu()] = True
        tensors[TOKEN_MASK] = is_drafted
    if head.config.num_layers > 1:
        return tensors
    first = "layers.0."
    return {
        PAIR_LAYER + name.removeprefix(first) if name.startswith(first) else name: tensor
        for name, tensor in tensors.items()
    }


def _sizes(config: HeadConfig) -> dict[str, object]:
    """A head's sizes under the names of its project's config.json."""
    if isinstance(config, MedusaConfig):
        return {
            "medusa_num_heads": config.draft_length,
            "medusa_num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        }
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": dict(config.rope),
    }
    if isinstance(config, SpecFormerConfig):
        sizes |= {
            "feature_layers": config.feature_layers,
            "is_bidirectional": config.is_bidirectional,
        }
    else:
        sizes |= {"num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size}
    if isinstance(config, DFlashConfig):
        sizes |= published_fields(config)
    if isinstance(config, DSparkConfig):
        sizes |= published_markov_fields(config)
    if isinstance(config, FeatureHeadConfig) and config.fusion == "pair":
        sizes |= published_pair_fields(config)
    if isinstance(config, PEagleConfig):
        sizes |= published_mask_fields(config)
    return sizes
