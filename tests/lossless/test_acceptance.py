"""Acceptance rules end to end on the demo models: greedy answers, and the distribution of sampled
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.models.load.bundled import demo_path
from draftline.models.text.tokenizer import load_tokenizer
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

PROMPT = "for name in names:\n    print(name)\nfor name in names:\n    print("
TOP_K, TEMPERATURE = 3, 1.3
NUM_TOKENS = 3
NUM_DRAWS = 1000
# A sound rule fails one test of these in ten thousand.
LEAST_P = 1e-4
DRAFTERS = {
    "model": (DrafterConfig(kind="model", model="demo-drafter", num_tokens=2),),
    "head": (DrafterConfig(kind="head", model="demo-griffin", tree="chain", num_tokens=2),),
    "head tree": (DrafterConfig(kind="head", model="demo-griffin", num_tokens=2),),
    "two models": (
        DrafterConfig(kind="model", model="demo-drafter", num_tokens=2),
        DrafterConfig(
            kind="model",
            name="other",
            model="demo-drafter-other-vocab",
            vocabulary="tli",
            num_tokens=2,
        ),
    ),
    "mixed": (
        DrafterConfig(kind="prompt_lookup"),
        DrafterConfig(kind="model", model="demo-drafter", num_tokens=3),
        DrafterConfig(kind="spectra"),
        DrafterConfig(kind="suffix"),
    ),
}


def engine(acceptance: str, drafters: Sequence[DrafterConfig], **settings: object) -> Engine:
    return Engine(
        EngineConfig(
            model="demo", acceptance=acceptance, drafters=drafters, max_num_seqs=64, **settings
        )
    )


@pytest.fixture(scope="module")
def distribution() -> dict[tuple[int, ...], float]:
    """The exact probability of every answer, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(demo_path("demo"), dtype=torch.float32).eval()
    prompt = load_tokenizer(demo_path("demo"))(PROMPT)["input_ids"]
    distributions: dict[tuple[int, ...], dict[int, float]] = {}

    def after(text: tuple[int, ...]) -> dict[int, float]:
        if text not in distributions:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1].double()
            best = torch.topk(logits / TEMPERATURE, TOP_K)
            probabilities = torch.softmax(best.values, dim=-1)
            distributions[text] = dict(
                zip(best.indices.tolist(), probabilities.tolist(), strict=True)
            )
        return distributions[text]

    answers: dict[tuple[int, ...], float] = {}
    for ranks in product(range(TOP_K), repeat=NUM_TOKENS):
        text: tuple[int, ...] = ()
        mass = 1.0
        for rank in ranks:
            token, probability = list(after(text).items())[rank]
            text, mass = (*text, token), mass * probability
        answers[text] = mass
    return answers


def p_value(outputs: Sequence[RequestOutput], distribution: dict[tuple[int, ...], float]) -> float:
    """p-value of a chi-square test; answers expected fewer than 5 times share one bin."""
    counts = Counter(output.token_ids for output in outputs)
    assert counts.keys() <= distribution.keys(), "a token was chosen that the filter excludes"
    expected = {text: mass * len(outputs) for text, mass in distribution.items()}
    large = [text for text, count in expected.items() if count >= 5]
    bins = [(counts[text], expected[text]) for text in large]
    bins.append((len(outputs) - sum(n for n, _ in bins), len(outputs) - sum(e for _, e in bins)))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in bins if wanted > 1e-9)
    return float(chi2.sf(statistic, len(large)))


def draw(acceptance: str, drafters: Sequence[DrafterConfig]) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS, temperature=TEMPERATURE, top_k=TOP_K, seed=seed, ignore_eos=True
        )
        for seed in range(NUM_DRAWS)
    ]
    with engine(acceptance, drafters, max_queued_requests=NUM_DRAWS) as found:
        return found.generate([PROMPT] * NUM_DRAWS, params)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mix",
    [
        pytest.param("model", marks=pytest.mark.full),
        pytest.param("head", marks=pytest.mark.full),
        "head tree",
        "mixed",
        "two models",
    ],
)
def test_answers_have_the_target_s_distribution(
    mix: str, distribution: dict[tuple[int, ...], float]
) -> None:
    outputs = draw("rejection", DRAFTERS[mix])
    assert p_value(outputs, distribution) > LEAST_P
    accepted = Counter[str]()
    for output in outputs:
        accepted.update(output.metrics.accepted_by_source)
    assert accepted["model"] + accepted["head"] > 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "model", ["demo-drafter", pytest.param("demo-griffin", marks=pytest.mark.full)]
)
def test_trees_of_draws_keep_the_target_s_distribution(
    model: str, distribution: dict[tuple[int, ...], float], tmp_path: Path
) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text('{"widths": [3, 2]}')
    kind = "head" if model == "demo-griffin" else "model"
    drafter = DrafterConfig(kind=kind, name="drawn", model=model, tree=str(tree))
    outputs = draw("rejection", (drafter,))
    assert p_value(outputs, distribution) > LEAST_P
    assert sum(output.metrics.accepted_by_source.get("drawn", 0) for output in outputs) > 50


@pytest.mark.timeout(300)
def test_typical_acceptance_has_another_distribution(
    distribution: dict[tuple[int, ...], float],
) -> None:
    """The negative control: the same test must see it."""
    assert p_value(draw("typical", DRAFTERS["model"]), distribution) < LEAST_P


@pytest.mark.timeout(300)
@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_greedy_answers_are_the_target_s_own(acceptance: str) -> None:
    """Typical acceptance, too: a distribution of one token has no entropy."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with engine(acceptance, DRAFTERS["mixed"]) as found:
        prompts = [PROMPT, "import os\n\n\ndef main(", "class Node:\n    def __init__(self"]
        plain = found.generate(prompts, params, RequestOptions(speculative=False))
        drafted = found.generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert max(one.metrics.acceptance_length for one in drafted) > 1.2


def test_a_seed_repeats_an_answer() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=4)
    with engine("rejection", DRAFTERS["model"], node_budget="full") as found:
        first, second = (found.generate([PROMPT], params)[0].token_ids for _ in range(2))
    assert first == second
    assert np.unique(first).size > 1
