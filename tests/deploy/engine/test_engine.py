"""`draftline.Engine` over a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import StructuredOutput
from draftline.core.request.sampling_params import RequestOptions
from transformers import AutoModelForCausalLM, PreTrainedModel

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(checkpoint),
        max_model_len=128,
        kv_cache_tokens=512,
        drafters=(DrafterConfig(kind="spectra"), DrafterConfig(kind="prompt_lookup")),
        # Whatever the machine does meanwhile, there are drafts.
        node_budget="full",
    )
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def peer(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


def test_log_probabilities_are_those_of_transformers(engine: Engine, peer: PreTrainedModel) -> None:
    """Whatever the request does to the distribution that it chooses by."""
    params = replace(
        PARAMS, logprobs=3, prompt_logprobs=2, banned_token_ids=(7,), temperature=0.9, seed=3
    )
    (out,) = engine.generate(["abcabcab"], params)
    text = torch.tensor([[*out.prompt_token_ids, *out.token_ids]])
    with torch.inference_mode():
        distribution = peer(input_ids=text).logits[0].log_softmax(dim=-1)
    assert out.prompt_log_probs is not None
    found = [*out.prompt_log_probs, *out.log_probs]
    assert found[0] is None
    assert len(found) == text.shape[1]
    for position, token in enumerate(found[1:], start=1):
        assert token is not None
        assert token.token_id == text[0, position]
        assert token.log_prob == pytest.approx(
            float(distribution[position - 1, token.token_id]), abs=1e-4
        )
        count = 2 if position < len(out.prompt_token_ids) else 3
        best = distribution[position - 1].topk(count)
        assert token.top_log_probs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_repetition_penalty_is_that_of_transformers(engine: Engine, peer: PreTrainedModel) -> None:
    (out,) = engine.generate(["abcabcabcabc"], replace(PARAMS, repetition_penalty=1.2))
    expected = peer.generate(
        torch.tensor([out.prompt_token_ids]),
        do_sample=False,
        max_new_tokens=PARAMS.max_tokens,
        repetition_penalty=1.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [*out.prompt_token_ids, *out.token_ids] == expected[0].tolist()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": {256: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (256,)}, "allowed_token_ids"),
        ({"banned_token_ids": (-1,)}, "banned_token_ids"),
        ({"banned_token_ids": tuple(range(256))}, "banned_token_ids"),
        ({"allowed_token_ids": (1,), "banned_token_ids": (1, 2)}, "banned_token_ids"),
        (
            {"structured_output": StructuredOutput(kind="json_object"), "ignore_eos": False},
            "structured_outputs",
        ),
    ],
)
def test_parameters_that_this_model_cannot_follow(
    engine: Engine, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError, match=field):
        engine.generate(["abc"], replace(PARAMS, **changes))


def test_a_text_is_no_list_of_prompts(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"prompts.*\[prompt\]"):
        engine.generate("def f(x):")


def test_each_prompt_may_have_parameters_of_its_own(engine: Engine) -> None:
    own = [replace(PARAMS, max_tokens=count) for count in (3, 5)]
    together = engine.generate(["abc", "abc"], own)
    assert [len(one.token_ids) for one in together] == [3, 5]
    assert [one.token_ids for one in together] == [
        engine.generate(["abc"], one)[0].token_ids for one in own
    ]
    with pytest.raises(RequestError, match=r"params: must be one .* for each of 1, not 2"):
        engine.generate(["abc"], own)


def test_unknown_drafter_of_a_request(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"speculative.drafters.*'spectre'.*prompt_lookup"):
        engine.generate(["abc"], PARAMS, RequestOptions(drafters=("spectre",)))


def test_totals_of_the_engine(engine: Engine) -> None:
    before = engine.stats()
    prompts = [[1, 2, 3, 1, 2, 3] * 8, [1, 2, 3, 1, 2, 3] * 8]
    outputs = [engine.generate([prompt], PARAMS)[0] for prompt in prompts]
    after = engine.stats()
    assert after.num_prefix_queries - before.num_prefix_queries == 2 * 48
    cached = [output.metrics.cached_tokens for output in outputs]
    assert cached[1] > 0
    assert after.num_prefix_hits - before.num_prefix_hits == sum(cached)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    wasted = sum(after.wasted_by_source.values()) - sum(before.wasted_by_source.values())
    assert wasted == drafted - accepted
    for output in outputs:
        metrics = output.metrics
        times = (metrics.arrival_time, metrics.start_time, metrics.first_token_time)
        assert list(times) == sorted(times)
        assert metrics.start_time > 0


def test_a_request_chooses_its_drafters(engine: Engine) -> None:
    prompt = ["abcabcabcabcabc"]
    (plain,) = engine.generate(prompt, PARAMS, RequestOptions(speculative=False))
    (one,) = engine.generate(prompt, PARAMS, RequestOptions(drafters=("prompt_lookup",)))
    assert one.token_ids == plain.token_ids
    assert set(one.metrics.drafted_by_source) <= {"prompt_lookup"}


LETTERS = "abcdefgh"


def letters_of(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(LETTERS))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_of_several_tokens_never_come(engine: Engine, temperature: float) -> None:
    params = replace(
        PARAMS, allowed_token_ids=letters_of(engine), temperature=temperature, seed=3, max_tokens=40
    )
    (free,) = engine.generate(["xyz"], params)
    words = (free.text[3:5], free.text[10:13])
    (drafted,) = engine.generate(["xyz"], replace(params, bad_words=words))
    plain = RequestOptions(speculative=False)
    (undrafted,) = engine.generate(["xyz"], replace(params, bad_words=words), plain)
    assert not any(word in drafted.text for word in words)
    assert drafted.token_ids == undrafted.token_ids != free.token_ids
    assert drafted.metrics.num_draft_tokens > 0


def test_bad_words_are_those_of_transformers(engine: Engine, peer: PreTrainedModel) -> None:
    allowed = letters_of(engine)
    params = replace(PARAMS, allowed_token_ids=allowed, max_tokens=24)
    (free,) = engine.generate(["xyz"], params)
    words = (free.text[2:4], free.text[7:10], free.text[0])
    (out,) = engine.generate(["xyz"], replace(params, bad_words=words))
    others = [[token] for token in range(256) if token not in allowed]
    expected = peer.generate(
        torch.tensor([out.prompt_token_ids]),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        bad_words_ids=others + [engine.tokenizer.encode(word) for word in words],
        eos_token_id=None,
        pad_token_id=0,
    )
    assert [*out.prompt_token_ids, *out.token_ids] == expected[0].tolist()


def test_no_tokens_are_generated_where_only_the_prompt_is_scored(engine: Engine) -> None:
    params = replace(PARAMS, prompt_logprobs=1)
    (scored,) = engine.generate(["abcabc"], params)
    (only,) = engine.generate(["abcabc"], replace(params, max_tokens=0))
    assert (only.token_ids, only.text, only.finish_reason) == ((), "", "length")
    assert only.prompt_log_probs == scored.prompt_log_probs
    assert only.metrics.generated_tokens == 0
    full = [[1] * engine.max_model_len]
    assert len(engine.generate(full, replace(params, max_tokens=0))[0].prompt_token_ids) == 128
    with pytest.raises(RequestError, match="prompt"):
        engine.generate(full, params)
