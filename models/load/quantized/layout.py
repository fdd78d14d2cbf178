"""The layout of a module's quantised weight in a checkpoint: its tensors and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .quantized_weight import QuantizedWeight

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class PartNames:
    """Last parts of the names of a module's tensors.

    own       one of them marks a module as stored so
    required  those that the weight cannot be computed without; `own` may be among them
    optional  further ones that may be present
    """

    own: frozenset[str]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()


class Layout(Protocol):
    """A way to store the weight of a linear layer (or of an embedding) in several tensors."""

    @property
    def names(self) -> PartNames:
        """Of its tensors."""
        ...

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight from a module's tensors, by the last part of their names.

        Raises `ValueError` if they do not fit each other or the config.
        """
        ...
