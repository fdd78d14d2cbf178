"""Loads heads from their checkpoint folders, and what they share with a target.

That is its embeddings, its last norm and its output head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from ...core.errors import CheckpointError
from ..layers.model_slice import Projection, embedded, load_slice
from ..load.checkpoint import read_json
from ..load.model_info import ModelInfo
from ..load.partition import LayerSpan
from .checkpoint_kind import CheckpointKind, Reading, Shapes, checkpoint_kind, possible_readings
from .dflash import DFlash
from .dflash_config import DFlashConfig, dflash_config
from .dspark import DSpark, DSparkConfig, dspark_config
from .feature_head import FeatureHead
from .feature_head_config import FUSIONS, FeatureHeadConfig, feature_head_config
from .head_tensors import HeadTensors
from .medusa import Medusa, MedusaConfig, check_medusa_map, medusa_config, medusa_names
from .p_eagle import PEagle, PEagleConfig, p_eagle_config
from .spec_former import SpecFormer, SpecFormerConfig, spec_former_config

# A mask of the target's tokens that have a draft token; redundant with the offsets.
TOKEN_MASK, TOKEN_MAP = "t2d", "d2t"
OUTPUT = "lm_head.weight"
# Columns of a target's output head that are read at once.
UNITS = 64


HeadConfig = FeatureHeadConfig | SpecFormerConfig | MedusaConfig | DFlashConfig
Head = FeatureHead | SpecFormer | Medusa | DFlash
# The first class that matches a config; the default is `FeatureHead`.
MODULES: tuple[tuple[type, Callable[[Any], Head]], ...] = (
    (SpecFormerConfig, SpecFormer),
    (MedusaConfig, Medusa),
    (DSparkConfig, DSpark),
    (DFlashConfig, DFlash),
    (PEagleConfig, PEagle),
)
# Config readers of the kinds that are not plain feature heads.
CONFIGS: dict[CheckpointKind, Callable[[Shapes, Mapping[str, Any]], HeadConfig]] = {
    CheckpointKind.P_EAGLE: p_eagle_config,
    CheckpointKind.SPECFORMER: spec_former_config,
    CheckpointKind.MEDUSA: medusa_config,
    CheckpointKind.DFLASH: dflash_config,
    CheckpointKind.DSPARK: dspark_config,
}
# Kinds with a network in draftline.
NETWORKS = (*FUSIONS, *CONFIGS)


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """The content of a drafter's folder.

    fields    its config.json
    readings  its possible readings, the likeliest first (`possible_readings`)
    config    of the first reading; None for a kind without a network in draftline
    """

    folder: Path
    kind: CheckpointKind
    tensors: HeadTensors
    fields: Mapping[str, Any]
    readings: tuple[Reading, ...]
    config: HeadConfig | None

    @property
    def num_parameters(self) -> int:
        """Number of elements of all its tensors."""
        return sum(torch.Size(shape).numel() for shape in self.tensors.shapes.values())


class ReadHead(NamedTuple):
    """A head, and the reading of its config.json that it was built by."""

    reading: Reading
    head: Head


def read_head_checkpoint(folder: Path) -> HeadCheckpoint:
    """The content of a folder, by its config.json and the shapes of its tensors.

    Raises `CheckpointError` if it is no drafter's checkpoint, or a damaged one.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give the folder of a drafter")
    fields: dict[str, Any] = read_json(folder / "config.json")
    tensors = HeadTensors(folder)
    kind = checkpoint_kind(tensors.shapes, fields)
    if kind is CheckpointKind.MEDUSA:
        tensors.rename(medusa_names(tensors.shapes))
    readings = possible_readings(kind, tensors.shapes, fields)
    config = _config(kind, tensors.shapes, {**fields, **readings[0]})
    return HeadCheckpoint(folder, kind, tensors, fields, readings, config)


def load_head(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Head:
    """The head of a checkpoint by the first of its readings, in inference mode.

    Raises `CheckpointError` for a kind without a network here, and lists tensors that are missing,
    unknown or of another shape.
    """
    return load_readings(folder, dtype, device)[0].head


def load_readings(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[ReadHead]:
    """A head for each reading of a checkpoint, which share their tensors; raises as `load_head`."""
    checkpoint = read_head_checkpoint(folder)
    if checkpoint.config is None:
        raise CheckpointError(
            f"{folder} holds a drafter of kind {checkpoint.kind}, which draftline has no network "
            f"for; it has those of {', '.join(NETWORKS)}"
        )
    heads = [ReadHead(reading, _empty_head(checkpoint, reading)) for reading in checkpoint.readings]
    _check_names(heads[0].head, checkpoint)
    placed = _placed_tensors(checkpoint, checkpoint.config, dtype, device)
    for _, head in heads:
        head.load_state_dict(placed | _rows_to_come(head, dtype, device), assign=True)
        head.to(device).eval().requires_grad_(False)
        if isinstance(head, SpecFormer):
            head.make_fast()
    return heads


def _rows_to_come(head: Head, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Zeros in place of what `take_target_rows` copies."""
    if not has_target_rows(head.config):
        return {}
    assert isinstance(head, FeatureHead)
    return {OUTPUT: torch.zeros(head.lm_head.weight.shape, dtype=dtype, device=device)}


def has_target_rows(config: HeadConfig) -> bool:
    """Whether rows of the target are a head's output head."""
    return isinstance(config, FeatureHeadConfig) and config.has_target_rows


@torch.no_grad()
def take_target_rows(head: Head, project: Projection) -> None:
    """Copy the output rows of a head that has the target's.

    project  [rows, vocabulary] of normed states [rows, hidden_size]: the target's output head in
             any form; of unit vectors it gives its weights, exactly
    """
    if not has_target_rows(head.config):
        return
    assert isinstance(head, FeatureHead)
    weight = head.lm_head.weight
    rows = head.target_tokens(torch.arange(len(weight), device=weight.device))
    for units in torch.arange(weight.shape[1], device=weight.device).split(UNITS):
        unit = torch.zeros(len(units), weight.shape[1], dtype=weight.dtype, device=weight.device)
        unit[torch.arange(len(units)), units] = 1.0
        weight[:, units] = project(unit)[:, rows].T.to(weight.dtype)


def _empty_head(checkpoint: HeadCheckpoint, reading: Reading) -> Head:
    fields = {**checkpoint.fields, **reading}
    config = _config(checkpoint.kind, checkpoint.tensors.shapes, fields)
    assert config is not None
    with init_empty_weights(include_buffers=False):
        return build_head(config)


def _placed_tensors(
    checkpoint: HeadCheckpoint, config: HeadConfig, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    tensors = dict(checkpoint.tensors.read())
    if isinstance(config, FeatureHeadConfig | DFlashConfig):
        _check_token_map(config, tensors, checkpoint.folder)
        tensors.pop(TOKEN_MASK, None)
    if isinstance(config, MedusaConfig):
        check_medusa_map(config, tensors)
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }


def build_head(config: HeadConfig) -> Head:
    """A head with random weights."""
    for kind, network in MODULES:
        if isinstance(config, kind):
            return network(config)
    assert isinstance(config, FeatureHeadConfig)
    return FeatureHead(config)


def misfits(config: HeadConfig, target: ModelInfo) -> list[str]:
    """Why a head does not fit a target; empty if the sizes match."""
    found = []
    shares_target = True
    if isinstance(config, FeatureHeadConfig | MedusaConfig | DFlashConfig):
        if config.feature_size != target.hidden_size:
            found.append(
                f"it reads features of {config.feature_size}, the target's have "
                f"{target.hidden_size}"
            )
        # Heads that share the target's output have its vocabulary.
        if config.vocab_size != target.vocab_size and not (
            isinstance(config, MedusaConfig) and not config.vocab_size
        ):
            found.append(
                f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
            )
        shares_target = isinstance(config, FeatureHeadConfig) and not (
            config.has_embedding and config.draft_vocab_size and not config.has_target_rows
        )
    if shares_target and config.hidden_size != target.hidden_size:
        found.append(
            f"it is {config.hidden_size} wide and shares the target's embedding or output head, "
            f"which are {target.hidden_size} wide"
        )
    layers = config.layers_of(target.num_layers)
    if any(not -1 <= layer < target.num_layers for layer in layers):
        found.append(f"it reads layers {layers} of a target that has {target.num_layers}")
    if layers and len(layers) != config.num_features:
        found.append(
            f"it reads {config.num_features} states of a token, and its config.json names layers "
            f"{layers}"
        )
    return found


def _config(kind: CheckpointKind, shapes: Shapes, fields: dict[str, Any]) -> HeadConfig | None:
    if kind in FUSIONS:
        return feature_head_config(kind, shapes, fields)
    read = CONFIGS.get(kind)
    return None if read is None else read(shapes, fields)


def _check_names(head: Head, checkpoint: HeadCheckpoint) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if has_target_rows(head.config):
        del expected[OUTPUT]
    held = {name: shape for name, shape in checkpoint.tensors.shapes.items() if name != TOKEN_MASK}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - held.keys())]
    problems += [f"{name} is unknown" for name in sorted(held.keys() - expected.keys())]
    problems += [
        f"{name} has shape {held[name]} instead of {shape}"
        for name, shape in sorted(expected.items())
        if name in held and held[name] != shape
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} was taken for a drafter of kind {checkpoint.kind}, but "
            f"{'; '.join(problems)}"
        )


def _check_token_map(
    config: FeatureHeadConfig | DFlashConfig, tensors: dict[str, Tensor], folder: Path
) -> None:
    """The map holds offsets, not ids: as ids it would name other tokens without any error."""
    count = config.draft_vocab_size
    if TOKEN_MAP not in tensors:
        if count not in {0, config.vocab_size}:
            raise CheckpointError(
                f"{folder} predicts {count} of {config.vocab_size} tokens and has no d2t that says "
                "which; fetch it again"
            )
        return
    targets = tensors[TOKEN_MAP] + torch.arange(len(tensors[TOKEN_MAP]))
    is_map = bool((targets >= 0).all() and (targets < config.vocab_size).all())
    if not is_map or len(targets) != count or len(targets.unique()) != count:
        raise CheckpointError(
            f"{folder}: d2t does not map {count} draft tokens to as many of {config.vocab_size}; "
            "it must hold offsets, the target's id minus the draft's"
        )
    mask = tensors.get(TOKEN_MASK)
    if mask is not None and int(mask.sum()) != count:
        raise CheckpointError(f"{folder}: t2d marks {int(mask.sum())} tokens, d2t maps {count}")


@dataclass(frozen=True, slots=True, eq=False)
class SharedParts:
    """Parts of a target, on the head's device.

    head  [n, vocabulary] of normed states [n, hidden_size]
    """

    embed: nn.Module
    norm: Callable[[Tensor], Tensor]
    head: Projection
    softcap: float | None

    def embeddings(self, tokens: Tensor) -> Tensor:
        """[n, hidden_size] of token ids int64 [n]."""
        return embedded(self.embed, tokens)

    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, vocabulary] of normed states [n, hidden_size]."""
        logits = self.head(states).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def load_shared_parts(target: ModelInfo, dtype: str, device: str) -> SharedParts:
    """Raises `CheckpointError`, or `ConfigError` (`dtype`)."""
    count = target.num_layers
    # A slice has at least one layer, which is dropped.
    last = load_slice(target.path, LayerSpan(count - 1, count, count), dtype, device)
    assert last.norm is not None
    assert last.head is not None
    embed = load_embedding(target, dtype, device)
    return SharedParts(embed, last.norm, last.head, last.softcap)


def load_embedding(target: ModelInfo, dtype: str, device: str) -> nn.Module:
    """The target's embeddings. Raises `CheckpointError`, or `ConfigError` (`dtype`)."""
    first = load_slice(target.path, LayerSpan(0, 1, target.num_layers), dtype, device)
    assert first.embed is not None
    return first.embed
