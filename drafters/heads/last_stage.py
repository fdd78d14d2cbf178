"""A head beside the last stage's layers: it reads a step's rows and drafts in the same step.

Its keys and values are paged as those of the layers: row i stands in the slot of token i and is
made of the feature of token i and of the token behind it. So prefixes are shared with what the head
knows of them, and nothing is lost with a drafter. The last row of a shared prefix was made with the
token that came there first; only drafts depend on it.

Rows of requests that nobody wants drafts for wait, and are read when somebody does; what waited too
long is not read at all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.logits_params import LogitsParams
from ...core.proposals import FeatureLayers
from ...core.steps import HeadDrafts, HeadTask, StepInput
from ...core.verify.accepted_rows import CommittedRows
from ...models.device import to_device
from ...models.heads.load_head import load_head
from ...models.heads.shared_parts import SharedParts, load_embedding
from ...models.load.model_info import ModelInfo
from ...models.stage.stage_heads import LastStageParts
from ..model.text_distribution import TextDistribution
from .drafter import feature_layers, network_of
from .measured_shapes import MeasuredShapes
from .networks.head_network import HeadNetwork, HeadTree
from .networks.paged_keys import PagedKeys, paged_kv_of
from .options import HeadOptions
from .tree_growth import TreeGrowth
from .waiting_rows import Rows, WaitingRows, joined

NO_ROWS = np.empty(0, dtype=np.int32)


class LastStageHead:
    """One head of a stage that hands it the features of committed rows. One thread uses it."""

    def __init__(
        self,
        spec: LastStageHeadSpec,
        network: HeadNetwork,
        layers: Sequence[int],
        parts: LastStageParts,
    ) -> None:
        """`layers` of the target, which it reads. Raises `ConfigError` (`tree`)."""
        self.name = spec.name
        self._max_nodes = spec.max_nodes
        self._network = network
        self._max_tokens = spec.options.max_tokens
        self._growth = TreeGrowth(network, spec.target.vocab_size, spec.name, spec.options)
        self._measured = self._growth.measured
        given, width = spec.given.layers, spec.given.width
        firsts = [given.index(layer) * width for layer in layers]
        self._columns = [slice(first, first + width) for first in firsts]
        self._kv = paged_kv_of(network, parts.num_slots, width * len(firsts), parts.dtype)
        self._block_size = parts.block_size
        # By slot: whether its keys and values are of the token that stands there now.
        self._is_known = np.zeros(parts.num_slots, dtype=np.bool_)
        self._waiting = WaitingRows()

    @property
    def kv_bytes(self) -> int:
        """Bytes of its cache."""
        return self._kv.data.nbytes

    def reset(self) -> None:
        """Forget all texts."""
        self._kv.data.zero_()
        self._is_known[:] = False
        self._waiting.clear()

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2], as the layers' caches do."""
        self._kv.move(to_device(moves, self._network.device))
        self._is_known[moves[:, 1]] = self._is_known[moves[:, 0]]

    def overwritten(self, slots: Int32) -> None:
        """What stood in these slots is gone."""
        self._is_known[slots] = False

    @torch.inference_mode()
    def read_later(self, key: int, features: Tensor, following: Int32, positions: Int32) -> None:
        """Keep rows of a request: features [n, width], following tokens and positions int32 [n]."""
        rows = Rows(self._own(features), following, positions)
        if self._measured is not None:
            _note_text(self._measured, key, rows)
        self._waiting.add(key, rows)

    @torch.inference_mode()
    def draft(
        self, step: StepInput, committed: CommittedRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Draft what a task says, and read what waits of these requests.

        features  float32 [rows, width]  of the committed rows
        """
        start = time.perf_counter()
        new = _rows_of(step, committed, self._own(features))
        wanted = dict(zip(task.places, task.max_nodes, strict=True))
        if self._measured is not None:
            self._note_texts(self._measured, step, new, wanted)
        for place, rows in new.items():
            if place not in wanted:
                self._waiting.add(step.request_keys[place], rows)
        texts = [
            self._text(step, committed, place, rows)
            for place, rows in new.items()
            if place in wanted
        ]
        if not texts:
            return HeadDrafts(self.name, 0.0, ())
        trees = self._trees(step, texts, self._read(texts), wanted)
        self._growth.grow([tree for tree in trees.values() if tree is not None])
        proposals = tuple(
            self._growth.proposal(trees.get(place), min(size, self._max_nodes))
            for place, size in wanted.items()
        )
        if self._measured is not None:
            # A tree stands behind the token that follows its text's last row.
            lengths = {text.place: int(text.rows.positions[-1]) + 2 for text in texts}
            self._measured.finished(
                {
                    step.request_keys[place]: (lengths[place], proposal)
                    for place, proposal in zip(wanted, proposals, strict=True)
                    if place in lengths
                }
            )
        return HeadDrafts(self.name, time.perf_counter() - start, proposals)

    def _note_texts(
        self,
        measured: MeasuredShapes,
        step: StepInput,
        new: Mapping[int, Rows],
        wanted: Collection[int],
    ) -> None:
        """A step tells what followed the drafts before it."""
        for place, rows in new.items():
            _note_text(measured, step.request_keys[place], rows)
        measured.started([step.request_keys[place] for place in wanted])

    def _own(self, features: Tensor) -> Tensor:
        """The columns that it reads, [n, width]."""
        own = torch.cat([features[:, part] for part in self._columns], dim=-1)
        return own.to(self._kv.data.dtype)

    def _text(self, step: StepInput, committed: CommittedRows, place: int, new: Rows) -> _Text:
        """A request's text: what is known of it, what waits, and the step's own rows."""
        table, end = step.block_tables[place], int(step.context_lens[place])
        waiting = self._waiting.take(step.request_keys[place], end)
        late = np.concatenate([NO_ROWS, *(rows.positions for rows in waiting)])
        late_slots = _slots(table, late, self._block_size)
        before = np.arange(max(0, end - self._max_tokens), end, dtype=np.int32)
        before = _slots(table, before, self._block_size)
        # What was never read is a hole in the context.
        before = before[self._is_known[before]]
        before = before[~np.isin(before, late_slots)]
        own = slice(*committed.starts[place : place + 2].tolist())
        read = np.concatenate([late_slots, step.slots[committed.rows[own]]])
        slots = to_device(np.concatenate([before, read]), self._network.device)
        kept = PagedKeys(self._kv, slots, len(before))
        return _Text(place, joined([*waiting, new]), read, kept)

    def _read(self, texts: Sequence[_Text]) -> Tensor:
        """What the last rows of texts say, [texts, width]."""
        rows = joined([text.rows for text in texts])
        counts = [len(text.rows.positions) for text in texts]
        said = self._network.read(
            rows.features,
            to_device(rows.following, self._network.device),
            to_device(rows.positions, self._network.device),
            [text.kept for text in texts],
            counts,
        )
        self._is_known[np.concatenate([text.slots for text in texts])] = True
        return said[np.cumsum(counts) - 1]

    def _trees(
        self, step: StepInput, texts: Sequence[_Text], said: Tensor, wanted: Mapping[int, int]
    ) -> dict[int, HeadTree | None]:
        """The trees of texts that are drafted for, by place."""
        trees = {}
        for text, own in zip(texts, said.split(1), strict=True):
            max_nodes = min(wanted[text.place], self._max_nodes)
            if max_nodes:
                rows, distribution = text.rows, _distribution(step, text.place)
                token, length = int(rows.following[-1]), int(rows.positions[-1]) + 2
                trees[text.place] = self._growth.begin(
                    text.kept, token, own, length, distribution, max_nodes
                )
        return trees


class _Text(NamedTuple):
    """A request's text with a step: what the head reads now, into these slots, and all that it
    knows then."""

    place: int
    rows: Rows
    slots: Int32
    kept: PagedKeys


def _note_text(measured: MeasuredShapes, key: int, rows: Rows) -> None:
    """New rows of a request begin with the root of its last draft."""
    measured.followed(key, int(rows.positions[0]) + 1, rows.following.tolist())


def _rows_of(step: StepInput, committed: CommittedRows, features: Tensor) -> dict[int, Rows]:
    """The committed rows of each request that has some, by place."""
    found, starts = {}, committed.starts.tolist()
    positions = step.positions[committed.rows]
    for place, own in enumerate(map(slice, starts[:-1], starts[1:])):
        if own.start < own.stop:
            found[place] = Rows(features[own], committed.following[own], positions[own])
    return found


def _slots(blocks: Int32, positions: Int32, block_size: int) -> Int32:
    """int32 [n]: of these positions."""
    return blocks[positions // block_size] * np.int32(block_size) + positions % block_size


def _distribution(step: StepInput, request: int) -> TextDistribution:
    """How a request chooses tokens, as its rows of the step say."""
    start, end = step.request_starts[request : request + 2]
    row = int(np.searchsorted(step.logits_rows, start))
    assert step.logits_rows[row] < end, "a request that draws no token needs no draft"
    sampling = step.sampling
    params = LogitsParams(
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
        min_p=float(sampling.min_p[row]),
        typical_p=float(sampling.typical_p[row]),
    )
    return TextDistribution(
        float(sampling.temperature[row]), int(sampling.seed[row]), params, None, None, 0
    )


@dataclass(frozen=True, slots=True)
class LastStageHeadSpec:
    """A head that the last stage loads.

    folder   of its checkpoint
    given    the features that the stage has for it
    max_nodes  of a tree, at most
    """

    name: str
    folder: Path
    target: ModelInfo
    given: FeatureLayers
    options: HeadOptions
    max_nodes: int

    def build(self, parts: LastStageParts) -> LastStageHead:
        """Load it to the stage. Raises `CheckpointError` or `ConfigError`."""
        layers = feature_layers(self.folder, self.target)
        device = str(parts.device)
        embed = parts.embed
        if embed is None:
            embed = load_embedding(self.target, str(parts.dtype).removeprefix("torch."), device)
        head = load_head(self.folder, parts.dtype, device)
        shared = SharedParts(embed, parts.norm, parts.project, parts.softcap)
        return LastStageHead(self, network_of(head, shared), layers, parts)


def load_last_stage_heads(
    specs: Sequence[LastStageHeadSpec], parts: LastStageParts
) -> list[LastStageHead]:
    """The heads of a stage. Raises `CheckpointError` or `ConfigError`."""
    return [spec.build(parts) for spec in specs]
