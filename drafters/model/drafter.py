"""A small model as drafter: it draws a chain by the request's own parameters and sampling noise.

Speculative sampling's drafter (Leviathan et al. 2023, Chen et al. 2023), on draftline's own stage
with a KV cache of its own. Where its tokenizer is not the target's, `vocabulary/` says what its
draws are. See docs/drafters.md, "Model drafter".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...core.errors import ConfigError
from ...core.interfaces import PrefixCounts
from ...core.proposals import Commit, DraftRequest, Proposal, Query
from ...core.steps import StepInput, StepOutput
from ...models.device import choose_device, choose_dtype
from ...models.layers.linear_layers import NONE
from ...models.load.model_info import ModelInfo, read_model_info
from ...models.load.partition import LayerSpan
from ...models.stage.gpu_path import GraphOptions
from ...models.stage.load_stage import load_stage
from ...models.stage.options import StageOptions
from ...models.stage.stage import Stage
from ..open_requests import OpenRequests
from .cached_text import CachedText, PrefixCache, TextEnd
from .chain_job import ChainBatch, ChainJob, build_step, chain_nodes, next_batch
from .draft_costs import DraftCosts, DraftRounds
from .expansion import Expansion
from .options import AUTO_WEIGHTS, MAX_TOKENS, ModelOptions
from .stopping_rules import SVIP, ChainLength
from .text_distribution import TreeDraws, draft_rng, stacked
from .tree_job import TreeJob, build_tree_step
from .vocabulary.choice import check_tree, choose_vocabulary
from .vocabulary.strategy import DraftNodes, DraftVocabulary, SameVocabulary
from .vocabulary.string_tree import StringVocabulary
from .vocabulary.target_noise import TargetNoise

# Capture ends after these; passes then use the next larger graph.
CAPTURE_S = 20.0


def load_model_drafter(
    model: str | Path, name: str = "model", options: ModelOptions | None = None,
    target: ModelInfo | None = None,
) -> ModelDrafter:  # fmt: skip
    """Load a Hugging Face folder or hub id, to draft for `target`; without one, for a model of its
    own tokenizer. Raises `CheckpointError` or `ConfigError`.
    """
    options = options or ModelOptions()
    info = read_model_info(model)
    if info.keeps_states:
        raise ConfigError(
            "model", "its layers keep states, which only a target's may; give another small model"
        )
    chosen = choose_vocabulary(options.vocabulary, info, target, options.num_tokens)
    check_tree(chosen.name, options.tree)
    draws = chosen.vocabulary.num_draws(options.num_tokens)
    options = replace(options, num_tokens=min(draws, MAX_TOKENS))
    device = choose_device(options.device)
    stage = load_stage(
        info.path,
        LayerSpan(0, info.num_layers, info.num_layers),
        options.num_blocks,
        options.block_size,
        dtype=choose_dtype(options.dtype, device, info.dtype),
        device=device,
        options=StageOptions(
            max_rows=options.prefill_chunk,
            max_requests=options.prefill_chunk,
            graphs=_graphs(info, options),
            compile=options.compile,
            quantization=NONE if options.weights == AUTO_WEIGHTS else options.weights,
            output=chosen.output,
        ),
    )
    return ModelDrafter(stage, info, name, options, vocabulary=chosen.vocabulary)


def _graphs(info: ModelInfo, options: ModelOptions) -> GraphOptions | None:
    """A pass has a row or more of every request in it, so as many requests as rows at most."""
    if options.enforce_eager:
        return None
    return GraphOptions(
        max_rows=options.prefill_chunk,
        max_requests=options.prefill_chunk,
        max_positions=min(info.max_context_len, options.num_blocks * options.block_size),
        seconds=CAPTURE_S,
    )


class ModelDrafter:
    """Draws a chain or a tree a request from a model, all requests in one batch.

    The model's KV of a request is kept from step to step: after a commit only the tokens are fed
    that the cache does not hold yet (two when the whole chain was accepted, one otherwise).
    Prompts are fed in chunks by `propose`, which stops at its deadline and goes on at the next.
    """

    def __init__(
        self,
        stage: Stage,
        info: ModelInfo,
        name: str = "model",
        options: ModelOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`stage` holds the whole model `info`, with the options' KV blocks; `clock` is that of
        the deadlines, and of how long drafts take. Without a `vocabulary` the model's is the
        target's.
        """
        self._stage = stage
        self._info = info
        self._name = name
        self._options = options or ModelOptions()
        self.clock = clock
        self.num_passes = 0  # of the model so far
        self._vocabulary: DraftVocabulary = vocabulary or SameVocabulary(info.vocab_size)
        self._cache = PrefixCache(self._options.num_blocks, self._options.block_size)
        self._requests: OpenRequests[CachedText] = OpenRequests(name)
        self._costs = DraftCosts()
        self._stop_rule = self._options.stop_rule(self._costs)
        self._sequoia = self._options.sequoia_shapes(self._costs)
        self._expansions = self._options.expansions(self._sequoia)
        self._rounds = DraftRounds()
        # Of each request in the last proposals, on average.
        self._num_nodes = 0.0

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes that the open requests take on the host."""
        return self._requests.memory_bytes

    @property
    def prefix_counts(self) -> PrefixCounts:
        """How much of the texts' KV was there already; see `CachingDrafter`."""
        return self._cache.counts

    def open(self, request: DraftRequest) -> None:
        """Begin a request; its tokens are fed by `propose`. Raises `DrafterError` without any."""
        self.close(request.request_id)
        length = ChainLength(self._stop_rule())
        state = CachedText(request, self._vocabulary, length, self._options.block_size)
        self._requests.put(request.request_id, state)

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """A chain or tree a query; smaller or empty where the deadline passes first, or the request
        does not fit in the KV cache or the model's context."""
        states = [self._requests.of_query(query) for query in queries]
        is_behind = any(query.assumed is not None for query in queries)
        start = self.clock()
        if not is_behind:
            self._note_verify(states, queries, start)
        self._costs.note_engine_costs(queries)
        ends = [
            state.end(query.assumed or () if state.may_follow(query.assumed or ()) else ())
            for state, query in zip(states, queries, strict=True)
        ]
        jobs = [
            self._begin(state, end, query, len(queries))
            for state, end, query in zip(states, ends, queries, strict=True)
        ]
        active = [job for job in jobs if not job.is_done]
        depth = self._costs.depth()
        while depth.goes_on(active) and (deadline is None or start < deadline):
            batch = next_batch(active, self._options.prefill_chunk)
            self._run(batch)
            active = [job for job in active if not job.is_done]
            before, start = start, self.clock()
            self._costs.note_draw(start - before, max(batch.counts, default=0))
        growing = [job.tree for job in jobs if job.tree is not None and job.drawn]
        while depth.goes_on(growing) and (deadline is None or start < deadline):
            growing = self._grow(growing)
            before, start = start, self.clock()
            self._costs.note_draw(start - before)
        self._rounds.finished([] if is_behind else [query.request_id for query in queries], start)
        for state, end, job in zip(states, ends, jobs, strict=True):
            state.keep_cache(job, end)
            self._cache.register(state)
        proposals = [
            self._proposal(end, job, query.max_nodes)
            for end, job, query in zip(ends, jobs, queries, strict=True)
        ]
        if self._sequoia is not None and not is_behind:
            self._num_nodes = sum(len(one.tokens) for one in proposals) / max(len(proposals), 1)
            for state, proposal in zip(states, proposals, strict=True):
                state.proposed = proposal.tokens, proposal.parents
        return proposals

    def observe(self, commits: Sequence[Commit]) -> None:
        """Follow the committed tokens; keeps the KV of drawn tokens that were accepted."""
        for commit in commits:
            state = self._requests.of_commit(commit)
            if self._sequoia is not None and state.proposed is not None:
                self._sequoia.judge(*state.proposed, commit.tokens.tolist())
            state.extend(commit.tokens)
            self._cache.drop_rewritten(state)

    def close(self, request_id: str) -> None:
        """Forget a request and free its KV blocks; an unknown id is ignored."""
        state = self._requests.drop(request_id)
        if state is not None:
            self._cache.release(state)

    def _note_verify(
        self, states: Sequence[CachedText], queries: Sequence[Query], now: float
    ) -> None:
        pairs = zip(states, queries, strict=True)
        stepped = [query.request_id for state, query in pairs if state.took_one_step]
        seconds = self._rounds.verify_s(stepped, now)
        if seconds is not None:
            self._costs.note_verify(seconds)
        if seconds is not None and self._sequoia is not None:
            self._sequoia.note_verify(self._num_nodes, seconds)

    def _begin(self, state: CachedText, end: TextEnd, query: Query, num_requests: int) -> ChainJob:
        tokens = end.text.tokens
        max_draws = self._vocabulary.num_draws(query.max_nodes)
        room = self._info.max_context_len - len(tokens)
        most = max(0, min(max_draws, self._options.num_tokens, room))
        assumed = None if query.assumed is None else end.added
        limit = state.length.begin(most, num_requests, assumed)
        expansion = None
        num_fed = limit - 1
        if isinstance(self._vocabulary, StringVocabulary):
            limit, num_fed = min(1, limit), self._vocabulary.most_fed
        elif self._expansions is not None and state.distribution.is_plain:
            expansion = self._expansions(limit, max_draws)
            limit, num_fed = min(1, limit), expansion.most_fed
        num_fed += len(tokens) - len(state.tokens)
        state.forget_behind(end.num_kept)
        self._cache.drop_rewritten(state)
        may_draft = limit >= 1 and state.may_follow(query.assumed or ())
        if not may_draft or not self._cache.has_reserved(state, num_fed, self._name):
            limit = 0
        position = state.rewind(end)
        size = self._distribution_size(end)
        rng = draft_rng(self._name, state.seed, end.choice.next_position) if size else None
        return ChainJob(
            tokens[position:],
            position,
            state.blocks,
            limit,
            self._vocabulary,
            end.next_position,
            end.distribution,
            state.length,
            distribution_size=size,
            rng=rng,
            tree=self._tree(state.blocks, end, expansion, rng) if limit else None,
            target_noise=self._target_noise(end) if limit else None,
        )

    def _tree(
        self,
        blocks: Sequence[int],
        end: TextEnd,
        expansion: Expansion | None,
        rng: np.random.Generator | None,
    ) -> TreeJob | None:
        """The tree that grows behind a text; None: a chain does."""
        if isinstance(self._vocabulary, StringVocabulary):
            return self._vocabulary.tree(
                end.text, end.choice, blocks, end.distribution,
                rng=rng, num_declared=self._distribution_size(end),
            )  # fmt: skip
        if expansion is None:
            return None
        return TreeJob(
            expansion, len(end.text.tokens), end.next_position, blocks, end.distribution,
            self._vocabulary, self._tree_draws(end, rng), target_noise=self._target_noise(end),
        )  # fmt: skip

    def _target_noise(self, end: TextEnd) -> TargetNoise | None:
        """The noise of what draws become in the target's tokens; None where it decides nothing."""
        if end.distribution.temperature == 0 or self._options.distribution_size:
            return None
        return self._vocabulary.target_noise(end.text, end.choice)

    def _distribution_size(self, end: TextEnd) -> int:
        """Tokens of the distribution to draw from; 0 where the token is no draw."""
        is_draw = self._vocabulary.is_declared and end.distribution.temperature > 0
        return min(self._options.distribution_size, self._vocabulary.size) if is_draw else 0

    def _tree_draws(self, end: TextEnd, rng: np.random.Generator | None) -> TreeDraws | None:
        if rng is None or self._options.tree == "dynamic":
            return None
        return TreeDraws(self._distribution_size(end), end.distribution.temperature, rng)

    def _pass(self, step: StepInput) -> StepOutput:
        output = self._stage.run(step, None)
        assert isinstance(output, StepOutput), "the stage does not hold the whole model"
        self.num_passes += 1
        return output

    def _run(self, batch: ChainBatch) -> None:
        with_entropies = self._options.stop == SVIP
        output = self._pass(
            build_step(batch, self._options.block_size, with_entropies=with_entropies)
        )
        for job, count in zip(batch.jobs, batch.counts, strict=True):
            job.feed(count)
        for row, job in enumerate(job for job in batch.jobs if not job.pending):
            job.take(output, row)

    def _grow(self, jobs: Sequence[TreeJob]) -> list[TreeJob]:
        """One level more of each tree; those that have another one."""
        active = [job for job in jobs if job.expansion.frontier]
        if not active:
            return []
        output = self._pass(build_tree_step(active, self._options.block_size))
        first = 0
        for job in active:
            count = len(job.expansion.frontier)
            job.feed_frontier()
            job.take(output, first)
            first += count
        return active

    def _proposal(self, end: TextEnd, job: ChainJob, max_nodes: int) -> Proposal:
        """The tree or the chain."""
        if job.tree is not None:
            nodes = DraftNodes(*job.tree.proposed(self._vocabulary.num_draws(max_nodes)))
            declared = stacked(job.tree.declared[: len(nodes.tokens)])
            if not isinstance(self._vocabulary, StringVocabulary):
                own = map(self._vocabulary.fed, nodes.tokens.tolist())
                job.length.becomes([*own], nodes.parents.tolist())
        else:
            nodes = chain_nodes(job)
            declared = stacked(job.distributions)
        if not self._vocabulary.draws_target_ids:
            written = self._vocabulary.nodes(end.text, nodes)
            nodes = written.first(max_nodes)
        return Proposal(self._name, *nodes, distributions=declared)
