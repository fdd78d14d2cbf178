"""Counts of the entries of a store's logs by namespace, over the logs of all models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import DamagedError
from .delta_log import DeltaLog


@dataclass(frozen=True, slots=True)
class LogSurvey:
    """Counts by namespace, those of 0 left out.

    entries  texts, and credits to texts, that are not folded yet
    damaged  what was passed over
    """

    entries: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)


def survey_logs(logs: Sequence[DeltaLog]) -> LogSurvey:
    """Count the entries of all logs, one for each model. Raises `StoreError` if out of reach."""
    survey = LogSurvey()
    for log in logs:
        for namespace in log.epochs():
            try:
                survey.entries[namespace] += len(log.read(namespace))
                log.folded(namespace)
            except DamagedError:
                log.damage.add(namespace, "log")
            survey.damaged[namespace] += log.damage.of(namespace)
    return LogSurvey(+survey.entries, +survey.damaged)
