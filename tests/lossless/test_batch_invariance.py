"""An answer's log-probabilities are the same, bit by bit, alone and beside 31 others."""

from __future__ import annotations

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput

pytestmark = pytest.mark.compiler

PROMPT = list(range(5, 60))
OTHERS = [list(range(7, 20 + 9 * number)) for number in range(31)]


def figures(output: RequestOutput) -> list[tuple[int, float, tuple[float, ...]]]:
    """Token, log-probability and those of the most probable ones, all along the answer."""
    assert output.log_probs
    return [
        (token, told.log_prob, told.top_log_probs)
        for token, told in zip(output.token_ids, output.log_probs, strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_alone_and_in_company(temperature: float) -> None:
    params = SamplingParams(
        max_tokens=40, temperature=temperature, seed=11, logprobs=3, ignore_eos=True
    )
    config = EngineConfig(
        device="cpu",
        batch_invariant="on",
        max_num_seqs=32,
        enable_prefix_caching=False,
        drafters=(DrafterConfig(kind="prompt_lookup"), DrafterConfig(kind="suffix")),
    )
    with Engine(config) as engine:
        [alone] = engine.generate([PROMPT], params)
        among = engine.generate([*OTHERS[:13], PROMPT, *OTHERS[13:]], params)[13]
    plain_config = EngineConfig(
        device="cpu", batch_invariant="on", tree_nodes=0, max_num_batched_tokens=16
    )
    with Engine(plain_config) as engine:
        [plain] = engine.generate([PROMPT], params)
    assert figures(among) == figures(alone) == figures(plain)
    assert len(set(alone.token_ids)) > 3
    assert np.isfinite([told for _, told, _ in figures(alone)]).all()
