"""Steps that a real engine sends to its stages: prompts, trees, sampling of several kinds."""

from __future__ import annotations

from collections.abc import Awaitable

import numpy as np

from ...core.errors import DraftlineError
from ...core.request.output import Delta
from ...core.request.request import Request
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import SilentStream, StopRule
from ...core.step.builder import load_kernels
from ...core.steps import StepInput, StepOutput
from ..step.host_work import Bench, Load

NUM_TOKENS = 10
KINDS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=20, top_p=0.9, seed=1),
    SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, logit_bias={3: 2.0, 5: -1.0}, seed=2,
    ),
    SamplingParams(max_tokens=NUM_TOKENS, banned_token_ids=(7,), min_tokens=3, seed=3),
)  # fmt: skip


async def recorded_steps() -> list[StepInput]:
    """All steps of five requests: two greedy ones beside the first of other kinds."""
    load_kernels()
    bench = Bench(Load(requests=2, nodes=6), NUM_TOKENS)
    steps: list[StepInput] = []
    submit = bench.pipeline.submit

    def record(step: StepInput) -> Awaitable[StepOutput]:
        steps.append(step)
        return submit(step)

    bench.pipeline.submit = record
    for number, params in enumerate(KINDS):
        prompt = np.arange(100 * number, 100 * number + 20, dtype=np.int32)
        request = Request(f"shaped-{number}", prompt, params, params.seed or 0, NUM_TOKENS, _ignore)
        bench.core.add(request, StopRule(params, (), NUM_TOKENS, SilentStream()))
        while bench.core.has_work:
            await bench.core.step()
    return steps


def _ignore(_event: Delta | DraftlineError) -> None:
    """What is answered does not matter."""
