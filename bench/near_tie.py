"""Judges where two answers of one prompt part: a near-tie of the target's scores, or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..core.noise import gumbel
from ..core.sampling_params import SamplingParams

# float32 logits of two batch shapes differ by some 1e-5 here; two scores closer than this may swap.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two answers.

    gap  score of the expected token minus that of the other, by transformers' own logits: a
         logit at temperature 0, else log-probability over temperature plus the request's noise
    """

    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    temperature: float

    @property
    def is_near_tie(self) -> bool:
        """Whether float rounding explains the difference."""
        return abs(self.gap) < NEAR_TIE

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} token {self.position} temperature {self.temperature}: expected "
            f"{self.expected}, found {self.found}, gap {self.gap:.2e}"
        )


class Judge:
    """Reads the target's scores from a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def partings(
        self,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        found: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> list[Parting]:
        """First differences of all answers that differ."""
        return [
            self._parting(index, prompt, a, b, params)
            for index, (prompt, a, b) in enumerate(zip(prompts, expected, found, strict=True))
            if tuple(a) != tuple(b)
        ]

    def _parting(
        self,
        index: int,
        prompt: Sequence[int],
        expected: Sequence[int],
        found: Sequence[int],
        params: SamplingParams,
    ) -> Parting:
        assert len(expected) == len(found), "answers of the same length are compared"
        pairs = enumerate(zip(expected, found, strict=True))
        position, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        scores = self._scores([*prompt, *expected[:position]], params, [a, b])
        return Parting(index, position, a, b, float(scores[0] - scores[1]), params.temperature)

    @torch.inference_mode()
    def _scores(self, text: Sequence[int], params: SamplingParams, tokens: list[int]) -> np.ndarray:
        logits = self._model(input_ids=torch.tensor([list(text)])).logits[0, -1].double()
        chosen = logits[tokens].numpy()
        if params.temperature == 0:
            return chosen
        assert params.seed is not None
        seed, position = np.array([params.seed]), np.array([len(text)])
        return chosen / params.temperature + gumbel(seed, position, np.array(tokens))
