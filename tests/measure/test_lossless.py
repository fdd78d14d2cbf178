"""The live check finds a server that answers wrongly, and its statistics are right."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from draftline.measure.clients.endpoint import matched_settings
from draftline.measure.prompts import BenchPrompt
from draftline.measure.report.lossless_report import LosslessReport
from draftline.measure.runs.lossless import (
    SAMPLINGS,
    ChiSquare,
    SeedCheck,
    check_answers,
    check_seeds,
    chi_square,
)
from rich.console import Console
from scipy import stats
from support.fakes.fake_endpoint import ANSWER, FakeEndpoint
from support.fakes.recorded_progress import RecordedProgress

PROMPTS = [BenchPrompt("a", "x"), BenchPrompt("b", "y")]
SETTINGS = matched_settings(("spectra", "model"), None)
SOUND = SeedCheck(num_seeds=5, num_distinct=3, num_drafted=4, num_accepted=1, differences=())


async def report_of(wrong: tuple[int, ...] = ANSWER) -> LosslessReport:
    checks = await check_answers(FakeEndpoint(wrong), SETTINGS, PROMPTS, max_tokens=5, together=2)
    return LosslessReport({}, checks, SOUND, "no logprobs here")


def printed(report: LosslessReport) -> str:
    file = io.StringIO()
    report.print(Console(file=file, highlight=False))
    return file.getvalue()


async def test_every_sampling_setting_and_concurrency_is_checked() -> None:
    report = await report_of()
    # The target alone, one by one, is what the others are compared with.
    assert len(report.checks) == len(SAMPLINGS) * (2 * len(SETTINGS) - 1)
    assert report.is_lossless
    text = printed(report)
    assert "lossless: 47 answers compared, no difference" in text
    assert "skipped, no logprobs here" in text


async def test_progress_reaches_the_number_of_prompts() -> None:
    progress = RecordedProgress()
    await check_answers(
        FakeEndpoint(), SETTINGS, PROMPTS, max_tokens=5, together=2, progress=progress
    )
    await check_seeds(
        FakeEndpoint(), SETTINGS[0], SETTINGS[1], seeds=4, together=2, progress=progress
    )
    answers, seeds = progress.works
    # Each sampling and setting, one by one and together; seeds with drafts and without.
    assert answers.done == answers.total == len(SAMPLINGS) * len(SETTINGS) * 2 * len(PROMPTS)
    assert answers.notes[-1] == "t 1: all, 2 at once"
    assert seeds.done == seeds.total == 8


async def test_a_wrong_answer_is_listed() -> None:
    report = await report_of((1, 2, 9, 4, 5))
    assert not report.is_lossless
    assert len(report.differences) == len(SAMPLINGS) * 6 * len(PROMPTS)
    text = printed(report)
    assert "NOT LOSSLESS: 36 of 47 answers differ" in text
    assert "spectra, prompt a, position 2: expected 3, found 9" in text
    assert report.fields()["is_lossless"] is False


def test_chi_square_by_hand() -> None:
    """40, 30 and 30 draws of 100 where 50, 30 and 20 were expected: 2 + 0 + 5."""
    found = chi_square({"a": 40, "b": 30, "c": 30}, {"a": 0.5, "b": 0.3})
    assert (found.num_draws, found.num_bins) == (100, 3)
    assert found.statistic == pytest.approx(7)
    assert found.p_value == pytest.approx(stats.chi2.sf(7, 2))


def test_rare_tokens_share_a_bin() -> None:
    draws = {"a": 88, "b": 9, "c": 1, "d": 2}
    found = chi_square(draws, {"a": 0.88, "b": 0.09, "c": 0.02, "d": 0.01})
    # c and d are expected thrice together: too few, so they join b.
    assert found.num_bins == 2
    assert found.statistic == pytest.approx(0)
    assert chi_square({"a": 3}, {"a": 1.0}).p_value == 1


async def test_frequencies_that_chance_does_not_explain_are_a_fault() -> None:
    found = chi_square({"a": 150, "b": 50}, {"a": 0.5, "b": 0.5})
    assert isinstance(found, ChiSquare)
    assert not found.is_sound
    report = LosslessReport({}, (await report_of()).checks, SOUND, found)
    assert not report.is_lossless
    text = printed(report)
    assert "50.00 over 2 bins of 200 draws, p = 1.54e-12: WRONG" in text
    assert "NOT LOSSLESS: no answer differs, but first tokens are drawn wrongly" in text


async def test_a_check_without_drafts_is_told() -> None:
    report = await report_of()
    assert "nothing was drafted" not in printed(report)
    idle = replace(report.checks[-1], num_drafted=0, num_accepted=0)
    report = replace(report, checks=[*report.checks[:-1], idle])
    assert "nothing was drafted in 1 of the checks: the drafters had" in printed(report)
