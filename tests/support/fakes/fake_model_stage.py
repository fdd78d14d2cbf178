"""A drafter's model without a model: a distribution over the whole text that a row sees."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.steps import LogProbOutput, StepInput, StepOutput, TopTokens
from support.fakes.fake_target import FakeTarget


def distribution(text: list[int], seed: int, vocab_size: int) -> tuple[int, float]:
    """The token after `text`, and the log-probability that the model claims for it."""
    key = hashlib.blake2b(repr((text, seed)).encode(), digest_size=8).digest()
    token = int.from_bytes(key[:4], "little") % vocab_size
    return token, float(np.log((1 + key[4]) / 256))


def plain_chain(text: list[int], seed: int, vocab_size: int, num_tokens: int) -> list[int]:
    """The chain that the distribution draws below `text`."""
    drawn: list[int] = []
    for _ in range(num_tokens):
        drawn.append(distribution(text + drawn, seed, vocab_size)[0])
    return drawn


class FakeModelStage(FakeTarget):
    """Answers by the text that it reads through its KV cache, which `FakeTarget` checks."""

    # What the next rows tell, one after the other.
    entropies: list[float]

    def run(self, step: StepInput, hidden: None = None) -> StepOutput:
        assert hidden is None
        self.steps.append(step)
        output = self._run(step)
        rows = step.logits_rows.tolist()
        chosen = [
            distribution(self._visible(step, row), seed, self._vocab_size)
            for row, seed in zip(rows, step.sampling.seed.tolist(), strict=True)
        ]
        assert step.log_probs.of_targets
        log_probs = LogProbOutput(np.array([log_prob for _, log_prob in chosen], dtype=np.float32))
        if step.log_probs.with_entropies:
            assert len(rows) <= 1
            entropies = np.array([self.entropies.pop(0) for _ in rows])
            log_probs = replace(log_probs, entropies=entropies)
        if step.log_probs.num_top:
            log_probs = replace(log_probs, top=self._top(step, step.log_probs.num_top))
        return replace(
            output,
            target_tokens=np.array([token for token, _ in chosen], dtype=np.int32),
            log_probs=log_probs,
        )

    def _top(self, step: StepInput, num_top: int) -> TopTokens:
        """What may come next, whatever the seed: each half as probable as the one before."""
        ids = [self._top_ids(self._visible(step, row), num_top) for row in step.logits_rows]
        log_probs = np.log(0.5) * np.arange(1, num_top + 1, dtype=np.float32)
        return TopTokens(
            np.array(ids, dtype=np.int32).reshape(-1, num_top),
            np.tile(log_probs.astype(np.float32), (len(ids), 1)),
        )

    def _top_ids(self, text: list[int], top_k: int) -> Int32:
        first, _ = distribution(text, 0, self._vocab_size)
        return (first + np.arange(top_k, dtype=np.int32)) % self._vocab_size
