"""A trained head as drafter: its tree goes on from the target's hidden states.

EAGLE-1 and 2, HASS, FSPAD, GRIFFIN, EAGLE-3, SpecFormer, Medusa, blockwise heads, DFlash, DSpark
(`models/heads/`). See docs/algorithms/heads.md, "Drafting".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from ...core.sampling.rows import sampling_rows
from ...core.steps import StepOutput, TopTokens
from ...models.device import choose_device, choose_dtype
from ...models.heads.dflash import DFlash
from ...models.heads.dspark import DSpark
from ...models.heads.feature_head import FeatureHead
from ...models.heads.load_head import Head, load_head, misfits, read_head_checkpoint
from ...models.heads.shared_parts import SharedParts, load_shared_parts
from ...models.heads.spec_former import SpecFormer
from ...models.load.model_info import ModelInfo
from ...models.sampling import choose_sampler
from ..model.text_distribution import draft_rng, stacked
from ..model.tree_draws import WITH_REPLACEMENT, TreeDraws
from ..model.tree_job import TreeJob
from ..open_requests import OpenRequests
from .block_network import DFlashNetwork
from .head_text import HeadText
from .kept_keys import KeptKeys
from .markov_network import DSparkNetwork
from .networks import FeatureNetwork, HeadNetwork, HeadTree, SpecFormerNetwork
from .options import HeadOptions
from .parallel_network import ParallelNetwork


def feature_layers(folder: Path, target: ModelInfo) -> tuple[int, ...]:
    """Layers of the target whose outputs the head of a folder reads; the last one is normed.

    Raises `CheckpointError`; `ConfigError` (`model`) where it does not fit the target.
    """
    checkpoint = read_head_checkpoint(folder)
    if checkpoint.config is None:
        raise ConfigError("model", f"{folder} holds a {checkpoint.kind}, which cannot draft here")
    problems = misfits(checkpoint.config, target)
    if problems:
        raise ConfigError("model", f"{folder} does not fit the served model: {'; '.join(problems)}")
    return checkpoint.config.layers_of(target.num_layers) or (target.num_layers - 1,)


def load_head_drafter(
    folder: Path, target: ModelInfo, name: str = "head", options: HeadOptions | None = None
) -> HeadDrafter:
    """The drafter of a checkpoint's folder. Raises `CheckpointError` or `ConfigError`."""
    options = options or HeadOptions()
    layers = feature_layers(folder, target)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, target.dtype)
    head = load_head(folder, getattr(torch, dtype), device)
    shared = load_shared_parts(target, dtype, device)
    return HeadDrafter(_network(head, shared), target, layers, name, options)


def _network(head: Head, shared: SharedParts) -> HeadNetwork:
    if isinstance(head, FeatureHead):
        return FeatureNetwork(head, shared)
    if isinstance(head, SpecFormer):
        return SpecFormerNetwork(head, shared)
    if isinstance(head, DSpark) and head.markov_head is not None:
        return DSparkNetwork(head, shared)
    if isinstance(head, DFlash):
        return DFlashNetwork(head, shared)
    return ParallelNetwork(head, shared)


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
        self._options = options.of_head(says_all_levels=network.says_all_levels)
        self._sampler = choose_sampler(network.device)
        self._requests: OpenRequests[HeadText] = OpenRequests(name)

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

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

    @torch.inference_mode()
    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """A tree a query; smaller where the deadline passes first.

        Empty for a text whose last token but one has no features.
        """
        texts = [self._requests.of_query(query) for query in queries]
        self._read(texts)
        trees = [self._begin(text, query) for text, query in zip(texts, queries, strict=True)]
        growing = [tree for tree in trees if tree is not None]
        while growing and (deadline is None or time.monotonic() < deadline):
            self._grow(growing)
            growing = [tree for tree in growing if tree.job.expansion.frontier]
        return [
            self._proposal(tree, query.max_nodes)
            for tree, query in zip(trees, queries, strict=True)
        ]

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
        said = self._network.read(values, tokens.long(), positions.long(), kept, counts)
        for (text, _), end in zip(taken, accumulate(counts), strict=True):
            text.note_rows(said[end - 1 : end], self._options.max_tokens)

    def _begin(self, text: HeadText, query: Query) -> HeadTree | None:
        most = self._network.most_levels or self._options.num_tokens
        expansion = self._options.expansion(most, query.max_nodes)
        if text.last is None or not text.is_draftable or not expansion.frontier:
            return None
        draws = self._draws(text)
        sure: dict[int, float] = {}
        job = TreeJob(
            expansion, text.committed_len, (), text.distribution, draws, sure,
            self._options.weighs_confidence, self._options.stop_below,
        )  # fmt: skip
        kept = KeptKeys(self._network.num_layers)
        return HeadTree(job, text.tokens[-1], text.kept, text.last, kept, sure=sure)

    def _draws(self, text: HeadText) -> TreeDraws | None:
        """None where candidates are no draws."""
        options, distribution = self._options, text.distribution
        if not options.is_drawn or distribution.temperature == 0:
            return None
        return TreeDraws(
            min(options.distribution_size, self._vocab_size),
            distribution.temperature,
            options.draws == WITH_REPLACEMENT,
            draft_rng(self._name, distribution.seed, text.committed_len),
        )

    def _grow(self, trees: Sequence[HeadTree]) -> None:
        """One level more of each tree."""
        output = self._chosen(trees, self._network.level(trees))
        first = 0
        for tree in trees:
            count = len(tree.job.expansion.frontier)
            tree.job.take(output, first)
            first += count

    def _chosen(self, trees: Sequence[HeadTree], logits: torch.Tensor) -> StepOutput:
        """What the requests would choose after each node, by the head's logits."""
        jobs = [tree.job for tree in trees]
        counts = [len(job.expansion.frontier) for job in jobs]
        positions = [
            job.committed_len + job.expansion.depth(node)
            for job in jobs
            for node in job.expansion.frontier
        ]
        sampling = sampling_rows(
            [job.distribution.temperature for job in jobs],
            [job.distribution.logits_params for job in jobs],
            [job.distribution.seed for job in jobs],
            np.array(positions, dtype=np.int64),
            np.array(counts, dtype=np.int32),
        )
        targets = self._sampler.choose(logits, sampling)
        log_probs = self._sampler.log_softmax(logits)
        best = log_probs.topk(min(max(job.num_top for job in jobs), self._vocab_size), dim=-1)
        none = np.empty(0, dtype=np.int32)
        return StepOutput(
            0,
            targets.cpu().numpy(),
            none.reshape(0, 0),
            none.astype(np.float32),
            log_probs=log_probs.gather(-1, targets.long()[:, None])[:, 0].cpu().numpy(),
            top=TopTokens(best.indices.int().cpu().numpy(), best.values.cpu().numpy()),
        )

    def _proposal(self, tree: HeadTree | None, max_nodes: int) -> Proposal:
        if tree is None:
            return empty_proposal(self._name)
        nodes = tree.job.proposed(max_nodes)
        declared = stacked(tree.job.declared[: len(nodes[0])])
        return Proposal(self._name, *nodes, distributions=declared)
