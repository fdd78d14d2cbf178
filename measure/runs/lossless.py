"""Checks whether answers depend on speculation, by matched requests with it on and off.

Also tests whether tokens follow the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import openai
import torch

from ...core.errors import DraftlineError
from ...core.progress import Progress, unseen
from ..clients.endpoint import (
    TARGET_ONLY,
    Ask,
    DrawingEndpoint,
    Endpoint,
    Load,
    Setting,
    run_load,
)
from ..prompts import BenchPrompt
from ..records import Record
from .matched import Difference, difference


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; `seed` is the first prompt's; each next prompt's is one higher."""

    name: str
    temperature: float
    top_p: float = 1.0
    seed: int = 0


SAMPLINGS = (
    Sampling("greedy", 0.0),
    Sampling("t 0.7, top_p 0.9", 0.7, 0.9, seed=1000),
    Sampling("t 1", 1.0, seed=2000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Answers of one setting compared with those of the target alone.

    together     concurrent requests
    num_tokens   compared tokens
    num_drafted, num_accepted  nodes
    """

    sampling: str
    setting: str
    together: int
    num_answers: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    differences: tuple[Difference, ...]

    @property
    def proves_nothing(self) -> bool:
        """Whether drafters were named but drafted nothing, so that the check is vacuous."""
        return self.setting != TARGET_ONLY and not self.num_drafted


async def check_answers(
    endpoint: Endpoint,
    settings: Sequence[Setting],
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    together: int,
    is_chat: bool = False,
    progress: Progress = unseen,
) -> list[Check]:
    """Check every sampling and setting, one request after another and `together` at once.

    is_chat: prompts are said by a user, two turns of each

    `settings` begins with the target alone, whose sequential answers are the expected ones. Raises
    `DraftlineError`.
    """
    assert settings[0].name == TARGET_ONLY
    checks = []
    num_asks = len(SAMPLINGS) * len(settings) * 2 * len(prompts)
    with progress("answers", total=num_asks, unit="prompts") as work:
        for sampling in SAMPLINGS:
            work.advance(0, f"{sampling.name}: {settings[0].name}, 1 at once")
            asks = _asks(sampling, settings[0], prompts, max_tokens, is_chat)
            expected, _ = await run_load(endpoint, asks, Load(concurrency=1), work)
            for setting in settings:
                for count in (1, together):
                    if setting is settings[0] and count == 1:
                        continue
                    work.advance(0, f"{sampling.name}: {setting.name}, {count} at once")
                    of_setting = [replace(ask, setting=setting) for ask in asks]
                    records, _ = await run_load(endpoint, of_setting, Load(concurrency=count), work)
                    checks.append(_check(sampling, setting, count, expected, records))
    return checks


def _asks(
    sampling: Sampling,
    setting: Setting,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    is_chat: bool,
) -> list[Ask]:
    return [
        Ask(
            name=prompt.name,
            prompt=prompt.asked(is_chat=is_chat),
            further_turns=prompt.further_turns[:1] if is_chat else (),
            setting=setting,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed + index,
        )
        for index, prompt in enumerate(prompts)
    ]


def _check(
    sampling: Sampling,
    setting: Setting,
    together: int,
    expected: Sequence[Record],
    records: Sequence[Record],
) -> Check:
    partings = [
        difference(setting.name, wanted, record)
        for wanted, record in zip(expected, records, strict=True)
    ]
    counts = [record.counts for record in records if record.counts is not None]
    return Check(
        sampling=sampling.name,
        setting=setting.name,
        together=together,
        num_answers=len(records),
        num_tokens=sum(record.num_tokens for record in records),
        num_drafted=sum(sum(each.drafted.values()) for each in counts),
        num_accepted=sum(sum(each.accepted.values()) for each in counts),
        differences=tuple(parting for parting in partings if parting is not None),
    )


# A repetitive prompt, so that n-gram drafters can propose in the first step.
PROMPT = "for name in names:\n    print(name)\nfor name in names:\n    print("
# The prompt's pass gives the first token; drafts, of one token each, start after it.
NUM_TOKENS = 8
TOP_LOGPROBS = 5
MIN_EXPECTED = 5.0
# A correct server fails one check in a million.
LEAST_P = 1e-6


@dataclass(frozen=True, slots=True)
class SeedCheck:
    """Draws with the same seeds, with drafts of one token and without.

    Equal draws for every seed are equal distributions.
    """

    num_seeds: int
    num_distinct: int
    num_drafted: int
    num_accepted: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """A chi-square test of the first tokens of many seeds against the target's probabilities."""

    num_draws: int
    num_bins: int
    statistic: float
    p_value: float

    @property
    def is_sound(self) -> bool:
        """Whether the draws fit the target's probabilities: `p_value` is at least `LEAST_P`."""
        return self.p_value >= LEAST_P


async def check_seeds(
    endpoint: Endpoint, plain: Setting, drafted: Setting, *, seeds: int, together: int,
    progress: Progress = unseen,
) -> SeedCheck:  # fmt: skip
    """Draw with `seeds` seeds under both settings. Raises `DraftlineError`."""
    asks = [_ask(plain, seed) for seed in range(seeds)]
    load = Load(concurrency=together)
    with progress("seeds", total=2 * seeds, unit="draws") as work:
        expected, _ = await run_load(endpoint, asks, load, work)
        records, _ = await run_load(
            endpoint, [replace(ask, setting=drafted, max_nodes=1) for ask in asks], load, work
        )
    partings = [difference(drafted.name, a, b) for a, b in zip(expected, records, strict=True)]
    counts = [record.counts for record in records if record.counts is not None]
    return SeedCheck(
        num_seeds=seeds,
        num_distinct=len({record.token_ids for record in expected}),
        num_drafted=sum(sum(each.drafted.values()) for each in counts),
        num_accepted=sum(sum(each.accepted.values()) for each in counts),
        differences=tuple(parting for parting in partings if parting is not None),
    )


async def check_first_token(
    endpoint: DrawingEndpoint, setting: Setting, *, seeds: int, progress: Progress = unseen
) -> ChiSquare | str:
    """A chi-square test of first tokens, or why there is none: no logprobs, or too few draws.

    Raises `DraftlineError`.
    """
    draws: Counter[str] = Counter()
    probabilities: Mapping[str, float] = {}
    with progress("first tokens", total=seeds, unit="draws") as work:
        for seed in range(seeds):
            try:
                ask = _ask(setting, seed)
                token, probabilities = await endpoint.first_token(ask, TOP_LOGPROBS)
            except openai.BadRequestError as error:
                return f"the server refuses logprobs: {error.message}"
            except openai.APIError as error:
                raise DraftlineError(f"seed {seed}: {error}") from error
            draws[token] += 1
            work.advance()
    if not probabilities:
        return "the server sends no logprobs"
    test = chi_square(draws, probabilities)
    if test.num_bins == 1:
        return f"{seeds} draws are too few to tell the likely tokens apart"
    return test


def chi_square(draws: Mapping[str, int], probabilities: Mapping[str, float]) -> ChiSquare:
    """Pearson's test of `draws` against `probabilities` of some tokens; all others are one bin.

    Bins of fewer than five expected draws join that one.
    """
    total = sum(draws.values())
    kept = {token: p * total for token, p in probabilities.items() if p * total >= MIN_EXPECTED}
    observed = [draws.get(token, 0) for token in kept]
    observed.append(total - sum(observed))
    expected = [*kept.values()]
    expected.append(total - sum(expected))
    if len(expected) > 1 and expected[-1] < MIN_EXPECTED:
        observed.append(observed.pop() + observed.pop())
        expected.append(expected.pop() + expected.pop())
    bins = list(zip(observed, expected, strict=True))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    freedom = len(bins) - 1
    return ChiSquare(total, len(bins), statistic, _tail_probability(statistic, freedom))


def _tail_probability(statistic: float, freedom: int) -> float:
    """Probability of a chi-square statistic of at least this, for so many degrees of freedom."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _ask(setting: Setting, seed: int) -> Ask:
    return Ask(
        name=f"seed {seed}",
        prompt=PROMPT,
        setting=setting,
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        seed=seed,
    )
