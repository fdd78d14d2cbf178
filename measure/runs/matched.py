"""Matched runs: the same requests under every setting, in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.progress import Progress, unseen
from ..clients.endpoint import Ask, Endpoint, said_of
from ..clients.load import Load, run_load
from ..clients.setting import Setting
from ..prompts.bench_prompt import BenchPrompt
from ..records.record import Record
from ..records.run_metrics import RunMetrics, run_metrics


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
                prompt=said_of(prompt.text, is_chat=self.is_chat),
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
