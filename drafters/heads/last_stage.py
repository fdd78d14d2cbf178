"""A head beside the last stage's layers: it reads a step's rows and drafts in the same step.

Its keys and values are paged as those of the layers: row i stands in the slot of token i and is
made of the feature of token i and of the token behind it. So prefixes are shared with what the head
knows of them, and nothing is lost with a drafter. The last row of a shared prefix was made with the
token that came there first; only drafts depend on it.

Rows of requests without a task wait until their next task. Rows that waited too long are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.proposals import FeatureLayers, LogitsParams, Proposal, empty_proposal
from ...core.steps import HeadDrafts, HeadTask, StepInput
from ...models.attention.step_attention import PagedKv
from ...models.device import to_device
from ...models.heads.checkpoint_kind import CheckpointKind, reading_text
from ...models.heads.load_head import (
    SharedParts,
    load_embedding,
    load_readings,
    read_head_checkpoint,
    take_target_rows,
)
from ...models.heads.mtp import load_mtp_head
from ...models.load.model_info import ModelInfo
from ...models.stage.stage_heads import LastStageParts, TextRows
from ..model.draft_costs import PayingDepth
from ..model.text_distribution import TextDistribution
from .device_trees import DeviceTrees, TextEnd, device_trees
from .drafter import feature_layers, is_own_layer, network_of
from .networks.head_network import HeadNetwork
from .networks.kept_keys import KeptKeys, PagedKeys
from .options import HeadOptions
from .reading_trial import ProbingHead, ReadingTrial
from .tree_growth import TreeGrowth
from .waiting_rows import WaitingRows


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
        self._vocab_size, self._options = spec.target.vocab_size, spec.options
        self._growth = TreeGrowth(network, spec.target.vocab_size, spec.name, spec.options)
        self._measured = self._growth.measured
        given, width = spec.given.layers, spec.given.width
        self._width = len(layers) * width
        # None: all of the features.
        self._columns: list[slice] | None = None
        if tuple(layers) != tuple(given):
            firsts = [given.index(layer) * width for layer in layers]
            self._columns = [slice(first, first + width) for first in firsts]
        self._parts = parts
        self._kept: _Kept | None = self._new()
        self._kept.rows.load_loops()
        if self._kept.trees is not None and not self._kept.trees.capture_first():
            self._parts = replace(parts, capture=None)
            self._kept = self._kept._replace(trees=None)

    @property
    def kv_bytes(self) -> int:
        """Bytes of its cache."""
        return 0 if self._kept is None else self._kept.kv.data.nbytes

    def reset(self) -> None:
        """Forget all texts."""
        if self._kept is not None:
            self._kept.kv.data.zero_()
            self._kept.rows.clear()
        self._forget_drafts()

    def release(self) -> None:
        """Free cache and features that wait, until it is asked again."""
        self._kept = None
        self._forget_drafts()

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2], as the layers' caches do."""
        if self._kept is not None:
            self._kept.kv.move(to_device(moves, self._network.device))
            self._kept.rows.move(moves)

    def overwritten(self, slots: Int32) -> None:
        """What stood in these slots is gone."""
        if self._kept is not None:
            self._kept.rows.overwritten(slots)

    @torch.inference_mode()
    def read_later(self, texts: TextRows, features: Tensor) -> None:
        """Keep rows of all requests; features float32 [rows, width] of all layers."""
        self._note_texts(texts)
        if self._kept is not None:
            is_wanted = np.zeros(len(texts.starts) - 1, dtype=np.bool_)
            self._kept.rows.add(texts, self._own(features), is_wanted)

    @torch.inference_mode()
    def draft(
        self, step: StepInput, texts: TextRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Draft what a task says, read what waits of these requests, and keep the others' rows.

        features  float32 [rows, width]  of the committed rows
        """
        start = time.perf_counter()
        if self._kept is None:
            self._kept = self._new()
        self._note_texts(texts)
        places = np.array(task.requests, dtype=np.int32)
        if self._measured is not None:
            self._measured.started([texts.keys[place] for place in task.requests])
        has_rows = texts.starts[places + 1] > texts.starts[places]
        is_wanted = np.zeros(len(texts.starts) - 1, dtype=np.bool_)
        is_wanted[places] = True
        own = self._own(features)
        self._kept.rows.add(texts, own, is_wanted)
        if not has_rows.any():
            return HeadDrafts(self.name, 0.0, ())
        read = self._read(step, texts, own, places[has_rows], self._kept)
        ends = self._ends(step, read, task)
        grown = None
        if self._kept.trees is not None and ends:
            grown = self._kept.trees.grow(list(ends.values()))
        num_levels, drafts = grown or self._grown(list(ends.values()), task)
        found = dict(zip(ends, drafts, strict=True))
        nothing = empty_proposal(self.name)
        proposals = tuple(found.get(place, nothing) for place in task.requests)
        self._note_drafts(texts, task, proposals)
        seconds = time.perf_counter() - start
        return HeadDrafts(self.name, seconds, proposals, num_levels=num_levels)

    def _new(self) -> _Kept:
        """What it keeps of texts, empty."""
        parts = self._parts
        row = torch.zeros(1, self._width, dtype=parts.dtype, device=self._network.device)
        kv, output = paged_kv_of(
            self._network, parts.num_slots, self._network.project(row), parts.dtype
        )
        trees = device_trees(
            self.name, self._network, kv, output, self._vocab_size, self._options, parts.capture
        )
        return _Kept(kv, WaitingRows(parts.num_slots, row), trees)

    def _own(self, features: Tensor) -> Tensor:
        """The columns that it reads, [n, width]."""
        if self._columns is not None:
            features = torch.cat([features[:, part] for part in self._columns], dim=-1)
        return features.to(self._parts.dtype)

    def _read(
        self, step: StepInput, texts: TextRows, features: Tensor, places: Int32, kept: _Kept
    ) -> list[_Text]:
        """Read what comes now and what waits of the requests at `places`, which have rows."""
        device, rows = self._network.device, kept.rows
        laid = rows.to_read(step, texts, places, self._parts.block_size, self._max_tokens)
        slots = to_device(laid.slots, device).split(np.diff(laid.starts).tolist())
        known = laid.num_known.tolist()
        keys = [PagedKeys(kept.kv, *own) for own in zip(slots, known, strict=True)]
        outputs = self._network.read(
            self._network.project(rows.features_of(laid.sources, features)),
            to_device(laid.following, device),
            to_device(laid.positions, device),
            keys,
            laid.counts.tolist(),
        )
        rows.note_read(laid.read_slots)
        ends = laid.counts.cumsum() - 1
        last = (
            places.tolist(), laid.following[ends].tolist(), laid.positions[ends].tolist(),
            outputs[ends].split(1), keys, np.split(laid.slots, laid.starts[1:-1]),
        )  # fmt: skip
        return [_Text(*own) for own in zip(*last, strict=True)]

    def _ends(self, step: StepInput, texts: Sequence[_Text], task: HeadTask) -> dict[int, TextEnd]:
        """The ends of texts that are drafted for, by place."""
        wanted = dict(zip(task.requests, task.max_nodes, strict=True))
        drafted = [text for text in texts if wanted[text.place]]
        # A step may hold nothing but parts of prompts that go on.
        if not drafted:
            return {}
        ways = _distributions(step, [text.place for text in drafted])
        ends = {}
        for text, way in zip(drafted, ways, strict=True):
            max_nodes = min(wanted[text.place], self._max_nodes)
            ends[text.place] = TextEnd(
                text.token, text.position, text.output, text.kept, text.slots, way, max_nodes
            )
        return ends

    def _grown(self, ends: Sequence[TextEnd], task: HeadTask) -> tuple[int, list[Proposal]]:
        """As `DeviceTrees.grow`, level by level on the host."""
        trees = [
            self._growth.begin(
                end.kept, end.token, end.output, end.position + 2, end.distribution, end.max_nodes
            )
            for end in ends
        ]
        growing = [tree for tree in trees if tree is not None]
        num_levels = self._growth.grow(growing, depth=PayingDepth(task.level_tokens))
        return num_levels, [
            self._growth.proposal(tree, end.max_nodes)
            for tree, end in zip(trees, ends, strict=True)
        ]

    def _note_texts(self, texts: TextRows) -> None:
        """A step has the tokens that followed the drafts before it."""
        if self._measured is not None:
            for key, first, tokens in texts.continued():
                self._measured.followed(key, first, tokens)

    def _note_drafts(self, texts: TextRows, task: HeadTask, proposals: Sequence[Proposal]) -> None:
        if self._measured is not None:
            self._measured.finished(
                {
                    texts.keys[place]: (texts.length(place), proposal)
                    for place, proposal in zip(task.requests, proposals, strict=True)
                    if texts.starts[place] < texts.starts[place + 1]
                }
            )

    def _forget_drafts(self) -> None:
        if self._measured is not None:
            self._measured.forget_all()


def paged_kv_of(
    network: HeadNetwork, num_slots: int, projected: Tensor, dtype: torch.dtype
) -> tuple[PagedKv, Tensor]:
    """An empty cache for what a head keeps of texts, and the output of the row whose projection is
    `projected`, [1, width]."""
    device = network.device
    tried = KeptKeys(network.num_layers)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        output = network.read(projected, zero, zero, [tried], [1])
    kept = tried.layer(0) if network.num_layers else None
    # Parallel heads keep nothing.
    num_sides, _, *shape = (2, 0, 0, 0) if kept is None else kept.shape
    if num_sides == 1:
        # A latent. How much of it is a value, its layer says.
        shape.insert(1, 0)
    kv = PagedKv(network.num_layers, num_slots, *shape, dtype=dtype, device=str(device))
    return kv, output


class _Kept(NamedTuple):
    """Keys and values of rows that were read, what is known of each slot, and graphs that read
    them, if there are any."""

    kv: PagedKv
    rows: WaitingRows
    trees: DeviceTrees | None


class _Text(NamedTuple):
    """A request's text with a step: its last row, that row's output, and the token behind it."""

    place: int
    token: int
    position: int
    output: Tensor
    kept: PagedKeys
    slots: Int32


def _distributions(step: StepInput, places: Sequence[int]) -> Iterator[TextDistribution]:
    """How requests choose tokens, by their rows of the step."""
    rows = np.searchsorted(step.logits_rows, step.request_starts[places])
    is_own = step.logits_rows[rows] < step.request_starts[np.add(places, 1)]
    assert is_own.all(), "a request that draws no token needs no draft"
    sampling = step.sampling
    fields = (
        sampling.temperature, sampling.seed, sampling.top_k, sampling.top_p, sampling.min_p,
        sampling.typical_p,
    )  # fmt: skip
    for temperature, seed, top_k, top_p, min_p, typical_p in zip(
        *(field[rows].tolist() for field in fields), strict=True
    ):
        params = LogitsParams(top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
        yield TextDistribution(temperature, seed, params, None, None, 0)


@dataclass(frozen=True, slots=True)
class LastStageHeadSpec:
    """A head that the last stage loads.

    folder   of its checkpoint; the target's own: its MTP layer
    given    layers whose states the stage has for heads
    max_nodes  of a tree, at most
    """

    name: str
    folder: Path
    target: ModelInfo
    given: FeatureLayers
    options: HeadOptions
    max_nodes: int

    @property
    def kind(self) -> CheckpointKind:
        """What its folder holds. Raises `CheckpointError`."""
        if is_own_layer(self.folder, self.target):
            return CheckpointKind.MTP
        return read_head_checkpoint(self.folder).kind

    def build(self, parts: LastStageParts) -> LastStageHead | ProbingHead:
        """Load it to the stage. Raises `CheckpointError` or `ConfigError`.

        Where its config leaves open how it is read, the first drafts tell.
        """
        layers = feature_layers(self.folder, self.target)
        device = str(parts.device)
        embed = parts.embed
        if embed is None:
            embed = load_embedding(self.target, str(parts.dtype).removeprefix("torch."), device)
        shared = SharedParts(embed, parts.norm, parts.project, parts.softcap)
        if is_own_layer(self.folder, self.target):
            mtp = load_mtp_head(self.target, parts.dtype, device)
            return LastStageHead(self, network_of(mtp, shared), layers, parts)
        readings = load_readings(self.folder, parts.dtype, device)
        for _, head in readings:
            take_target_rows(head, parts.project)
        heads = {
            reading_text(reading): LastStageHead(self, network_of(head, shared), layers, parts)
            for reading, head in readings
        }
        if len(heads) > 1:
            num_tokens, origin = self.options.num_tokens, str(self.folder)
            return ProbingHead(heads, ReadingTrial(list(heads), num_tokens, origin, self.name))
        [head] = heads.values()
        return head


def load_last_stage_heads(
    specs: Sequence[LastStageHeadSpec], parts: LastStageParts
) -> list[LastStageHead | ProbingHead]:
    """The heads of a stage. Raises `CheckpointError` or `ConfigError`."""
    return [spec.build(parts) for spec in specs]
