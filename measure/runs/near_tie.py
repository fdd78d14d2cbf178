"""Classifies the first difference of two answers: a near-tie of the target's scores, or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import plan_model
from ...cluster.engine.request_factory import RequestFactory
from ...core.request.request import RequestState, RequestStats
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...core.sampling import build_edits, edit_logits, gumbel, process_logits, sampling_rows
from ...core.tree.tree import NO_TREE
from ...models.layers.model_slice import load_whole_model
from ..clients.engine_endpoint import prompt_ids
from ..records import Record
from .matched import Explain

# float32 logits of two batch shapes differ by some 1e-5 here; two scores closer than this may swap.
NEAR_TIE = 1e-3
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two answers.

    gap  score of the expected token minus that of the other, from transformers' logits with the
         request's edits. At temperature 0 a score is a logit, else a log-probability over the
         temperature plus the request's noise; infinite if one answer only ends earlier
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
    """Computes the target's scores by a transformers model, with a request's sampling
    parameters."""

    def __init__(self, model: PreTrainedModel, factory: RequestFactory) -> None:
        self._model = model
        self._factory = factory

    def partings(
        self,
        prompts: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        found: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> list[Parting]:
        """The first difference of each pair of different answers; token ids by prompt."""
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
        pairs = enumerate(zip_longest(expected, found, fillvalue=NO_TOKEN))
        position, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        # An answer that ends earlier with the same tokens was cut at another place, which is no
        # tie.
        gap = float("inf")
        if NO_TOKEN not in (a, b):
            scores = self._scores(prompt, expected[:position], params)
            gap = float(scores[a] - scores[b])
        return Parting(index, position, a, b, gap, params.temperature)

    @torch.inference_mode()
    def _scores(
        self, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
    ) -> np.ndarray:
        """float64 [vocabulary]: the scores whose argmax is the token after `answer`."""
        text = torch.tensor([[*prompt, *answer]])
        logits = self._model(input_ids=text).logits[0, -1:].float().numpy()
        options = RequestOptions()
        request, stop = self._factory.build("judged", prompt, params, lambda _: None, options)
        state = RequestState(request, stop, RequestStats(arrival_time=0.0))
        state.append(answer)
        form = None
        if request.allowed_tokens is not None and request.allowed_tokens.constraint is not None:
            request.allowed_tokens.constraint.advance(answer)
            form = request.allowed_tokens.constraint.follow(NO_TREE).result().masks
        edits = build_edits(state, NO_TREE, 0, form)
        logits = edit_logits(logits, () if edits is None else (edits,))
        if params.temperature == 0:
            return logits[0].astype(np.float64)
        position = np.array([text.shape[1]])
        sampling = sampling_rows([params.temperature], [params], [request.seed], position)
        scaled = process_logits(logits[0], sampling, 0)
        noise = gumbel(np.array([request.seed]), position, np.arange(len(scaled)))
        return scaled.astype(np.float64) + noise


def explain_by_model(model: str, temperature: float, tokenizer: PreTrainedTokenizerBase) -> Explain:
    """A function that explains differences by `model` itself, run in transformers in float32.

    The model is loaded at the first difference.
    """

    @cache
    def judge() -> Judge:
        # SDPA does not support the soft cap of Gemma 2, which transformers 5.17 ignores.
        target = load_whole_model(model, attention="eager")
        return Judge(target, plan_model(EngineConfig(model=model)).request_factory())

    def explain(expected: Record, found: Record) -> tuple[str, bool]:
        assert expected.token_ids is not None
        assert found.token_ids is not None
        pairs = list(zip(expected.token_ids, found.token_ids, strict=False))
        if all(a == b for a, b in pairs):
            return "one answer ends before the other", True
        prompt = prompt_ids(tokenizer, expected.prompt_input)
        params = SamplingParams(temperature=temperature, seed=expected.seed)
        wanted, other = zip(*pairs, strict=True)
        [parting] = judge().partings([prompt], [wanted], [other], params)
        kind = "near-tie" if parting.is_near_tie else "NO NEAR-TIE"
        return f"{kind}: gap {parting.gap:.1e}", not parting.is_near_tie

    return explain
