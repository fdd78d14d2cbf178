"""A trained head as drafter: its tree goes on from the target's hidden states.

EAGLE-1 and 2, HASS, FSPAD, GRIFFIN, EAGLE-3, P-EAGLE, SpecFormer, Medusa, DFlash, DSpark
(`models/heads/`). See docs/drafters.md, "Head drafter".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    empty_proposal,
)
from ...core.tree.merge import cut, reroot
from ...models.device import choose_device, choose_dtype
from ...models.heads.checkpoint_kind import reading_text
from ...models.heads.cpu_kernels import use_cpu_kernels
from ...models.heads.dflash import DFlash
from ...models.heads.dspark import DSpark
from ...models.heads.feature_head import FeatureHead
from ...models.heads.load_head import (
    Head,
    SharedParts,
    load_readings,
    load_shared_parts,
    misfits,
    read_head_checkpoint,
    take_target_rows,
)
from ...models.heads.mtp import MtpHead
from ...models.heads.p_eagle import PEagle
from ...models.heads.spec_former import SpecFormer
from ...models.load.model_info import ModelInfo
from ..model.draft_costs import DraftCosts
from ..open_requests import OpenRequests
from .head_text import HeadText, PathRead, PathRows, read_paths
from .networks.block_network import DFlashNetwork, DSparkNetwork
from .networks.head_network import FeatureNetwork, HeadNetwork, HeadTree, SpecFormerNetwork
from .networks.parallel_networks import MedusaNetwork, PEagleNetwork
from .options import HeadOptions
from .reading_trial import ProbingDrafter, ReadingTrial
from .tree_growth import TreeGrowth

# Tokens of a path cost a pass each where they are new; behind longer ones nothing is drafted.
MOST_ASSUMED = 64
# Nodes of a tree that is drafted in one pass, to have some behind a path.
NODES_BEHIND_PATHS = 128


def feature_layers(folder: Path, target: ModelInfo) -> tuple[int, ...]:
    """Layers of the target whose outputs the head of a folder reads; the last one is normed.

    The target's own folder stands for its MTP layer. Raises `CheckpointError`; `ConfigError`
    (`model`) where it does not fit the target.
    """
    if is_own_layer(folder, target):
        return (target.num_layers - 1,)
    checkpoint = read_head_checkpoint(folder)
    if checkpoint.config is None:
        raise ConfigError("model", f"{folder} holds a {checkpoint.kind}, which cannot draft here")
    problems = misfits(checkpoint.config, target)
    if problems:
        raise ConfigError("model", f"{folder} does not fit the served model: {'; '.join(problems)}")
    return checkpoint.config.layers_of(target.num_layers) or (target.num_layers - 1,)


def is_own_layer(folder: Path, target: ModelInfo) -> bool:
    """Whether a head's folder is the target's own, whose MTP layer drafts."""
    return folder.resolve() == target.path.resolve()


def load_head_drafter(
    folder: Path, target: ModelInfo, name: str = "head", options: HeadOptions | None = None
) -> HeadDrafter | ProbingDrafter:
    """The drafter of a checkpoint's folder. Raises `CheckpointError` or `ConfigError`.

    Where its config leaves open how it is read, the first drafts tell.
    """
    if is_own_layer(folder, target):
        raise ConfigError("placement", "of kind mtp is last_stage; leave it and transport out")
    options = options or HeadOptions()
    layers = feature_layers(folder, target)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, target.dtype)
    heads = load_readings(folder, getattr(torch, dtype), device)
    shared = load_shared_parts(target, dtype, device)
    for _, head in heads:
        take_target_rows(head, shared.head)
    drafters = {
        reading_text(reading): HeadDrafter(network_of(head, shared), target, layers, name, options)
        for reading, head in heads
    }
    if len(drafters) > 1:
        trial = ReadingTrial(list(drafters), options.num_tokens, str(folder), name)
        return ProbingDrafter(drafters, trial)
    [drafter] = drafters.values()
    return drafter


def network_of(head: Head | MtpHead, shared: SharedParts) -> HeadNetwork:
    """How a head reads and grows trees, with what it shares with its target; on CPUs by draftline's
    kernels.
    """
    network = _network_of(head, shared)
    # Afterwards, since a network takes the dtype of its states from the weights.
    use_cpu_kernels(head)
    return network


def _network_of(head: Head | MtpHead, shared: SharedParts) -> HeadNetwork:
    if isinstance(head, PEagle):
        return PEagleNetwork(head, shared)
    if isinstance(head, FeatureHead | MtpHead):
        return FeatureNetwork(head, shared)
    if isinstance(head, SpecFormer):
        return SpecFormerNetwork(head, shared)
    if isinstance(head, DSpark) and head.markov_head is not None:
        return DSparkNetwork(head, shared)
    if isinstance(head, DFlash):
        return DFlashNetwork(head, shared)
    return MedusaNetwork(head, shared)


class HeadDrafter:
    """Drafts a tree a request from the target's features, all requests in one pass a level."""

    def __init__(
        self,
        network: HeadNetwork,
        target: ModelInfo,
        layers: tuple[int, ...],
        name: str,
        options: HeadOptions,
    ) -> None:
        """`layers`: of the target, whose outputs the network reads.

        Raises `ConfigError` (`tree`).
        """
        self._network = network
        self._vocab_size = target.vocab_size
        self._layers = FeatureLayers(layers, target.hidden_size)
        self._name = name
        self._max_tokens = options.max_tokens
        self._costs = DraftCosts()
        # Of deadlines and levels, seconds.
        self.clock: Callable[[], float] = time.monotonic
        self._num_path_passes = 0
        self._growth = TreeGrowth(network, target.vocab_size, name, options, self._now)
        self._measured = self._growth.measured
        # Where its output is as good as a feature.
        self._onward: FeatureNetwork | None = None
        if isinstance(network, FeatureNetwork) and not network.is_parallel:
            self._onward = network
        self._requests: OpenRequests[HeadText] = OpenRequests(name)

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def num_passes(self) -> int:
        """Passes of its network so far. A text's rows are read with the first level of its tree."""
        return self._growth.num_passes + self._num_path_passes

    @property
    def feature_layers(self) -> FeatureLayers:
        """Layers whose outputs it reads."""
        return self._layers

    @property
    def memory_bytes(self) -> int:
        """About the bytes of texts, keys, values and features that wait."""
        return self._requests.memory_bytes

    def open(self, request: DraftRequest) -> None:
        """Begin a request, of which no feature is known. Raises `DrafterError` without a token."""
        text = HeadText(request, self._vocab_size, self._network.num_layers)
        self._requests.put(request.request_id, text)

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._requests.drop(request_id)
        if self._measured is not None:
            self._measured.forget(request_id)

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next `propose`; those of unknown requests are ignored."""
        for own in rows:
            text = self._requests.find(own.request_id)
            if text is not None:
                text.add_features(own)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Follow the committed tokens. Raises `DrafterError` for a commit that does not fit."""
        for commit in commits:
            self._requests.of_commit(commit).extend(commit.tokens)
            if self._measured is not None:
                tokens = commit.tokens.tolist()
                self._measured.followed(commit.request_id, commit.base_len, tokens)

    @torch.inference_mode()
    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """A tree a query; smaller where the deadline passes first.

        Empty for a text whose last token but one has no features. Behind a path it goes on from
        its own outputs of the path's tokens; a head that drafts all levels at once has what its
        tree behind the text has there.
        """
        texts = [self._requests.of_query(query) for query in queries]
        verified = [query.request_id for query in queries if not query.assumed]
        if self._measured is not None:
            self._measured.started(verified)
        self._read(texts)
        asked = list(zip(texts, queries, strict=True))
        self._read_paths(asked, deadline)
        trees = [self._begin(text, query) for text, query in asked]
        self._costs.note_engine_costs(queries)
        growing, start = [tree for tree in trees if tree is not None], self.clock()
        if num_levels := self._growth.grow(growing, deadline, self._costs.depth()):
            self._costs.note_draw((self.clock() - start) / num_levels)
        proposals = [
            self._proposal(tree, query) for tree, query in zip(trees, queries, strict=True)
        ]
        if self._measured is not None:
            self._measured.finished(
                {
                    query.request_id: (query.committed_len, proposal)
                    for query, proposal in zip(queries, proposals, strict=True)
                    if not query.assumed
                }
            )
        return proposals

    def _now(self) -> float:
        return self.clock()

    def _read(self, texts: Sequence[HeadText]) -> None:
        """Take the features that wait into the texts' keys and values."""
        taken = [(text, rows) for text in texts if (rows := text.take_features()) is not None]
        if not taken:
            return
        values, tokens, positions = (
            torch.from_numpy(np.concatenate(parts)).to(self._network.device)
            for parts in zip(*(rows for _, rows in taken), strict=True)
        )
        counts = [len(rows[1]) for _, rows in taken]
        kept = [text.kept for text, _ in taken]
        projected = self._network.project(values)
        outputs = self._network.read(projected, tokens.long(), positions.long(), kept, counts)
        for (text, _), end in zip(taken, accumulate(counts), strict=True):
            text.note_rows(outputs[end - 1 : end], self._max_tokens)

    def _read_paths(self, asked: Sequence[tuple[HeadText, Query]], deadline: float | None) -> None:
        """Read the paths that the queries go on from, where the head can."""
        network = self._onward
        if network is None:
            return
        walks: list[PathRead] = []
        for text, query in asked:
            if query.assumed and _can_follow(text, query.assumed):
                assert text.last is not None
                if text.path is None:
                    text.path = PathRows(text.kept, text.last, network.num_layers)
                walks.append(PathRead(text.path, query.assumed, text.committed_len))
        for _ in read_paths(
            network, walks, lambda: deadline is not None and self.clock() >= deadline
        ):
            self._num_path_passes += 1

    def _begin(self, text: HeadText, query: Query) -> HeadTree | None:
        path = query.assumed or ()
        if not _can_follow(text, path):
            return None
        assert text.last is not None
        if path and self._onward is not None:
            return self._begin_behind(text, path, query.max_nodes)
        return self._growth.begin(
            text.kept, text.tokens[-1], text.last, text.committed_len, text.distribution,
            NODES_BEHIND_PATHS if path else query.max_nodes,
        )  # fmt: skip

    def _begin_behind(self, text: HeadText, path: Sequence[int], max_nodes: int) -> HeadTree | None:
        rows = text.path
        if rows is None or len(rows.tokens) < len(path):
            return None
        distribution = text.distribution.copy()
        distribution.append(path)
        length = text.committed_len + len(path)
        return self._growth.begin(
            rows.kept, path[-1], rows.outputs[-1], length, distribution, max_nodes
        )

    def _proposal(self, tree: HeadTree | None, query: Query) -> Proposal:
        if not query.assumed or self._onward is not None:
            return self._growth.proposal(tree, query.max_nodes)
        whole = self._growth.proposal(tree, NODES_BEHIND_PATHS)
        behind = reroot(whole, np.array(query.assumed, dtype=np.int32))
        return empty_proposal(self._name) if behind is None else cut(behind, query.max_nodes)


def _can_follow(text: HeadText, path: Sequence[int]) -> bool:
    """Whether anything can be drafted behind a text and a path."""
    if text.last is None or not text.is_draftable or len(path) > MOST_ASSUMED:
        return False
    return text.knows(np.array(path, dtype=np.int32))
