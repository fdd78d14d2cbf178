"""What targets of any kind pass: drafts change no token, and transformers says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from support.tools.tiny_models import VOCAB_SIZE
from support.tools.transformers_peer import drawn, generated

KINDS = ("prompt_lookup", "suffix", "spectra", "lookahead", "token_recycling", "anpd")
DRAFTERS = tuple(DrafterConfig(kind=kind) for kind in KINDS)
PLAIN = RequestOptions(speculative=False)
RANDOM = np.random.default_rng(5)
# The long ones take several steps.
PROMPTS = [RANDOM.integers(2, VOCAB_SIZE, count).tolist() for count in (1, 9, 70, 43)]
SEED, NUM_TOKENS = 3, 24


def params(temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=SEED, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    given = {"drafters": DRAFTERS, "node_budget": "full", "max_num_batched_tokens": 32, **settings}
    return EngineConfig(model=str(folder), draft_deadline_ms=10_000, **given)


def engine_of(folder: Path, **settings: Any) -> Engine:
    return Engine(config_of(folder, **settings))


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for one in outputs]


def check_drafts(engine: Engine, temperature: float) -> list[list[int]]:
    """Answers with drafts are those without, which it returns."""
    plain = token_ids(engine.generate(PROMPTS, params(temperature), PLAIN))
    # The second time suffixes of the answers are known.
    outputs = [engine.generate(PROMPTS, params(temperature)) for _ in range(2)]
    assert [token_ids(own) for own in outputs] == [plain, plain]
    lengths = [n for one in outputs[-1] for n in one.metrics.accepted_lengths]
    assert np.mean(lengths) > 3
    return plain


def check_answers(engine: Engine, peer: Any) -> None:
    """Greedy and drawn answers, with drafts and without, are those of a model of transformers."""
    for temperature in (0.0, 0.8):
        plain = check_drafts(engine, temperature)
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            if temperature:
                assert drawn(peer, prompt, answer, temperature, SEED) == answer
            else:
                assert generated(peer, prompt, NUM_TOKENS) == answer


def check_pipelined_trees(folder: Path) -> None:
    """Trees go on from nodes in flight."""
    with engine_of(folder, pipeline_parallel_size=3, pipelined_trees="on") as engine:
        for prompt in PROMPTS[1:3]:
            for temperature in (0.0, 0.9):
                [plain] = engine.generate([prompt], params(temperature), PLAIN)
                for _ in range(2):
                    [drafted] = engine.generate([prompt], params(temperature))
                    assert drafted.token_ids == plain.token_ids
                assert np.mean(drafted.metrics.accepted_lengths) > 2


def check_preempted(folder: Path) -> None:
    """Preempted requests say what they say with room."""
    prompts = [*PROMPTS[1:], PROMPTS[2][::-1]]
    with engine_of(folder) as engine:
        wanted = token_ids(engine.generate(prompts, params(0.8), PLAIN))
    with engine_of(folder, kv_cache_tokens=144, max_num_seqs=3) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params(0.8))
            assert token_ids(outputs) == wanted
            assert sum(one.metrics.num_preemptions for one in outputs)


def check_long_prompt(folder: Path, peer: Any) -> None:
    """A prompt of 5,000 tokens comes in many chunks, and is found again."""
    prompt = RANDOM.integers(2, VOCAB_SIZE, 5000).tolist()
    with engine_of(folder, max_num_batched_tokens=512, pipeline_parallel_size=2) as engine:
        assert engine.max_model_len == 8192
        [plain] = engine.generate([prompt], params(0.0), PLAIN)
        assert list(plain.token_ids) == generated(peer, prompt, NUM_TOKENS)
        [drafted] = engine.generate([prompt], params(0.0))
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.cached_tokens == 4992
