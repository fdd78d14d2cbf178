"""Answers with heads equal plain decoding's, token by token, wherever stages and rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.errors import ConfigError
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts

HEAD = DrafterConfig(kind="head", model="demo-griffin")
OTHERS = (
    DrafterConfig(kind="suffix"),
    DrafterConfig(kind="spectra"),
    DrafterConfig(kind="model", model="demo-drafter"),
)
PLAIN = RequestOptions(speculative=False)


def answers(engine: Engine, temperature: float, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    prompts = [prompt.text for prompt in held_out_prompts()[:5]]
    return engine.generate(prompts, params, **options)


def check_equal(drafters: Sequence[DrafterConfig], **settings: Any) -> list[RequestOutput]:
    """Greedy and sampled answers of one engine, with drafts and without them."""
    config = EngineConfig(model="demo", drafters=tuple(drafters), node_budget="full", **settings)
    drafted: list[RequestOutput] = []
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            plain = answers(engine, temperature, options=PLAIN)
            got = answers(engine, temperature)
            assert [one.token_ids for one in got] == [one.token_ids for one in plain]
            drafted += got
    return drafted


def accepted_of(outputs: Sequence[RequestOutput], source: str) -> int:
    return sum(one.metrics.accepted_by_source.get(source, 0) for one in outputs)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_heads_change_no_token(stages: int) -> None:
    outputs = check_equal((HEAD,), pipeline_parallel_size=stages)
    lengths = [length for one in outputs for length in one.metrics.accepted_lengths]
    # One that got wrong states would be right now and then, by chance.
    assert np.mean(lengths) > 0.6


def test_heads_beside_other_drafters() -> None:
    outputs = check_equal((HEAD, *OTHERS), tree_nodes=24)
    assert accepted_of(outputs, "head")


def test_with_little_kv_and_short_chunks() -> None:
    """Requests are preempted, and their prompts are computed again, in pieces."""
    check_equal((HEAD,), kv_cache_tokens=512, max_num_batched_tokens=48, max_num_seqs=3)


def test_a_prefix_that_is_shared_has_no_states() -> None:
    config = EngineConfig(model="demo", drafters=(HEAD,), node_budget="full")
    with Engine(config) as engine:
        first, again = answers(engine, 0.0), answers(engine, 0.0)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert max(one.metrics.cached_tokens for one in again) > 0
    assert accepted_of(again, "head")


@pytest.mark.parametrize("acceptance", ["rejection", "k_seq", "traversal"])
def test_greedy_answers_under_other_rules(acceptance: str) -> None:
    drafters = (HEAD, DrafterConfig(kind="head", name="chain", model="demo-griffin", tree="chain"))
    config = EngineConfig(
        model="demo", drafters=drafters, acceptance=acceptance, node_budget="full"
    )
    with Engine(config) as engine:
        plain = answers(engine, 0.0, options=PLAIN)
        assert [one.token_ids for one in answers(engine, 0.0)] == [one.token_ids for one in plain]


def test_a_budget_that_chooses_asks_for_states_where_heads_are_asked() -> None:
    """Steps of several tokens come and go between those that hand states out."""
    config = EngineConfig(model="demo", drafters=(HEAD,))
    with Engine(config) as engine:
        for _ in range(3):
            plain = answers(engine, 0.8, options=PLAIN)
            assert [one.token_ids for one in answers(engine, 0.8)] == [
                one.token_ids for one in plain
            ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "demo-griffin", "transport": "grpc"}, "transport"),
        ({}, "model"),
        ({"model": "demo-griffin", "tree": "nowhere.json"}, "tree"),
    ],
)
def test_wrong_settings_name_the_field(fields: dict[str, Any], field: str) -> None:
    drafter = DrafterConfig(kind="head", **fields)
    with pytest.raises(ConfigError) as caught:
        Engine(EngineConfig(model="demo", drafters=(drafter,)))
    assert caught.value.field.endswith(field)


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_states_come_from_stages_of_other_processes() -> None:
    outputs = check_equal((HEAD,), backend="ray", pipeline_parallel_size=2)
    lengths = [length for one in outputs for length in one.metrics.accepted_lengths]
    assert np.mean(lengths) > 0.6
