"""Drafting one request's chain, and the batch step that feeds several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ...core.arrays import ROOT, Int32
from ...core.sampling import sampling_rows
from ...core.step.builder import block_tables, kv_slots
from ...core.steps import (
    LogitEdits,
    LogProbInput,
    SamplingRows,
    StepInput,
    StepOutput,
)
from .stopping_rules import ChainLength, Drawn
from .text_distribution import DraftDistribution, TextDistribution, draw
from .tree_job import TreeJob
from .vocabulary.strategy import DraftNodes, DraftVocabulary
from .vocabulary.target_noise import TargetNoise


@dataclass(slots=True)
class ChainJob:
    """One chain on its way: what is still to be fed, and what was drawn.

    pending            the drafter's own tokens to feed next, the first at position `position`
    blocks             KV blocks of the request, in order of positions
    limit              most tokens to draw
    vocabulary         what a draw is
    next_position      position of the first draw as its noise counts
    distribution       of the token after the text and what was drawn; grows with it
    length             says after each token whether the chain goes on
    distribution_size  tokens of the distributions that are drawn from by `rng` and declared; 0:
                       none is, and the request's own noise chooses
    tree               what is grown from the first draw's most probable tokens, in place of a chain
    target_noise       of other vocabularies: the noise of what draws become in the target's tokens
    drawn              tokens drawn; all but the last have been fed when nothing is pending but it
    fed                the same as the drafter's own tokens
    """

    pending: list[int]
    position: int
    blocks: Sequence[int]
    limit: int
    vocabulary: DraftVocabulary
    next_position: int
    distribution: TextDistribution
    length: ChainLength
    distribution_size: int = 0
    rng: np.random.Generator | None = None
    tree: TreeJob | None = None
    drawn: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    target_noise: TargetNoise | None = None
    stopped: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to draw."""
        return self.stopped or len(self.drawn) >= self.limit

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through all that was drawn; the first is anyway."""
        return math.exp(sum(self.log_probs)) if self.drawn else math.inf

    @property
    def num_top(self) -> int:
        """Number of most probable tokens to look at after the text."""
        if self.tree is not None:
            return self.tree.num_top
        return (
            self.distribution_size if self.target_noise is None else self.target_noise.num_looked_at
        )

    def feed(self, count: int) -> bool:
        """Note that `count` pending tokens were fed. Returns whether a token is drawn next."""
        del self.pending[:count]
        self.position += count
        return not self.pending

    def take(self, output: StepOutput, row: int) -> None:
        """Draw a token by a row of a pass."""
        log_probs, entropies = output.log_probs.of_targets, output.log_probs.entropies
        assert log_probs is not None, "the stage did not answer with log-probabilities"
        entropy = 0.0 if entropies is None else float(entropies[row])
        if self.distribution_size and self.tree is None:
            self.draw_declared(output, row, entropy)
        elif self.target_noise is not None and self.tree is None:
            self.draw_by_target_noise(self.target_noise, output, row, entropy)
        else:
            log_prob = min(float(log_probs[row]), 0.0)
            self.draw(int(output.target_tokens[row]), Drawn(log_prob, entropy))
        if self.tree is not None:
            self.tree.take(output, row)

    def draw(self, token: int, drawn: Drawn) -> None:
        """Append a token, to be fed next unless the chain ends with it."""
        own = self.vocabulary.fed(token)
        self.pending = [own]
        self.drawn.append(token)
        self.fed.append(own)
        self.log_probs.append(drawn.log_prob)
        self.stopped = self.length.ends_with(own, drawn)
        self.distribution.append([token])

    def draw_declared(self, output: StepOutput, row: int, entropy: float) -> None:
        """Draw a token from a distribution that is kept."""
        assert self.rng is not None
        token, log_prob, distribution = draw(
            output, row, self.distribution_size, self.distribution.temperature, self.rng
        )
        self.distributions.append(distribution)
        self.draw(token, Drawn(log_prob, entropy))

    def draw_by_target_noise(
        self, noise: TargetNoise, output: StepOutput, row: int, entropy: float
    ) -> None:
        """Draw the token whose text the target most likely chooses."""
        top = output.log_probs.top
        assert top is not None
        ids, log_probs = top.ids[row, : self.num_top], top.log_probs[row]
        [token], [log_prob] = noise.rank(self.drawn, ids, log_probs[: len(ids)], 1)
        self.draw(int(token), Drawn(float(log_prob), entropy))


def chain_nodes(job: ChainJob) -> DraftNodes:
    """The chain."""
    parents = range(ROOT, len(job.drawn) - 1)
    log_probs = np.array(job.log_probs, dtype=np.float32)
    return DraftNodes(_int32(job.drawn), _int32(parents), log_probs)


@dataclass(frozen=True, slots=True)
class ChainBatch:
    """Jobs with how many of their pending tokens go in one step."""

    jobs: tuple[ChainJob, ...]
    counts: tuple[int, ...]

    @property
    def drawing(self) -> list[int]:
        """Indices of the jobs that draw a token after this step."""
        pairs = zip(self.jobs, self.counts, strict=True)
        return [index for index, (job, count) in enumerate(pairs) if count == len(job.pending)]


def next_batch(jobs: Sequence[ChainJob], max_rows: int) -> ChainBatch:
    """A batch of as many jobs as fit in a step, long prompts in chunks.

    Jobs with few tokens to feed come first.
    """
    chosen: list[ChainJob] = []
    counts: list[int] = []
    room = max_rows
    for job in sorted(jobs, key=lambda job: len(job.pending)):
        if room == 0:
            break
        count = min(room, len(job.pending))
        chosen.append(job)
        counts.append(count)
        room -= count
    return ChainBatch(tuple(chosen), tuple(counts))


def build_step(batch: ChainBatch, block_size: int, *, with_entropies: bool = False) -> StepInput:
    """The step that feeds a batch."""
    jobs, counts = batch.jobs, batch.counts
    starts = [0, *accumulate(counts)]
    positions = np.concatenate(
        [np.arange(job.position, job.position + n) for job, n in zip(jobs, counts, strict=True)]
    ).astype(np.int32)
    tables = block_tables([job.blocks for job in jobs])
    owners = np.arange(len(jobs), dtype=np.int32).repeat(counts)
    drawing = [jobs[index] for index in batch.drawing]
    rows = _int32([starts[index + 1] - 1 for index in batch.drawing])
    tokens = [token for job, n in zip(jobs, counts, strict=True) for token in job.pending[:n]]
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=_int32(tokens),
        positions=positions,
        slots=kv_slots(tables, owners, positions, block_size),
        request_starts=_int32(starts),
        context_lens=_int32([job.position for job in jobs]),
        block_tables=tables,
        trees=(None,) * len(jobs),
        logits_rows=rows,
        sampling=_sampling(drawing),
        edits=_edits(drawing),
        log_probs=LogProbInput(
            of_targets=True,
            num_top=max((job.num_top for job in drawing), default=0),
            with_entropies=with_entropies,
        ),
    )


def _sampling(jobs: Sequence[ChainJob]) -> SamplingRows:
    """Sampling parameters of each request, its noise included: where logits agree, drafts do."""
    distributions = [job.distribution for job in jobs]
    return sampling_rows(
        [distribution.temperature for distribution in distributions],
        [distribution.logits_params for distribution in distributions],
        [distribution.seed for distribution in distributions],
        np.array([job.next_position + len(job.drawn) for job in jobs], dtype=np.int64),
    )


def _edits(jobs: Sequence[ChainJob]) -> tuple[LogitEdits, ...]:
    every = [job.distribution.edits(row) for row, job in enumerate(jobs)]
    return tuple(edits for edits in every if edits is not None)


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, dtype=np.int32)
