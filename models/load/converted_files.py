"""The tensors of a checkpoint as transformers' own modules hold them.

transformers renames and merges what some kinds of checkpoints store: the matrices of all experts of
a layer become one tensor. Its own tables say how (`transformers.conversion_mapping`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from .checkpoint import WeightFiles
from .quantized_files import KeptFiles, QuantizedFiles
from .quantized_layouts import QuantizedWeight


def converted(
    files: WeightFiles, whole: Any, conversions: Sequence[WeightTransform] | None = None
) -> WeightFiles:
    """`files` with the names and tensors of the model `whole`; the same where nothing differs.

    conversions  None: those of transformers for the model
    """
    if conversions is None:
        conversions = get_model_conversion_mapping(whole, add_legacy=False)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    own = whole.state_dict()
    groups: dict[str, _Group] = {}
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, whole.base_model_prefix, own
        )
        if target not in own and (name in own or pattern is None):
            target, pattern = name, None
        groups.setdefault(target, _Group()).add(name, pattern)
    if all([source for source, _ in group.sources] == [name] for name, group in groups.items()):
        return files
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    return ConvertedFiles(files, whole, groups, by_pattern)


@dataclass(slots=True)
class _Group:
    """Stored tensors that become one, or several, of the model; each with its pattern, which is
    None where it is only renamed."""

    sources: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, name: str, pattern: str | None) -> None:
        self.sources.append((name, pattern))

    @property
    def pattern(self) -> str | None:
        """That of the first."""
        return self.sources[0][1]


class ConvertedFiles:
    """See `converted`. A merged tensor's parts are read when it is asked for."""

    def __init__(
        self,
        files: WeightFiles,
        whole: Any,
        groups: dict[str, _Group],
        converters: dict[str, WeightConverter],
    ) -> None:
        self._files, self._whole = files, whole
        self._converters = converters
        # By each name of the model: the first name of what it is converted with, and the group.
        self._groups = {
            name: (target, group)
            for target, group in groups.items()
            for name in self._targets(target, group)
        }
        self.folder, self.names = files.folder, frozenset(self._groups)

    def _targets(self, target: str, group: _Group) -> list[str]:
        if group.pattern is None:
            return [target]
        first, *others = self._converters[group.pattern].target_patterns
        return [target, *(target.replace(first, other) for other in others)]

    @property
    def files(self) -> WeightFiles:
        """As they are stored."""
        return self._files

    @cached_property
    def quantized(self) -> frozenset[str]:
        """The names of quantised weights that are renamed at most."""
        if not isinstance(self._files, QuantizedFiles | KeptFiles):
            return frozenset()
        stored = {name: self.stored_name(name) for name in self.names}
        return frozenset(name for name, own in stored.items() if own in self._files.quantized)

    def read_quantized(self, name: str) -> QuantizedWeight:
        """A weight of `quantized`. Raises `CheckpointError`."""
        stored = self.stored_name(name)
        assert stored is not None
        assert isinstance(self._files, QuantizedFiles | KeptFiles)
        return self._files.read_quantized(stored)

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def stored_name(self, name: str) -> str | None:
        """Of a tensor that is only renamed; None: it is made of others."""
        _, group = self._groups[name]
        return group.sources[0][0] if group.pattern is None else None

    def stored_by_part(self, name: str) -> list[list[str]] | None:
        """The matrices that the named tensor [experts, outputs, inputs] is made of: a list of all
        experts' for each part of the outputs; None: it is made otherwise."""
        _, group = self._groups[name]
        if group.pattern is None:
            return None
        converter = self._converters[group.pattern]
        steps = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
        if steps not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            return None
        return [
            [source for source, pattern in group.sources if pattern == own]
            for own in converter.source_patterns
        ]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in any order. Raises `CheckpointError`."""
        wanted = set(names)
        renamed = {
            group.sources[0][0]: name
            for name, (_, group) in self._groups.items()
            if name in wanted and group.pattern is None
        }
        for source, tensor in self._files.read(renamed):
            yield renamed[source], tensor
        done = set[str]()
        for name in sorted(wanted.difference(renamed.values())):
            target, group = self._groups[name]
            if target not in done:
                done.add(target)
                for own, tensor in self._converted(target, group).items():
                    if own in wanted:
                        yield own, tensor

    def _converted(self, target: str, group: _Group) -> dict[str, Tensor]:
        assert group.pattern is not None
        tensors = dict(self._files.read([source for source, _ in group.sources]))
        converter = deepcopy(self._converters[group.pattern])
        for source, pattern in group.sources:
            assert pattern is not None
            tensor: Any = tensors[source]
            converter.add_tensor(target, source, pattern, tensor)
        found = converter.convert(target, model=self._whole, config=self._whole.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in found.items()
        }
