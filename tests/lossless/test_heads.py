"""Answers with heads equal plain decoding's, token by token, wherever stages and rows are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.actors.drafter_process import DrafterProcess
from draftline.core.errors import ConfigError
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.drafters.heads.last_stage import LastStageHead
from draftline.models.load.bundled import BUNDLED_HEADS
from draftline.models.stage.stage_heads import MOST_FAILURES

HEAD = DrafterConfig(kind="head", model="demo-griffin")
# One of the engine's process, which states are sent to.
NEAR = DrafterConfig(kind="head", model="demo-griffin", placement="actor")
# One whose answers a busy machine would hold back past the step's patience.
REMOTE = DrafterConfig(kind="head", name="far", model="demo-griffin", transport="grpc")
PATIENT = {"draft_deadline_ms": 5000}
OTHERS = (
    DrafterConfig(kind="suffix"),
    DrafterConfig(kind="spectra"),
    DrafterConfig(kind="model", model="demo-drafter"),
)
PLAIN = RequestOptions(speculative=False)
# Requests lose their KV, and their prompts are computed again in pieces.
LITTLE_KV = {"kv_cache_tokens": 512, "max_num_batched_tokens": 48, "max_num_seqs": 3}


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


@pytest.mark.parametrize(
    ("stages", "head"),
    [
        (1, HEAD),
        pytest.param(2, HEAD, marks=pytest.mark.full),
        (3, HEAD),
        pytest.param(1, NEAR, marks=pytest.mark.full),
        (3, NEAR),
    ],
)
def test_heads_change_no_token(stages: int, head: DrafterConfig) -> None:
    outputs = check_equal((head,), pipeline_parallel_size=stages)
    lengths = [length for one in outputs for length in one.metrics.accepted_lengths]
    # One that got wrong states would be right now and then, by chance.
    assert np.mean(lengths) > 0.6


@pytest.mark.parametrize("name", BUNDLED_HEADS)
def test_every_bundled_head_drafts_alike_wherever_it_is(name: str) -> None:
    lengths = []
    for placement in ("last_stage", "actor"):
        head = DrafterConfig(kind="head", model=name, placement=placement)
        outputs = check_equal(
            (head,), pipeline_parallel_size=2, enable_prefix_caching=False, pipelined_trees="off",
            **PATIENT,
        )  # fmt: skip
        lengths.append([one.metrics.accepted_lengths for one in outputs])
    # The drafts are the same, but for near-ties: products of another kind round otherwise.
    same = [mine == theirs for mine, theirs in zip(*lengths, strict=True)]
    assert np.mean(same) > 0.5
    means = [np.mean([length for own in each for length in own]) for each in lengths]
    assert means[0] == pytest.approx(means[1], rel=0.02)
    assert means[0] > 0.4


def test_a_head_that_raises_ends_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def raising(*_: object) -> None:
        calls.append(1)
        raise ValueError("a secret of the request")

    monkeypatch.setattr(LastStageHead, "draft", raising)
    with caplog.at_level(logging.WARNING):
        outputs = check_equal((HEAD, DrafterConfig(kind="suffix")))
    assert accepted_of(outputs, "suffix")
    assert not accepted_of(outputs, "head")
    assert len(calls) == MOST_FAILURES
    said = [one.getMessage() for one in caplog.records if "event=head_failed" in one.getMessage()]
    assert len(said) == MOST_FAILURES
    assert not any("secret" in one for one in said)


def test_what_waited_is_read_when_drafts_are_wanted() -> None:
    """Nobody drafts for the first answer; the second goes on from it, over a shared prefix."""
    config = EngineConfig(model="demo", drafters=(HEAD,), node_budget="full")
    with Engine(config) as engine:
        text = held_out_prompts()[0].text
        params = SamplingParams(temperature=0, seed=3, max_tokens=60, ignore_eos=True)
        [plain] = engine.generate([text], params, PLAIN)
        [drafted] = engine.generate([text + plain.text], params)
        [again] = engine.generate([text + plain.text], params, PLAIN)
    assert drafted.token_ids == again.token_ids
    assert np.mean(drafted.metrics.accepted_lengths) > 0.6


def test_a_shared_prefix_is_known_to_a_head_of_the_last_stage() -> None:
    config = EngineConfig(model="demo", drafters=(HEAD,), node_budget="full")
    with Engine(config) as engine:
        first, again = answers(engine, 0.0), answers(engine, 0.0)
    assert max(one.metrics.cached_tokens for one in again) > 0
    means = [
        np.mean([length for one in outputs for length in one.metrics.accepted_lengths])
        for outputs in (first, again)
    ]
    # But for the row at the end of the prefix, it reads the same.
    assert means[1] == pytest.approx(means[0], rel=0.03)


def test_heads_beside_other_drafters() -> None:
    outputs = check_equal((HEAD, *OTHERS), tree_nodes=24)
    assert accepted_of(outputs, "head")


@pytest.mark.net
@pytest.mark.full
def test_a_head_of_another_process_changes_no_token_and_drafts_as_one_of_this_process() -> None:
    # Of a shared prefix the last stage has states that waited, a drafter has none.
    far = check_equal((REMOTE,), enable_prefix_caching=False, **PATIENT)
    near = check_equal((HEAD,), enable_prefix_caching=False, **PATIENT)
    means = [
        np.mean([length for one in outputs for length in one.metrics.accepted_lengths])
        for outputs in (far, near)
    ]
    # States are rounded on their way.
    assert means[0] > 0.5
    assert means[0] > 0.9 * means[1]


@pytest.mark.net
@pytest.mark.full
def test_a_head_of_another_process_beside_other_drafters() -> None:
    outputs = check_equal((REMOTE, *OTHERS), tree_nodes=24, **PATIENT)
    assert accepted_of(outputs, "far")


@pytest.mark.net
def test_a_head_behind_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DrafterProcess(HEAD, EngineConfig(model="demo"))
    monkeypatch.setenv("TOKEN_OF_THE_HEAD", server.token)
    try:
        address = asyncio.run(server.address())
        head = DrafterConfig(
            **{**REMOTE.model_dump(), "address": address, "token_env": "TOKEN_OF_THE_HEAD"}
        )
        assert accepted_of(check_equal((head,), **PATIENT), "far")
    finally:
        server.stop()


@pytest.mark.net
@pytest.mark.full
def test_a_head_that_is_late_changes_no_token() -> None:
    check_equal((REMOTE,), draft_deadline_ms=0.1)


def test_with_little_kv_and_short_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are preempted, and their prompts are computed again, in pieces."""
    outputs = check_equal((HEAD,), **LITTLE_KV)
    assert accepted_of(outputs, "head")
    assert "event=head_failed" not in caplog.text


def test_a_prefix_that_is_shared_has_no_states() -> None:
    config = EngineConfig(model="demo", drafters=(NEAR,), node_budget="full")
    with Engine(config) as engine:
        first, again = answers(engine, 0.0), answers(engine, 0.0)
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert max(one.metrics.cached_tokens for one in again) > 0
    assert accepted_of(again, "head")


def test_greedy_answers_under_rejection() -> None:
    drafters = (HEAD, DrafterConfig(kind="head", name="chain", model="demo-griffin", tree="chain"))
    config = EngineConfig(
        model="demo", drafters=drafters, acceptance="rejection", node_budget="full"
    )
    with Engine(config) as engine:
        plain = answers(engine, 0.0, options=PLAIN)
        assert [one.token_ids for one in answers(engine, 0.0)] == [one.token_ids for one in plain]


@pytest.mark.parametrize("head", [HEAD, NEAR])
def test_a_budget_that_chooses_asks_for_states_where_heads_are_asked(head: DrafterConfig) -> None:
    """Steps of several tokens come and go between those that hand states out."""
    config = EngineConfig(model="demo", drafters=(head,))
    with Engine(config) as engine:
        for _ in range(3):
            plain = answers(engine, 0.8, options=PLAIN)
            assert [one.token_ids for one in answers(engine, 0.8)] == [
                one.token_ids for one in plain
            ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"transport": "grpc"}, "model"),
        ({}, "model"),
        ({"model": "demo-griffin", "tree": "nowhere.json"}, "tree"),
        ({"model": "demo-griffin", "tree": "nowhere.json", "placement": "actor"}, "tree"),
        ({"model": "demo-griffin", "placement": "somewhere"}, "placement"),
        (
            {"model": "demo-griffin", "placement": "last_stage", "transport": "grpc"},
            "placement",
        ),
        ({"model": "demo-griffin", "dtype": "bfloat16"}, "dtype"),
    ],
)
def test_wrong_settings_name_the_field(fields: dict[str, Any], field: str) -> None:
    drafter = DrafterConfig(kind="head", **fields)
    with pytest.raises(ConfigError) as caught:
        Engine(EngineConfig(model="demo", drafters=(drafter,)))
    assert caught.value.field.endswith(field)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("stages", "settings"), [(2, {}), (1, {}), (3, LITTLE_KV)])
def test_heads_change_no_token_where_stages_are_other_processes(
    stages: int, settings: dict[str, int]
) -> None:
    """States come from stages of Ray actors, to the last of them or to an actor of its own."""
    config = EngineConfig(
        model="demo", drafters=(HEAD, REMOTE), node_budget="full", backend="ray",
        pipeline_parallel_size=stages, standby_stages=0, **settings, **PATIENT,
    )  # fmt: skip
    lengths: dict[str, list[int]] = {"head": [], "far": []}
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            plain = answers(engine, temperature, options=PLAIN)
            for name, own in lengths.items():
                got = answers(engine, temperature, options=RequestOptions(drafters=(name,)))
                assert [one.token_ids for one in got] == [one.token_ids for one in plain]
                own += [length for one in got for length in one.metrics.accepted_lengths]
    assert min(np.mean(own) for own in lengths.values()) > 0.5
