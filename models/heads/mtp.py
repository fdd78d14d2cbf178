"""Multi-token prediction: the decoder layer that a checkpoint holds behind its own, to draft with.

DeepSeek-V3's form (arXiv 2412.19437, section 2.2), also of GLM-4.5 and Qwen3-Next. Row i joins the
target's last state of token i with the embedding of token i + 1, each normed, by one projection.
One more decoder layer of the target's kind, with keys and values of its own, predicts token i + 2
by the target's output head. Deeper drafts read the layer's output in place of the target's state.
The modules are transformers' (`MtpModel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from ...core.errors import CheckpointError, ConfigError
from ..attention.backend import attending
from ..attention.latent import has_latents, keep_latents
from ..load.checkpoint import WeightFiles, listed, read_config
from ..load.converted_files import converted
from ..load.model_info import ModelInfo
from ..load.mtp_tensors import is_of_mtp, mtp_layer
from ..load.quantized_files import open_weights
from ..load.supported import FAULTS, empty_model
from .feature_head import HeadOutput
from .head_layer import Attend


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Sizes of an MTP layer, which are its target's."""

    hidden_size: int
    vocab_size: int
    num_layers: ClassVar[int] = 1


class MtpHead(nn.Module):
    """The first MTP layer of a target, as a feature head."""

    def __init__(self, mtp: Any, config: MtpConfig) -> None:
        """Takes over `mtp`, an `MtpModel`, without the target's modules in it."""
        super().__init__()
        self.config = config
        mtp.embed_tokens = mtp.shared_head = None
        self.mtp: MtpModel = mtp
        self._has_latents = any(map(has_latents, mtp.modules()))

    def project(self, features: Tensor) -> Tensor:
        """The target's states, which `forward` takes as they are."""
        return features

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> HeadOutput:
        """As `FeatureHead.forward`, of [rows, hidden_size] and int64 [rows]."""
        attention: Any = _TextAttention(attend, has_latents=self._has_latents)
        # The part of a step's attention that layers call.
        with attending(attention):
            states = self.mtp.forward_layer(
                0, features[None], positions[None], None, inputs_embeds=embeddings[None]
            )[0]
        return HeadOutput(states, states)


class _TextAttention:
    """A step's attention, as transformers' layers call it, by an `Attend`."""

    def __init__(self, attend: Attend, *, has_latents: bool) -> None:
        self._attend, self._has_latents = attend, has_latents
        self._rows: tuple[Tensor, Tensor] | None = None

    def write_heads(self, _layer: int, keys: Tensor, values: Tensor) -> None:
        """The rows' own, [rows, kv_heads, head_dim]; of latents the keys."""
        self._rows = keys, keys if self._has_latents else values

    def attend(
        self, layer: int, query: Tensor, scaling: float,
        window: int | None = None, softcap: float | None = None, **rare: Any,
    ) -> Tensor:  # fmt: skip
        """[rows, heads, head_dim]. Raises `ValueError` for options that heads do not have."""
        if window is not None or softcap is not None or rare:
            raise ValueError("its attention has a window, a soft cap, sinks or chunks")
        assert self._rows is not None
        return self._attend(layer, query * (scaling * math.sqrt(query.shape[-1])), *self._rows)


@dataclass(frozen=True, slots=True)
class StoredMtp:
    """The MTP layers that a checkpoint holds.

    num_layers  of which the first one drafts, at each depth
    mtp         that one's modules, their parameters on the meta device
    tensors     of it, by their names in `mtp`; not read yet
    """

    num_layers: int
    mtp: Any
    tensors: WeightFiles

    @property
    def names(self) -> list[str]:
        """Of what is stored of it."""
        return [name for name in self.mtp.state_dict() if name.startswith("layers.")]

    @property
    def num_parameters(self) -> int:
        """Number of elements of these tensors."""
        return sum(tensor.numel() for tensor in self.mtp.layers.state_dict().values())


def read_mtp(target: ModelInfo, dtype: torch.dtype, device: str) -> StoredMtp:
    """What a target's checkpoint holds; no weight is read.

    Raises `ConfigError` (`kind`) where it has none, `CheckpointError` for tensors that are missing.
    """
    config = read_config(target.path)
    files = open_weights(target.path, config, dtype, torch.device(device))
    names = frozenset(name for name in files.names if is_of_mtp(name, config))
    if not names:
        raise ConfigError("kind", f"mtp needs a model with MTP layers; {target.path} has none")
    _declare(config)
    whole = empty_model(config)
    with torch.device("meta"):
        mtp: Any = MtpModel(whole, 1)
    tensors = converted(_PartOf(files, names), mtp, mtp.get_weight_conversions(whole))
    stored = StoredMtp(len({mtp_layer(name) for name in names} - {None}), mtp, tensors)
    if missing := sorted(set(stored.names) - tensors.names):
        raise CheckpointError(f"{target.path}: of its MTP layer {listed(missing)} missing")
    return stored


def load_mtp_head(target: ModelInfo, dtype: torch.dtype, device: str) -> MtpHead:
    """The MTP layer of a target's checkpoint, in inference mode.

    Raises `ConfigError` (`kind`) where it has none that can draft here, `CheckpointError` for
    tensors that are missing or damaged.
    """
    stored = read_mtp(target, dtype, device)
    mtp, read = stored.mtp, stored.tensors.read(stored.names)
    tensors = {name: tensor.to(device, dtype) for name, tensor in read}
    mtp.load_state_dict(tensors, strict=False, assign=True)
    mtp.rotary_emb.to(device)
    for module in [*mtp.layers.modules()]:
        # An attribute of modules that their types do not know.
        object.__setattr__(module, "draftline_layer", 0)
        if has_latents(module):
            keep_latents(module)
    head = MtpHead(mtp, MtpConfig(target.hidden_size, target.vocab_size))
    head.eval().requires_grad_(False)
    _try(head, target, dtype, device)
    return head


def _declare(config: Any) -> None:
    """Say what configs leave open whose kind has no field for it: one MTP layer, with attention to
    the whole text and the last layer's experts."""
    if getattr(config, "num_mtp_layers", None) is None:
        config.num_mtp_layers = 1
    count = config.num_mtp_layers
    if getattr(config, "layer_types", None) and not getattr(config, "mtp_layer_types", None):
        config.mtp_layer_types = ["full_attention"] * count
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds and not getattr(config, "mtp_mlp_layer_types", None):
        config.mtp_mlp_layer_types = [kinds[-1]] * count


@torch.inference_mode()
def _try(head: MtpHead, target: ModelInfo, dtype: torch.dtype, device: str) -> None:
    """Raise `ConfigError` if a row cannot be computed."""
    row = torch.zeros(1, target.hidden_size, dtype=dtype, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        head(row, row, place, lambda _layer, queries, _keys, _values: queries)
    except FAULTS as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("kind", f"the MTP layer of {target.path} cannot run: {reason}") from error


class _PartOf:
    """Some tensors of a checkpoint."""

    def __init__(self, files: WeightFiles, names: frozenset[str]) -> None:
        self._files = files
        self.folder, self.names = files.folder, names

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def read(self, names: Any) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in any order. Raises `CheckpointError`."""
        return self._files.read(names)
