"""Checks whether answers depend on speculation: matched requests with it on and off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.progress import Progress, unseen
from ..clients.endpoint import Ask, Endpoint, said_of
from ..clients.load import Load, run_load
from ..clients.setting import TARGET_ONLY, Setting
from ..prompts.bench_prompt import BenchPrompt
from ..records.record import Record
from .equality import Difference, difference


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
            prompt=said_of(prompt.text, is_chat=is_chat),
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
