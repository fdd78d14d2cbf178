"""Matched runs: the same requests under every setting, in turn, whose answers must be the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from ...core.progress import Progress, unseen
from ..clients.endpoint import Ask, Endpoint, Load, Setting, run_load
from ..prompts import BenchPrompt
from ..records import Record, RunMetrics, run_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The requests of every setting. Prompt i is sampled with `seed` + i.

    turns    turns of each conversation, sent one after the other
    is_chat  prompts are user messages, through the model's chat template
    """

    prompts: Sequence[BenchPrompt]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    rounds: int = 3
    warm_up: bool = True
    turns: int = 1
    is_chat: bool = False
    load: Load = field(default_factory=Load)

    def asks(self, setting: Setting, salt: str) -> list[Ask]:
        """One request for each prompt."""
        return [
            Ask(
                name=prompt.name,
                prompt=prompt.asked(is_chat=self.is_chat),
                setting=setting,
                max_tokens=min(prompt.answer_tokens or self.max_tokens, self.max_tokens),
                temperature=self.temperature,
                seed=self.seed + index,
                ignore_eos=self.ignore_eos,
                salt=salt,
                further_turns=prompt.further_turns[: self.turns - 1],
            )
            for index, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one setting.

    processor_s  processor time of all threads of this process, hardly affected by other load;
                 includes the engine if it runs in this process
    """

    records: tuple[Record, ...]
    metrics: RunMetrics
    processor_s: float = 0.0


Runs = dict[str, list[Run]]


async def run_matched(
    endpoints: Mapping[Setting, Endpoint], plan: Plan, progress: Progress = unseen
) -> Runs:
    """Runs of every setting by its name, one a round, after an optional discarded warm-up.

    Settings alternate within a round, and each round begins with another setting, so that drifting
    machine speed affects all alike. Rounds share no cached prefixes. Raises `DraftlineError`.
    """
    runs: Runs = {setting.name: [] for setting in endpoints}
    order = list(endpoints)
    turns = range(0 if plan.warm_up else 1, plan.rounds + 1)
    num_asks = len(turns) * len(order) * len(plan.prompts)
    with progress("bench", total=num_asks, unit="prompts") as work:
        for turn in turns:
            name = f"round {turn} of {plan.rounds}" if turn else "warm-up"
            for setting in order:
                work.advance(0, f"{name}: {setting.name}")
                asks = plan.asks(setting, f"bench-{setting.name}-{turn}")
                before = time.process_time()
                records, seconds = await run_load(endpoints[setting], asks, plan.load, work)
                if turn:
                    processor_s = time.process_time() - before
                    run = Run(tuple(records), run_metrics(records, seconds), processor_s)
                    runs[setting.name].append(run)
            order = [*order[1:], order[0]]
    return runs


# Explains why (expected, found) differ, given their token ids, and whether it is a fault.
Explain = Callable[[Record, Record], tuple[str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An answer that differs from the target's own.

    position  of the first difference: in tokens, or in characters without token ids
    is_fault  False if float rounding explains it
    """

    setting: str
    prompt: str
    position: int
    expected: str
    found: str
    explanation: str = ""
    is_fault: bool = True

    def __str__(self) -> str:
        text = (
            f"{self.setting}, prompt {self.prompt}, position {self.position}: "
            f"expected {self.expected}, found {self.found}"
        )
        return f"{text} ({self.explanation})" if self.explanation else text


def differences(runs: Runs, reference: str, explain: Explain | None = None) -> list[Difference]:
    """Answers of any round and setting that differ from the first round of `reference`.

    The same difference in several rounds is listed once.
    """
    expected = runs[reference][0].records
    distinct: dict[Difference, None] = {}
    for setting, rounds in runs.items():
        for run in rounds:
            distinct |= dict.fromkeys(_of_run(setting, expected, run, explain))
    return list(distinct)


def difference(setting: str, expected: Record, found: Record) -> Difference | None:
    """The first difference of two answers; None: they are equal.

    Token ids are compared where both have them, else texts.
    """
    a, b = expected.token_ids, found.token_ids
    if a is None or b is None:
        a, b = expected.text, found.text
    if a == b:
        return None
    pairs = enumerate(zip_longest(a, b))
    position, (wanted, got) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return Difference(
        setting=setting,
        prompt=found.prompt,
        position=position,
        expected="the end" if wanted is None else repr(wanted),
        found="the end" if got is None else repr(got),
    )


def _of_run(
    setting: str, expected: Sequence[Record], run: Run, explain: Explain | None
) -> list[Difference]:
    partings = []
    for wanted, record in zip(expected, run.records, strict=True):
        # After a different answer, later turns have a different prompt and are not compared.
        is_same_prompt = wanted.prompt_input == record.prompt_input
        parting = difference(setting, wanted, record) if is_same_prompt else None
        if parting is None:
            continue
        if explain is not None and wanted.token_ids is not None and record.token_ids is not None:
            why, is_fault = explain(wanted, record)
            parting = replace(parting, explanation=why, is_fault=is_fault)
        partings.append(parting)
    return partings
