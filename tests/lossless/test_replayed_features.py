"""Heads that lack states of a text, and have them computed again (`replay_features`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.errors import ConfigError
from draftline.core.proposals import Proposal, Query
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.core.schedule.scheduler import Scheduler
from draftline.core.step.prompt_chunk import PromptChunk
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts
from draftline.drafters.heads.drafter import HeadDrafter

PLAIN = RequestOptions(speculative=False)
PROMPTS = [prompt.text for prompt in held_out_prompts()[:3]]
# Requests lose their KV, and their prompts are computed again in pieces.
LITTLE_KV = {"kv_cache_tokens": 512, "max_num_batched_tokens": 48, "max_num_seqs": 3}
# By text: the tokens that a head drafted behind it, and their log-probabilities.
Drafts = dict[tuple[int, ...], tuple[list[int], np.ndarray]]


def head(**options: Any) -> DrafterConfig:
    return DrafterConfig(kind="head", model="demo-griffin", placement="actor", **options)


def engine_of(*drafters: DrafterConfig, **settings: Any) -> Engine:
    """It asks in every step, and computes again whatever lacks at once."""
    config = EngineConfig(
        model="demo",
        drafters=drafters,
        node_budget="full",
        prefill_share=1.0,
        # However busy the machine is.
        draft_deadline_ms=60_000,
        step_timeout_s=600,
        **settings,
    )
    return Engine(config)


def answers(engine: Engine, temperature: float = 0.0, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    return engine.generate(PROMPTS, params, **options)


def token_ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@contextmanager
def drafts_noted(monkeypatch: pytest.MonkeyPatch, num_failures: int = 0) -> Iterator[Drafts]:
    """All that heads draft; the first few times after 4 messages they raise instead."""
    drafts: Drafts = {}
    propose, calls = HeadDrafter.propose, []

    def noting(
        self: HeadDrafter, queries: Sequence[Query], deadline: float | None = None
    ) -> list[Proposal]:
        calls.append(1)
        if 4 < len(calls) <= 4 + num_failures:
            raise ValueError("it forgets all texts")
        proposals = propose(self, queries, deadline)
        for query, proposal in zip(queries, proposals, strict=True):
            text = tuple(self._requests.of_query(query).tokens)
            drafts[text] = proposal.tokens.tolist(), proposal.log_probs
        return proposals

    with monkeypatch.context() as patched:
        patched.setattr(HeadDrafter, "propose", noting)
        yield drafts


def share_alike(some: Drafts, others: Drafts) -> float:
    """Of the texts that both drafted behind: answers are the same, the steps to them are not."""
    common = [text for text in some if text in others and some[text][0] and others[text][0]]
    assert len(common) > 10
    same = [
        some[text][0] == others[text][0] and np.allclose(some[text][1], others[text][1], atol=1e-3)
        for text in common
    ]
    return float(np.mean(same))


@pytest.mark.parametrize("replays", [True, False])
def test_drafts_behind_a_shared_prefix_are_those_without_one(
    monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    with engine_of(head(replay_features=replays)) as engine:
        with drafts_noted(monkeypatch) as first:
            plain = answers(engine)
        with drafts_noted(monkeypatch) as again:
            hit = answers(engine)
    assert token_ids(hit) == token_ids(plain)
    assert min(output.metrics.cached_tokens for output in hit) > 0
    share = share_alike(again, first)
    # But for the first step of each text, in which the prefix is computed again.
    assert share > 0.8 if replays else share < 0.5


@pytest.mark.parametrize("replays", [True, False])
def test_drafts_of_a_head_that_was_started_anew_are_those_of_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    drafted: list[Drafts] = []
    for num_failures in (0, 1):
        with (
            engine_of(head(replay_features=replays), enable_prefix_caching=False) as engine,
            drafts_noted(monkeypatch, num_failures) as drafts,
        ):
            drafted_answers = answers(engine)
        with engine_of() as engine:
            assert token_ids(drafted_answers) == token_ids(answers(engine, options=PLAIN))
        drafted.append(drafts)
    behind = {text: own for text, own in drafted[1].items() if is_late(text, drafted[1])}
    share = share_alike(behind, drafted[0])
    assert share > 0.8 if replays else share < 0.5


def is_late(text: tuple[int, ...], drafts: Drafts) -> bool:
    """Whether a text is one of the second half of its answer."""
    longest = max(len(own) for own in drafts if own[:8] == text[:8])
    return len(text) > longest - 30


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (1, {}),
        (3, LITTLE_KV),
        pytest.param(1, LITTLE_KV, marks=pytest.mark.full),
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(2, LITTLE_KV, marks=pytest.mark.full),
        pytest.param(3, {}, marks=pytest.mark.full),
    ],
)
def test_no_token_is_changed(
    monkeypatch: pytest.MonkeyPatch, stages: int, settings: dict[str, Any]
) -> None:
    """Also where requests lose their KV, and beside a head of the last stage."""
    num_rows = 0
    replays_of = Scheduler.replays

    def counting(self: Scheduler, *args: Any) -> list[PromptChunk]:
        nonlocal num_rows
        chunks = replays_of(self, *args)
        num_rows += sum(chunk.num_rows for chunk in chunks)
        return chunks

    monkeypatch.setattr(Scheduler, "replays", counting)
    drafters = (
        head(replay_features=True),
        DrafterConfig(kind="head", name="near", model="demo-griffin", tree="chain"),
    )
    with engine_of(*drafters, pipeline_parallel_size=stages, **settings) as engine:
        for temperature in (0.0, 0.8):
            plain = answers(engine, temperature, options=PLAIN)
            for _ in range(2):
                assert token_ids(answers(engine, temperature)) == token_ids(plain)
    assert num_rows > 0


@pytest.mark.parametrize(
    "options",
    [{"replay_features": "yes", "placement": "actor"}, {"replay_features": True}],
)
def test_wrong_settings_name_the_field(options: dict[str, Any]) -> None:
    drafter = DrafterConfig(kind="head", model="demo-griffin", **options)
    with pytest.raises(ConfigError) as caught:
        Engine(EngineConfig(model="demo", drafters=(drafter,)))
    assert caught.value.field == "drafters[0].replay_features"
