"""What trained heads read of the target, of recorded answers: as stages would hand it out.

A row's states depend on its text alone, so those of rows that the text goes through are computed
once; drafters are never told those of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ....core.arrays import Float32
from ....core.steps import StepInput
from ....drafters.heads.drafter import feature_layers
from ....measure.replay.recording import RecordedAnswer
from ....models.load.checkpoint import resolve_head_path, resolve_model_path
from ....models.load.model_info import read_model_info
from ....training.heads.distilled_texts import DistilledText
from ....training.heads.target import Target


class TextFeatures:
    """The states of the layers that one head reads, float32 [tokens, width] of each answer."""

    def __init__(self, model: str, head: str, answers: Sequence[RecordedAnswer]) -> None:
        layers = feature_layers(resolve_head_path(head), read_model_info(model))
        target = Target(resolve_model_path(model), torch.device("cpu"), layers)
        self.width = 0
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._of: dict[int, Float32] = {}
        for answer in answers:
            text = DistilledText(answer.text_ids, len(answer.prompt_ids))
            [features] = target.batch([text], len(text.tokens)).features.numpy()
            self._of[answer.seed], self.width = features, features.shape[1]

    def of_step(self, step: StepInput, num_right: Mapping[int, int]) -> Float32:
        """float32 [rows, width]: of the step's `feature_requests`, as `StepOutput` has them.

        num_right: rows of the trees, by the place of a request, that the text goes through
        """
        found = [self._of_request(step, place, num_right) for place in step.feature_requests]
        return np.concatenate(found) if found else np.zeros((0, self.width), dtype=np.float32)

    def _of_request(self, step: StepInput, place: int, num_right: Mapping[int, int]) -> Float32:
        first, end = step.request_starts[place : place + 2].tolist()
        positions = step.positions[first:end]
        if step.trees[place] is None:
            return self._of_prompt(int(positions[0]), tuple(step.token_ids[first:end].tolist()))
        low, high = np.searchsorted(step.logits_rows, (first, end)).tolist()
        own = self._of[int(step.sampling.seed[low])]
        if place in step.slice_requests:
            chosen = step.positions[step.logits_rows[low:high]]
            return own[np.minimum(chosen, len(own) - 1)]
        return own[positions[0] : positions[0] + num_right[place]]

    def _of_prompt(self, start: int, tokens: tuple[int, ...]) -> Float32:
        """Of a prompt, which is read in one chunk: texts that begin alike have the same states."""
        assert start == 0, "a prompt is longer than a step"
        for seed, text in self._texts.items():
            if text[: len(tokens)] == tokens:
                return self._of[seed][: len(tokens)]
        raise AssertionError("a step reads a text that is no recorded answer's")
