"""A head beside the last stage's layers: it reads each step's rows and drafts in the same step.

Its keys and values are paged as those of the layers: row i stands in the slot of token i and is
made of the feature of token i and of the token behind it. So prefixes are shared with what the head
knows of them, and nothing is lost with a drafter. The last row of a shared prefix was made with the
token that came there first; only drafts depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from .networks import HeadNetwork
from .options import HeadOptions
from .paged_keys import PagedKeys, paged_kv_of
from .tree_growth import TreeGrowth


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
        given, width = spec.given.layers, spec.given.width
        firsts = [given.index(layer) * width for layer in layers]
        self._columns = [slice(first, first + width) for first in firsts]
        self._kv = paged_kv_of(network, parts.num_slots, width * len(firsts), parts.dtype)
        self._block_size = parts.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of its cache."""
        return self._kv.data.nbytes

    def reset(self) -> None:
        """Forget all texts."""
        self._kv.data.zero_()

    def move(self, moves: Tensor) -> None:
        """Copy slots, int64 [m, 2], as the layers' caches do."""
        self._kv.move(moves)

    @torch.inference_mode()
    def draft(
        self, step: StepInput, committed: CommittedRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Read a step's committed rows and draft what its task says.

        features  float32 [rows, width]  of these rows
        """
        requests = np.flatnonzero(np.diff(committed.starts)).tolist()
        if not requests:
            return HeadDrafts(self.name, 0.0, ())
        texts = {request: self._text(step, committed, request) for request in requests}
        said = self._read(step, committed, features, texts)
        start = time.perf_counter()
        ends = dict(zip(requests, committed.starts[1:][requests].tolist(), strict=True))
        sizes = [min(size, self._max_nodes) for size in task.max_nodes]
        trees = []
        for place, max_nodes in zip(task.places, sizes, strict=True):
            last = ends[place] - 1
            length = int(step.positions[committed.rows[last]]) + 2
            distribution = _distribution(step, place)
            trees.append(
                self._growth.begin(
                    texts[place], int(committed.following[last]), said[last : last + 1], length,
                    distribution, max_nodes,
                )
            )  # fmt: skip
        self._growth.grow([tree for tree in trees if tree is not None])
        proposals = tuple(map(self._growth.proposal, trees, sizes))
        return HeadDrafts(self.name, time.perf_counter() - start, proposals)

    def _read(
        self,
        step: StepInput,
        committed: CommittedRows,
        features: Tensor,
        texts: dict[int, PagedKeys],
    ) -> Tensor:
        """What the committed rows say, [rows, width]."""
        own = torch.cat([features[:, part] for part in self._columns], dim=-1)
        device = self._network.device
        return self._network.read(
            own,
            to_device(committed.following, device),
            to_device(step.positions[committed.rows], device),
            list(texts.values()),
            np.diff(committed.starts)[list(texts)].tolist(),
        )

    def _text(self, step: StepInput, committed: CommittedRows, request: int) -> PagedKeys:
        rows = committed.rows[committed.starts[request] : committed.starts[request + 1]]
        end = int(step.context_lens[request])
        first = max(0, end - self._max_tokens)
        before = _slots(step.block_tables[request], first, end, self._block_size)
        slots = np.concatenate([before, step.slots[rows]])
        return PagedKeys(self._kv, to_device(slots, self._network.device), len(before))


def _slots(blocks: Int32, first: int, end: int, block_size: int) -> Int32:
    """int32 [end - first]: of these positions."""
    positions = np.arange(first, end, dtype=np.int32)
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
