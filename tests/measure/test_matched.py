"""Matched runs: who is asked what and when, and answers that differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from draftline.core.errors import ConfigError, DraftlineError
from draftline.measure.clients.endpoint import Load, Setting, matched_settings, run_load
from draftline.measure.prompts import BenchPrompt
from draftline.measure.records import Record
from draftline.measure.report.summary import BenchResult, summarise
from draftline.measure.runs.matched import Plan, differences, run_matched
from support.fakes.fake_endpoint import ANSWER, FakeEndpoint
from support.fakes.recorded_progress import RecordedProgress

KNOWN = ("spectra", "model")
PROMPTS = [BenchPrompt(name, f"text {name}") for name in "abc"]
SETTINGS = matched_settings(KNOWN, None)


async def result_of(wrong: tuple[int, ...] = ANSWER) -> BenchResult:
    endpoint = FakeEndpoint(wrong)
    runs = await run_matched(dict.fromkeys(SETTINGS, endpoint), Plan(prompts=PROMPTS, rounds=2))
    return BenchResult({}, summarise(runs, "target"), tuple(differences(runs, "target")))


def test_each_drafter_alone_and_then_all() -> None:
    assert [(one.name, one.drafters) for one in SETTINGS] == [
        ("target", ()),
        ("spectra", ("spectra",)),
        ("model", ("model",)),
        ("all", KNOWN),
    ]
    assert [one.name for one in matched_settings(("spectra",), None)] == ["target", "spectra"]
    assert matched_settings((), None) == [Setting("target", ())]


def test_chosen_settings() -> None:
    chosen = matched_settings(KNOWN, "model+spectra, all")
    assert [one.drafters for one in chosen] == [(), ("model", "spectra"), KNOWN]
    with pytest.raises(ConfigError, match="'medusa' is not there; known: spectra, model"):
        matched_settings(KNOWN, "spectra+medusa")


async def test_settings_take_turns_on_the_same_requests() -> None:
    endpoint = FakeEndpoint()
    plan = Plan(prompts=PROMPTS, rounds=2, temperature=0.5, seed=7)
    runs = await run_matched(dict.fromkeys(SETTINGS, endpoint), plan)
    assert {name: len(rounds) for name, rounds in runs.items()} == dict.fromkeys(runs, 2)
    order = [ask.setting.name for ask in endpoint.asked[:: len(PROMPTS)]]
    assert order == [
        *("target", "spectra", "model", "all"),
        *("spectra", "model", "all", "target"),
        *("model", "all", "target", "spectra"),
    ]
    # A prompt has one seed everywhere, and no run shares another one's prefixes.
    assert {(ask.name, ask.seed) for ask in endpoint.asked} == {("a", 7), ("b", 8), ("c", 9)}
    assert set(Counter(ask.salt for ask in endpoint.asked).values()) == {len(PROMPTS)}


async def test_equal_answers() -> None:
    result = await result_of()
    assert result.differences == ()
    assert [one.same for one in result.summaries] == [6] * 4
    target, *drafted = result.summaries
    assert target.speedups == (1.0, 1.0)
    assert target.whole.counts is not None
    assert target.whole.counts.tau == 1
    for one in drafted:
        assert one.whole.counts is not None
        assert one.whole.counts.tau == 2


async def test_a_wrong_answer_is_found_in_every_setting() -> None:
    result = await result_of((1, 2, 9, 4, 5))
    assert [one.same for one in result.summaries] == [6, 0, 0, 0]
    # Once for each setting and prompt, though there were two rounds.
    assert len(result.faults) == 9
    first = result.differences[0]
    assert (first.setting, first.prompt, first.position) == ("spectra", "a", 2)
    assert (first.expected, first.found) == ("3", "9")


async def test_an_answer_that_ends_early_differs() -> None:
    result = await result_of(ANSWER[:-1])
    assert (result.faults[0].position, result.faults[0].found) == (4, "the end")


async def test_differences_are_explained() -> None:
    runs = await run_matched(
        dict.fromkeys(SETTINGS[:2], FakeEndpoint((1, 9))), Plan(prompts=PROMPTS, rounds=1)
    )

    def explain(expected: Record, found: Record) -> tuple[str, bool]:
        assert (expected.token_ids, found.token_ids) == (ANSWER, (1, 9))
        return f"because of {expected.prompt_input}", found.prompt == "c"

    found = differences(runs, "target", explain)
    assert [(one.explanation, one.is_fault) for one in found] == [
        ("because of text a", False),
        ("because of text b", False),
        ("because of text c", True),
    ]


@pytest.mark.parametrize("limit", [1, 2])
async def test_concurrency_is_a_limit(limit: int) -> None:
    endpoint = FakeEndpoint()
    asks = Plan(prompts=PROMPTS).asks(SETTINGS[0], "")
    records, _ = await run_load(endpoint, asks, Load(concurrency=limit))
    assert endpoint.most == limit
    assert [record.prompt for record in records] == [*"abc"]


async def test_a_failed_request_ends_the_run() -> None:
    class Failing(FakeEndpoint):
        async def answer(self, ask):
            if ask.name == "b":
                raise DraftlineError("no")
            return await super().answer(ask)

    asks = Plan(prompts=PROMPTS).asks(SETTINGS[0], "")
    with pytest.raises(DraftlineError, match="no"):
        await run_load(Failing(), asks, Load(concurrency=1))


def test_poisson_times_are_those_of_the_seed() -> None:
    load = Load(concurrency=None, request_rate=4.0, seed=3)
    times = load.starts(4000)
    assert times == load.starts(4000)
    assert times != Load(request_rate=4.0, seed=4).starts(4000)
    assert times[0] == 0
    assert times == sorted(times)
    # The mean of 4,000 gaps of 1/4 s is within five standard deviations.
    assert times[-1] / 3999 == pytest.approx(0.25, abs=5 * 0.25 / 4000**0.5)
    assert Load().starts(3) == [0.0, 0.0, 0.0]


async def test_answers_stay_in_a_conversation() -> None:
    """The second turn follows the first answer, at once, while others have theirs."""
    endpoint = FakeEndpoint()
    prompts = [BenchPrompt("a", "Hi.", further_turns=("More.",)), BenchPrompt("b", "Hello.")]
    plan = Plan(prompts=prompts, seed=3, turns=2)
    records, _ = await run_load(endpoint, plan.asks(SETTINGS[0], "s"), Load(concurrency=1))
    assert [(one.prompt, one.turn, one.seed) for one in records] == [
        ("a", 0, 3), ("a", 1, 3), ("b", 0, 4),
    ]  # fmt: skip
    assert [one.prompt_input for one in records] == ["Hi.", "Hi.12345\n\nMore.\n", "Hello."]
    first, _ = replace(plan, turns=1).asks(SETTINGS[0], "s")
    assert first.further_turns == (), "a conversation is asked for, never the default"
    chat = replace(plan, is_chat=True).asks(SETTINGS[0], "s")
    records, _ = await run_load(endpoint, chat, Load(concurrency=1))
    assert records[1].prompt_input == (
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "12345"},
        {"role": "user", "content": "More."},
    )


async def test_what_follows_a_wrong_answer_is_not_blamed_again() -> None:
    prompts = [BenchPrompt("a", "Hi.", further_turns=("More.",))]
    endpoint = FakeEndpoint((1, 9))
    runs = await run_matched(
        dict.fromkeys(SETTINGS[:2], endpoint), Plan(prompts=prompts, rounds=1, turns=2)
    )
    found = differences(runs, "target")
    assert [(one.setting, one.position) for one in found] == [("spectra", 1)]


async def test_requests_come_at_times_of_their_own() -> None:
    assert Load(concurrency=None, arrivals=(0.0, 2.0, 1.0)).starts(3) == [0.0, 2.0, 1.0]


async def test_answers_are_as_long_as_asked_for() -> None:
    prompts = [BenchPrompt(name, "x", answer_tokens=most) for name, most in (("a", 3), ("b", 900))]
    asks = Plan(prompts=[*prompts, BenchPrompt("c", "x")], max_tokens=50).asks(SETTINGS[0], "s")
    assert [ask.max_tokens for ask in asks] == [3, 50, 50]


async def test_a_run_without_a_warm_up() -> None:
    endpoint = FakeEndpoint()
    plan = Plan(prompts=PROMPTS, rounds=1, warm_up=False)
    await run_matched({SETTINGS[0]: endpoint}, plan)
    assert len(endpoint.asked) == len(PROMPTS)


async def test_progress_counts_the_prompts_of_all_rounds() -> None:
    progress = RecordedProgress()
    prompts = [BenchPrompt("a", "Hi.", further_turns=("More.",)), BenchPrompt("b", "Hello.")]
    plan = Plan(prompts=prompts, rounds=2, turns=2)
    await run_matched(dict.fromkeys(SETTINGS[:2], FakeEndpoint()), plan, progress)
    [work] = progress.works
    # Two settings, a warm-up and two rounds.
    assert work.done == work.total == 12
    assert work.notes == [
        "warm-up: target", "warm-up: spectra", "round 1 of 2: spectra", "round 1 of 2: target",
        "round 2 of 2: target", "round 2 of 2: spectra",
    ]  # fmt: skip
