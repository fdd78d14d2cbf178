"""What the demo shows: coloured streams, the table, and both as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....core.request.output import TARGET_SOURCE
from .client import DemoSampling, Piece
from .comparison import Comparison, total
from .held_out_prompts import HeldOutPrompt

COLOURS = ("green", "cyan", "magenta", "yellow", "blue")
WIDTH = 100
# The streams together take this many lines, so that the whole output fits one screen.
MAX_LINES = 24


class Screen:
    """Prints the parts of the demo in order, and keeps them for `save_svg`."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, width=WIDTH, record=True)
        self._styles: dict[str, str] = {}

    def line(self, text: str) -> None:
        """Print one line."""
        self._console.print(text)

    def phase(self, text: str) -> AbstractContextManager[object]:
        """Shows what goes on, but in no picture: a spinner on a terminal, a line elsewhere."""
        # A console of its own: this one would record every frame of the spinner.
        console = Console(highlight=False, width=WIDTH, file=self._console.file)
        if console.is_terminal:
            return console.status(text)
        console.print(text)
        return nullcontext()

    def legend(self, sources: Sequence[str]) -> None:
        """Give every source a colour, and print the colours."""
        self._styles = dict(zip(sources, COLOURS, strict=False))
        legend = Text("each token in the colour of what proposed it: target")
        for source in sources:
            legend.append(", ").append(source, style=self._styles.get(source, ""))
        self._console.print(legend)

    def stream(self, prompt: HeldOutPrompt, num_prompts: int) -> StreamPrinter:
        """Print a prompt's name and last line; the printer takes its completion."""
        self._console.print(Text(f"── {prompt.name}", style="bold"))
        printer = StreamPrinter(self._console, self._styles, MAX_LINES // num_prompts)
        ending = "\n" if prompt.text.endswith("\n") else ""
        printer.show(prompt.text.splitlines()[-1] + ending, "dim")
        return printer

    def table(self, results: Sequence[Comparison], sampling: DemoSampling) -> None:
        """Print the rates of both ways, whether their texts are equal, and how they were chosen."""
        self._console.print(_comparison_table(results))
        num_equal = sum(result.is_equal for result in results)
        self._console.print(
            f"{num_equal} of {len(results)} texts are the same with drafting off and on"
        )
        self._console.print(_sampling_line(sampling))

    def save_svg(self, path: Path) -> None:
        """Write everything printed so far as a picture."""
        self._console.save_svg(str(path), title="draftline demo")


class StreamPrinter:
    """Prints pieces as they come, at most `num_lines` lines of the console's width."""

    def __init__(self, console: Console, styles: dict[str, str], num_lines: int) -> None:
        self._console = console
        self._styles = styles
        self._lines_left = max(2, num_lines)
        self._column = 0

    def show_piece(self, piece: Piece) -> None:
        """Print a token's text in the colour of its source."""
        style = "" if piece.source == TARGET_SOURCE else self._styles.get(piece.source, "")
        self.show(piece.text, style)

    def show(self, text: str, style: str) -> None:
        """Print text as far as there is room."""
        for char_run in text.expandtabs(4).splitlines(keepends=True):
            if not self._lines_left:
                return
            line = char_run.rstrip("\r\n")[: WIDTH - self._column]
            self._console.print(Text(line, style=style), end="")
            self._column += len(line)
            if char_run != char_run.rstrip("\r\n"):
                self._end_line()

    def finish(self) -> None:
        """End the last line."""
        if self._column:
            self._end_line()

    def _end_line(self) -> None:
        self._console.print()
        self._column = 0
        self._lines_left -= 1


def _comparison_table(results: Sequence[Comparison]) -> Table:
    whole = total(results)
    sources = sorted(whole.drafted.accepted)
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("prompt", max_width=30, no_wrap=True)
    titles = ["plain tok/s", "drafted tok/s", "speedup", "tau", "same text"]
    for title in [*titles, *(f"by {source}" for source in sources)]:
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(*_row(result, sources))
    if len(results) > 1:
        table.add_row(*_row(whole, sources), style="bold")
    return table


def _row(result: Comparison, sources: Sequence[str]) -> list[str]:
    return [
        result.name,
        f"{result.plain.tokens_per_second:.0f}",
        f"{result.drafted.tokens_per_second:.0f}",
        f"{result.speedup:.2f}x",
        f"{result.drafted.tau:.2f}",
        "yes" if result.is_equal else "NO",
        *(str(result.drafted.accepted[source]) for source in sources),
    ]


def _sampling_line(sampling: DemoSampling) -> str:
    if sampling.temperature == 0:
        return "greedy: so small a model repeats itself, and repeated text is easily drafted"
    return (
        f"sampled at temperature {sampling.temperature:g}, seed {sampling.seed}; "
        "--greedy shows text that repeats, where drafts fit best"
    )
