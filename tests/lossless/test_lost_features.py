"""Heads of another process that lack states of a text draft from what they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.proposals import Proposal, Query
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.drafters.heads.drafter import HeadDrafter

PLAIN = RequestOptions(speculative=False)
PROMPTS = [prompt.text for prompt in held_out_prompts()[:3]]
# Requests lose their KV, and their prompts are computed again in pieces.
LITTLE_KV = {"kv_cache_tokens": 512, "max_num_batched_tokens": 48, "max_num_seqs": 3}
# By text: the tokens that a head drafted behind it, and their log-probabilities.
Drafts = dict[tuple[int, ...], tuple[list[int], np.ndarray]]


HEAD = DrafterConfig(kind="head", model="demo-griffin", placement="actor")


def engine_of(*drafters: DrafterConfig, **settings: Any) -> Engine:
    """It asks in every step."""
    config = EngineConfig(
        model="demo",
        drafters=drafters,
        node_budget="full",
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


def test_a_shared_prefix_has_no_states_and_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(HEAD) as engine:
        with drafts_noted(monkeypatch) as first:
            plain = answers(engine)
        with drafts_noted(monkeypatch) as again:
            hit = answers(engine)
    assert token_ids(hit) == token_ids(plain)
    assert min(output.metrics.cached_tokens for output in hit) > 0
    # It drafts, behind states of the answer alone.
    assert share_alike(again, first) < 0.5


def test_a_head_that_was_started_anew_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the states that come, and for requests that are new as if it had lost none."""
    drafted: list[Drafts] = []
    for num_failures in (0, 1):
        with engine_of(HEAD, enable_prefix_caching=False) as engine:
            with drafts_noted(monkeypatch, num_failures) as drafts:
                outputs = answers(engine)
            with drafts_noted(monkeypatch) as later:
                again = answers(engine)
        with engine_of() as engine:
            plain = token_ids(answers(engine, options=PLAIN))
        assert token_ids(outputs) == token_ids(again) == plain
        drafted.append(later)
        if num_failures:
            late = [own for text, own in drafts.items() if is_late(text, drafts)]
            assert np.mean([len(tokens) > 0 for tokens, _ in late]) > 0.8
    assert share_alike(drafted[1], drafted[0]) > 0.8


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
def test_no_token_is_changed(stages: int, settings: dict[str, Any]) -> None:
    """Also where requests lose their KV, and beside a head of the last stage."""
    near = DrafterConfig(kind="head", name="near", model="demo-griffin", tree="chain")
    with engine_of(HEAD, near, pipeline_parallel_size=stages, **settings) as engine:
        for temperature in (0.0, 0.8):
            plain = answers(engine, temperature, options=PLAIN)
            for _ in range(2):
                assert token_ids(answers(engine, temperature)) == token_ids(plain)
