"""A model that consists of some layers of another one, with its embedding, norm and head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from .checkpoint import WeightFiles

# Settings with an entry for each layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def config_of_layers(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """A model's config with these of its layers alone."""
    chosen: Any = deepcopy(config)
    for name in PER_LAYER:
        entries = getattr(config, name, None)
        if entries is not None:
            setattr(chosen, name, [entries[layer] for layer in layers])
    chosen.num_hidden_layers = len(layers)
    return chosen


class ChosenLayers:
    """The `WeightFiles` of a model with some layers of another one, which are numbered from 0."""

    def __init__(self, files: WeightFiles, prefix: str, layers: Sequence[int]) -> None:
        """prefix: how the names of tensors in layers begin; their number follows."""
        self._files = files
        self.folder = files.folder
        places = {str(layer): place for place, layer in enumerate(layers)}
        self._stored: dict[str, str] = {}
        for stored in files.names:
            number, _, rest = stored.removeprefix(prefix).partition(".")
            if not stored.startswith(prefix):
                self._stored[stored] = stored
            elif number in places:
                self._stored[f"{prefix}{places[number]}.{rest}"] = stored

    @property
    def names(self) -> frozenset[str]:
        """See `WeightFiles`."""
        return frozenset(self._stored)

    def is_incidental(self, name: str) -> bool:
        """See `WeightFiles`."""
        return self._files.is_incidental(self._stored[name])

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `WeightFiles`."""
        own = {self._stored[name]: name for name in names}
        for stored, tensor in self._files.read(own):
            yield own[stored], tensor
