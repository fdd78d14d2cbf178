"""Compares the answers of every setting with those of the target alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..records.record import Record
from .matched import Run, Runs

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
        parting = difference(setting, wanted, record) if wanted.said == record.said else None
        if parting is None:
            continue
        if explain is not None and wanted.token_ids is not None and record.token_ids is not None:
            why, is_fault = explain(wanted, record)
            parting = replace(parting, explanation=why, is_fault=is_fault)
        partings.append(parting)
    return partings
