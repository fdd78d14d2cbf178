"""What is asked of `draftline bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....measure.clients.load import Load
from ....measure.clients.prompts import BenchPrompt
from ....measure.clients.setting import Setting
from ....measure.replay.recording import Recording
from ....measure.runs.matched import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What is asked of `draftline bench`.

    prompts     a file; None: the bundled ones
    drafters    as `matched_settings` reads it
    base_url    of a server; None: an engine in this process
    suite       its settings, in place of `drafters`
    one_engine  all settings share one engine, for models too large to be loaded several times
    record      file for the target's answers
    replay      such a file, in place of prompts and target
    output, plots  where JSON and PNG files go; None: nowhere
    """

    prompts: Path | None
    num_prompts: int
    drafters: str | None
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    rounds: int
    load: Load
    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    suite: tuple[Setting, ...] | None = None
    one_engine: bool = False
    record: Path | None = None
    replay: Path | None = None
    output: Path | None = None
    plots: Path | None = None

    def plan(self, prompts: Sequence[BenchPrompt]) -> Plan:
        """The matched runs over `prompts`."""
        return Plan(
            prompts=prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            rounds=self.rounds,
            load=self.load,
        )

    def as_recorded(self, recording: Recording) -> BenchJob:
        """The same of what was recorded."""
        return replace(
            self,
            num_prompts=len(recording.answers),
            max_tokens=recording.max_tokens,
            temperature=recording.temperature,
            seed=recording.answers[0].seed,
            ignore_eos=recording.ignore_eos,
        )
