"""Drafts behind trees that the target computes still, of all requests in one pass a level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.proposals import AheadQuery, Commit, Proposal, empty_proposal
from ....core.steps import StepInput, StepOutput
from ..cached_text import CachedText
from ..options import Expansions, ModelOptions
from ..prefix_cache import PrefixCache
from ..stopping.rules import SVIP
from ..tree_job import TreeJob
from ..tree_step import build_tree_step
from ..vocabulary.strategy import DraftVocabulary
from .agreement import Agreement
from .ahead_job import AheadJob
from .branches import ChainBranch, Growing

# Candidates after a node that are looked at, however few outcomes are wanted.
LEAST_CANDIDATES = 32


class DraftsAhead:
    """Reads a tree, names the likeliest outcomes of its verification, and drafts behind each what
    the model would draft behind it if it were known.

    run              a pass of the model
    max_context_len  tokens that it may see
    expansions       of trees, by their most levels and nodes; None: chains

    Requests whose logits are edited (penalties, biases, token lists) are left out, as are texts of
    which the cache lacks more than a pass has room for.
    """

    def __init__(
        self,
        options: ModelOptions,
        vocabulary: DraftVocabulary,
        cache: PrefixCache,
        *,
        max_context_len: int,
        expansions: Expansions | None,
        run: Callable[[StepInput], StepOutput],
    ) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._cache = cache
        self._max_context_len = max_context_len
        self._run = run
        self._expansions = expansions
        self._num_requests = 0
        self._agreement = Agreement()

    def propose(
        self,
        source: str,
        asked: Sequence[tuple[AheadQuery, CachedText]],
        is_over: Callable[[], bool],
    ) -> list[Proposal]:
        """One forest of paths and drafts a query; empty where there is none."""
        self._num_requests = len(asked)
        # To begin costs the cache what stands behind the texts.
        jobs = [] if is_over() else self._begin(asked)
        active = list(jobs)
        while active:
            share = self._options.prefill_chunk // len(active)
            active = [job for job in active if job.prepare(share)]
            if active:
                self._pass(active)
            if is_over():
                break
        for job in jobs:
            self._end(job)
        found = {job.query.request_id: job.proposal(source) for job in jobs}
        return [found.get(query.request_id) or empty_proposal(source) for query, _ in asked]

    def observe(self, commit: Commit) -> None:
        """Learn from what the target said to a tree that was gone behind."""
        self._agreement.said(commit)

    def forget(self, request_id: str) -> None:
        """A request has ended; an unknown id is ignored."""
        self._agreement.forget(request_id)

    def _begin(self, asked: Sequence[tuple[AheadQuery, CachedText]]) -> list[AheadJob]:
        """Those whose trees fit in one pass together, with room in the cache for their drafts."""
        jobs: list[AheadJob] = []
        room = self._options.prefill_chunk
        for query, state in asked:
            text_len = len(state.tokens)
            num_rows = max(1, text_len - state.cached_len) + len(query.tokens)
            num_fed = len(query.tokens) + self._most_fed(query)
            is_short = text_len + len(query.tokens) < self._max_context_len
            if (
                num_rows <= room
                and is_short
                and state.distribution.is_plain
                and state.may_follow(query.tokens.tolist())
                and self._cache.has_room(state, num_fed)
            ):
                self._cache.reserve(state, num_fed)
                jobs.append(self._job(query, state))
                room -= num_rows
        return jobs

    def _job(self, query: AheadQuery, state: CachedText) -> AheadJob:
        most = self._options.ahead_outcomes
        num_candidates = min(max(LEAST_CANDIDATES, 2 * most), self._vocabulary.size)
        return AheadJob(
            query, state, self._branches,
            num_candidates=num_candidates, num_outcomes=most, agreement=self._agreement,
        )  # fmt: skip

    def _most_fed(self, query: AheadQuery) -> int:
        """Rows of all drafts together, those of the outcomes' own tokens included."""
        most = min(self._options.num_tokens, query.max_nodes)
        each = most
        if self._expansions is not None:
            each = 1 + self._expansions(most, query.max_nodes).most_fed
        return self._options.ahead_outcomes * each

    def _branches(
        self, state: CachedText, query: AheadQuery, paths: Sequence[tuple[int, ...]]
    ) -> list[Growing]:
        """A draft behind each path, as long as those behind committed tokens are."""
        most = min(self._options.num_tokens, query.max_nodes)
        left = [self._max_context_len - len(state.tokens) - len(path) for path in paths]
        most, chains = state.length.begin_ahead(most, self._num_requests, paths)
        limits = [min(most, own) for own in left]
        if self._expansions is None:
            first_foreign = self._vocabulary.first_foreign
            return [
                ChainBranch(limit, state.length, chain, first_foreign)
                for limit, chain in zip(limits, chains, strict=True)
            ]
        return [
            TreeJob(
                self._expansions(limit, query.max_nodes), 0, state.next_position + len(path),
                state.blocks, state.distribution, self._vocabulary,
            )
            for limit, path in zip(limits, paths, strict=True)
        ]  # fmt: skip

    def _pass(self, jobs: Sequence[AheadJob]) -> None:
        with_entropies = self._options.stop == SVIP
        parts = [job.part(self._options.block_size) for job in jobs]
        num_top = max(job.num_top for job in jobs)
        step = build_tree_step(parts, num_top, with_entropies=with_entropies)
        output, row = self._run(step), 0
        for job in jobs:
            row += job.take(output, row)

    def _end(self, job: AheadJob) -> None:
        """Keep the cache of the text and of the tree's first path; the rest was for this alone."""
        state = job.state
        if job.has_read:
            state.keep_ahead(job.first_path())
            self._cache.register(state)
        self._cache.trim(state, max(self._options.num_tokens, len(job.first_path())))
