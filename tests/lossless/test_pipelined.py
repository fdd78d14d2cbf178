"""Trees in slices on real stages: several steps of one request in flight change no token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.core.step.heads import HeadOrders, HeadResults
from draftline.deploy.cli.demo.prompts import held_out_prompts

NUM_TOKENS = 40
PROMPTS = [prompt.text for prompt in held_out_prompts()[:3]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "sampled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=3),
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1
    ),
    "bias": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.7, seed=5, presence_penalty=0.5, top_k=40,
        logit_bias={7: 3.0, 9: -2.0}, banned_token_ids=(3, 4),
    ),
    "words": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.6, seed=6, min_tokens=30, bad_words=("self", "return")
    ),
    "stop": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, stop=("\n\n", "def")),
    "logprobs": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2),
}  # fmt: skip
DRAFTERS = (
    DrafterConfig(kind="suffix"),
    DrafterConfig(kind="prompt_lookup"),
    DrafterConfig(kind="spectra"),
    DrafterConfig(kind="token_recycling"),
    DrafterConfig(kind="model", model="demo-drafter"),
)


def config(drafters: Sequence[DrafterConfig] = DRAFTERS) -> EngineConfig:
    return EngineConfig(
        model="demo", drafters=drafters, node_budget="full", draft_deadline_ms=10_000,
        pipeline_parallel_size=3, pipelined_trees="on",
    )  # fmt: skip


def answers(engine: Engine, params: SamplingParams, **options: object) -> list[RequestOutput]:
    """One after the other, so that each has the stages for itself."""
    return [
        engine.generate([prompt], params, RequestOptions(**options))[0]  # pyright: ignore[reportArgumentType]
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(config()) as engine:
        yield engine


@pytest.mark.parametrize("name", PARAMS)
def test_no_parameter_makes_slices_change_a_token(engine: Engine, name: str) -> None:
    params = PARAMS[name]
    plain = answers(engine, params, speculative=False)
    before = engine.stats().tree_chunks.chunks
    streamed = answers(engine, params)
    assert engine.stats().tree_chunks.chunks > before
    for one, other in zip(streamed, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason == other.finish_reason
        if params.logprobs is not None:
            pairs = zip(one.log_probs, other.log_probs, strict=True)
            for mine, theirs in pairs:
                assert mine.token_id == theirs.token_id
                assert mine.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
                assert mine.top_ids == theirs.top_ids
    assert sum(one.metrics.num_accepted_tokens for one in streamed) > 0


def test_heads_of_a_process_of_their_own_draft_for_slices() -> None:
    head = DrafterConfig(kind="head", model="demo-griffin", placement="actor")
    for params in (PARAMS["greedy"], PARAMS["sampled"]):
        with Engine(config((head,))) as engine:
            plain = answers(engine, params, speculative=False)
            streamed = answers(engine, params)
            assert engine.stats().tree_chunks.chunks > 20
        assert [one.token_ids for one in streamed] == [one.token_ids for one in plain]
        assert sum(one.metrics.num_accepted_tokens for one in streamed) > 20


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_behind_slices_heads_say_what_they_say_behind_whole_trees(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the text went by in slices, they have read it in its place."""
    # Rounding to 8 bits makes much of a last bit, as rows that are read together may change it.
    monkeypatch.setattr("draftline.models.heads.cpu_kernels.are_loaded", lambda: False)
    drafters = (DrafterConfig(kind="head", model="demo-griffin"), DrafterConfig(kind="suffix"))
    rounds, slices = (
        drafts_of(config(drafters).model_copy(update={"pipelined_trees": mode}), PARAMS[name])
        for mode in ("off", "on")
    )
    both = rounds.keys() & slices.keys()
    assert len(both) > 10
    assert [rounds[one] for one in both] == [slices[one] for one in both]


def drafts_of(
    config: EngineConfig, params: SamplingParams
) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """What heads drafted, by the request's number and the length of its text."""
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    numbers: dict[str, int] = {}
    note = HeadOrders.note

    def noted(self: HeadOrders, results: HeadResults) -> None:
        for one in results.drafted:
            for request_id, length, proposal in one.proposals:
                number = numbers.setdefault(request_id, len(numbers))
                found[number, length] = proposal.tokens.tolist(), proposal.parents.tolist()
        note(self, results)

    with patch.object(HeadOrders, "note", noted), Engine(config) as engine:
        answers(engine, params)
    return found


@pytest.mark.parametrize("node_budget", ["full", "adaptive"])
def test_heads_of_the_last_stage_draft_behind_slices(node_budget: str) -> None:
    """What a slice leaves a streamed tree with is followed by their drafts."""
    head = DrafterConfig(kind="head", model="demo-griffin")
    drafters = (head, DrafterConfig(kind="suffix"))
    changes = {"node_budget": node_budget}
    with Engine(config(drafters).model_copy(update=changes)) as engine:
        for params in (PARAMS["greedy"], PARAMS["sampled"]):
            plain = answers(engine, params, speculative=False)
            before = engine.stats().tree_chunks.chunks
            mixed = answers(engine, params)
            assert engine.stats().tree_chunks.chunks > before
            # The suffix drafter knows the answers by now.
            streamed = answers(engine, params, drafters=("suffix",))
            for one in (streamed, mixed):
                assert [own.token_ids for own in one] == [own.token_ids for own in plain]
            if node_budget == "full":
                by_head = [one.metrics.accepted_by_source.get(head.source, 0) for one in mixed]
                assert sum(by_head) > 10
