"""How a module's quantised weight lies in a checkpoint: which tensors, and what they mean."""

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
    required  those without which the weight cannot be told; `own` may be among them
    optional  those that may be there beside
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
        """The weight that a module's tensors, by the last part of their names, tell.

        Raises `ValueError` where they do not fit each other or the config.
        """
        ...
