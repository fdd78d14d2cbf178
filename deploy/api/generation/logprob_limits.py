"""How many log-probabilities one request may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.request.sampling_params import SamplingParams
from ...settings.limits import RequestLimits


def check_logprobs(
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    num_choices: int,
    context_len: int,
    limits: RequestLimits,
) -> None:
    """Raise `RequestError` where prompts or answers would have more than the limits allow.

    `num_choices`: answers to each prompt.
    """
    if params.prompt_logprobs is not None:
        num_tokens = num_choices * sum(map(len, prompts))
        limits.require(
            "max_logprob_entries",
            num_tokens * (1 + params.prompt_logprobs),
            "prompt_logprobs",
            "log-probabilities of prompts (tokens of all prompts, times n, times 1 + their number)",
        )
    if params.logprobs is not None:
        most = context_len if params.max_tokens is None else params.max_tokens
        limits.require(
            "max_answer_logprobs",
            num_choices * len(prompts) * most * (1 + params.logprobs),
            "logprobs",
            "log-probabilities of answers (max_tokens of all answers, times 1 + their number)",
        )
