"""Options of the cascade of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError
from ..option_checks import require_whole

MOST_DRAFTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions:
    """Options of `CascadeDrafter`; raises `ConfigError` naming the option.

    horizontal         most tokens of a draft that each drafter writes, one behind the other; 0:
                       none
    vertical           of each drafter but the last: how many of its next tokens the one behind it
                       guesses, which it then checks in one pass; 0: none. Those left out are 0
    distribution_size  of its models, as `ModelOptions.distribution_size`
    """

    horizontal: Sequence[int] = ()
    vertical: Sequence[int] = ()
    distribution_size: int = 0

    def __post_init__(self) -> None:
        for field in ("horizontal", "vertical"):
            values = getattr(self, field)
            if not isinstance(values, list | tuple):
                raise ConfigError(field, f"must be a list of numbers of tokens, not {values!r}")
            for value in values:
                require_whole(field, value, 0, 256)
        require_whole("distribution_size", self.distribution_size, 0, 4096)

    def lengths(self, num_drafters: int) -> list[int]:
        """Tokens of each drafter. Raises `ConfigError` where some has none of either kind."""
        if not 2 <= num_drafters <= MOST_DRAFTERS:
            raise ConfigError("drafters", f"must be 2 to {MOST_DRAFTERS}, the best one first")
        if len(self.horizontal) != num_drafters:
            raise ConfigError(
                "horizontal", f"must be a number of tokens for each of {num_drafters}"
            )
        if not self.horizontal[0]:
            raise ConfigError("horizontal", "must begin with the tokens of the first drafter")
        guesses = self.guesses(num_drafters)
        for index in range(1, num_drafters):
            if not self.horizontal[index] and not guesses[index - 1]:
                raise ConfigError(
                    "horizontal",
                    f"drafter {index} would be asked for nothing: give it tokens here, or drafter "
                    f"{index - 1} guesses in vertical",
                )
        return list(self.horizontal)

    def guesses(self, num_drafters: int) -> list[int]:
        """Guesses that each drafter gets of the one behind it. Raises `ConfigError`."""
        if len(self.vertical) >= num_drafters:
            raise ConfigError("vertical", f"must be at most {num_drafters - 1} numbers of guesses")
        return [*self.vertical, *[0] * (num_drafters - len(self.vertical))]
