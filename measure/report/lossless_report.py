"""The report of `draftline lossless`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..runs.lossless import Check, ChiSquare, SeedCheck
from ..runs.matched import Difference

SHOWN_DIFFERENCES = 40
MIN_WIDTH = 100


@dataclass(frozen=True, slots=True)
class LosslessReport:
    """All checks of one server. `first_token` is a text where that check was skipped."""

    server: dict[str, Any]
    checks: Sequence[Check]
    seeds: SeedCheck
    first_token: ChiSquare | str

    @property
    def differences(self) -> list[Difference]:
        """Every answer that differs from the target's own."""
        of_checks = [parting for check in self.checks for parting in check.differences]
        return [*of_checks, *self.seeds.differences]

    @property
    def is_lossless(self) -> bool:
        """Whether nothing differs."""
        sound = isinstance(self.first_token, str) or self.first_token.is_sound
        return sound and not self.differences

    def fields(self) -> dict[str, Any]:
        """The report by name, for JSON."""
        first = self.first_token
        return {
            **self.server,
            "is_lossless": self.is_lossless,
            "checks": [asdict(check) for check in self.checks],
            "seeds": asdict(self.seeds),
            "first_token": {"skipped": first} if isinstance(first, str) else asdict(first),
        }

    def print(self, console: Console) -> None:
        """Print a table of the checks, the distribution test, and a list of differences."""
        console.width = max(console.width, MIN_WIDTH)
        console.print(_table(self.checks))
        if idle := sum(check.proves_nothing for check in self.checks):
            console.print(
                f"[yellow]nothing was drafted in {idle} of the checks[/]: the drafters had nothing "
                "to propose, or the engine found it not worth its time (node_budget: full always "
                "drafts)"
            )
        console.print(_seeds_line(self.seeds), _first_token_line(self.first_token), sep="\n")
        console.print(self._conclusion())
        partings = self.differences
        for parting in partings[:SHOWN_DIFFERENCES]:
            console.print(str(parting), markup=False)
        if len(partings) > SHOWN_DIFFERENCES:
            console.print(f"... and {len(partings) - SHOWN_DIFFERENCES} more, in the JSON")

    def _conclusion(self) -> str:
        answers = sum(check.num_answers for check in self.checks) + self.seeds.num_seeds
        if self.is_lossless:
            return f"[green]lossless:[/] {answers} answers compared, no difference"
        if not self.differences:
            fault = "no answer differs, but first tokens are drawn wrongly"
        else:
            fault = f"{len(self.differences)} of {answers} answers differ"
        return f"[bold red]NOT LOSSLESS:[/] {fault}"


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("sampling", "setting"):
        table.add_column(title)
    for title in ("at once", "answers", "tokens", "drafted", "accepted", "differ"):
        table.add_column(title, justify="right")
    for check in checks:
        table.add_row(
            check.sampling,
            check.setting,
            str(check.together),
            str(check.num_answers),
            f"{check.num_tokens:,}",
            f"{check.num_drafted:,}",
            f"{check.num_accepted:,}",
            f"[bold red]{len(check.differences)}[/]" if check.differences else "0",
        )
    return table


def _seeds_line(seeds: SeedCheck) -> str:
    same = seeds.num_seeds - len(seeds.differences)
    line = (
        f"distribution: {same} of {seeds.num_seeds} seeds draw the same tokens with drafts of "
        f"one token and without ({seeds.num_distinct} different answers, "
        f"{seeds.num_drafted} drafted, {seeds.num_accepted} accepted)"
    )
    return line if seeds.num_drafted else f"{line}; [yellow]nothing was drafted[/]"


def _first_token_line(first: ChiSquare | str) -> str:
    if isinstance(first, str):
        return f"chi-square of first tokens: skipped, {escape(first)}"
    outcome = "as the target's probabilities say" if first.is_sound else "[bold red]WRONG[/]"
    return (
        f"chi-square of first tokens: {first.statistic:.2f} over {first.num_bins} bins of "
        f"{first.num_draws} draws, p = {first.p_value:.3g}: {outcome}"
    )
