"""Applies a stopping rule to the chains of one request, and reports their acceptance to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.errors import ConfigError
from ..option_checks import require_whole
from .stopping import (
    Confidence,
    Constant,
    DraftCosts,
    Drawn,
    Goodput,
    Heuristic,
    Schedule,
    Stopping,
    Svip,
)


class ChainLength:
    """Asks a rule how long a chain may become, and reports how much of it was accepted."""

    __slots__ = ("_draft", "_rule", "_tokens")

    def __init__(self, rule: Stopping) -> None:
        self._rule = rule
        self._draft: list[Drawn] = []
        self._tokens: list[int] = []

    def begin(self, most: int, num_requests: int) -> int:
        """Begin a new chain: the most tokens that it may have.

        most          upper bound of the step
        num_requests  requests that are drafted for in the same batch
        """
        self._draft, self._tokens = [], []
        return self._rule.num_tokens(most, num_requests)

    def ends_with(self, token: int, drawn: Drawn) -> bool:
        """Whether the chain is over with the token that was just drawn."""
        self._tokens.append(token)
        self._draft.append(drawn)
        return self._rule.stops_after(drawn)

    def observe(self, committed: Sequence[int]) -> None:
        """Report what was committed, in the drafter's own tokens as `ends_with` has them.

        The part of the chain that it begins with was accepted.
        """
        if not self._draft:
            return
        pairs = enumerate(zip(self._tokens, committed, strict=False))
        agreed = min(len(self._tokens), len(committed))
        accepted = next((index for index, (drafted, target) in pairs if drafted != target), agreed)
        self._rule.observe(self._draft, accepted)
        self._draft, self._tokens = [], []


def stop_rule(
    name: str,
    num_tokens: int,
    threshold: float,
    schedule: Sequence[Sequence[int]],
    costs: DraftCosts,
) -> Callable[[], Stopping]:
    """A factory of the rule of this name, one for each request. Raises `ConfigError`.

    num_tokens  most tokens of a draft; `heuristic` starts there
    threshold   first threshold of `confidence`
    schedule    [most requests, tokens] pairs of `schedule`
    costs       measured times, for `goodput`
    """
    steps = [_step(step) for step in schedule]
    rules: dict[str, Callable[[], Stopping]] = {
        "constant": Constant,
        "heuristic": lambda: Heuristic(num_tokens, num_tokens),
        "confidence": lambda: Confidence(threshold, learns=True),
        "svip": Svip,
        "schedule": lambda: Schedule(steps),
        "goodput": lambda: Goodput(costs),
    }
    if name not in rules:
        raise ConfigError("stop", f"must be one of {', '.join(rules)}, not {name!r}")
    rules[name]()
    return rules[name]


def _step(step: Sequence[int]) -> tuple[int, int]:
    if not isinstance(step, list | tuple) or len(step) != 2:
        raise ConfigError("schedule", f"must list [most requests, tokens], not {step!r}")
    require_whole("schedule", step[0], 1)
    require_whole("schedule", step[1], 0)
    return step[0], step[1]
