"""`draftline demo`: the served system at work on held-out prompts, with drafting off and on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....cluster.engine.assembly import plan_model
from ....core.request.output import TARGET_SOURCE
from ...engine.placement import stages_have_gpu
from ...ray_serve.runtime import quiet_libraries, serve_on_ray
from ...settings.settings import (
    DEMO_FILE,
    ServeArgs,
    build_serve_args,
    merge_settings,
    read_settings,
)
from ..serve.command import base_url, describe, with_port
from ..serve.local_server import free_port
from .client import DemoClient, DemoRun, Piece
from .held_out_prompts import HeldOutPrompt, held_out_prompts

COLOURS = ("green", "cyan", "magenta", "yellow", "blue")
WIDTH = 100
# The whole output should fit one screen.
MAX_LINES = 24


@dataclass(frozen=True, slots=True)
class DemoJob:
    """How much to show."""

    num_prompts: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with drafting off and on."""

    name: str
    plain: DemoRun
    drafted: DemoRun

    @property
    def is_equal(self) -> bool:
        """Whether both texts are the same."""
        return self.plain.text == self.drafted.text

    @property
    def speedup(self) -> float:
        """Time without drafting over time with it, per token."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


def run_demo(job: DemoJob) -> int:
    """Run it; 0 if all texts were equal, else 1. Raises `DraftlineError`."""
    quiet_libraries()
    console = Console(highlight=False, width=WIDTH)
    settings = merge_settings(read_settings(DEMO_FILE), {"backend": "ray", "server": {"port": 0}})
    args = build_serve_args(settings)
    plan_model(args.engine, has_gpu=stages_have_gpu(args.engine))
    console.print(describe(args))
    results = _serve_and_compare(with_port(args, free_port(args.server)), console, job)
    _print_table(results, console)
    return 0 if all(result.is_equal for result in results) else 1


def _serve_and_compare(args: ServeArgs, console: Console, job: DemoJob) -> list[Comparison]:
    with ExitStack() as stack:
        with _phase(console, "starting Ray, two stages and the drafters (half a minute)"):
            stack.enter_context(serve_on_ray(args))
            client = DemoClient(base_url(args), args.model_name, job.max_tokens)
            stack.callback(client.close)
            prompts = held_out_prompts(job.num_prompts)
            for speculative in (False, True):
                _drain(client.stream(prompts[0].text, DemoRun(), speculative=speculative))
        results = _compare_all(client, prompts, args, console)
        with _phase(console, "shutting down"):
            stack.close()
    return results


def _phase(console: Console, text: str) -> AbstractContextManager[object]:
    """Shows what goes on: a spinner on a terminal, a line elsewhere."""
    if console.is_terminal:
        return console.status(text)
    console.print(text)
    return nullcontext()


def _compare_all(
    client: DemoClient, prompts: Sequence[HeldOutPrompt], args: ServeArgs, console: Console
) -> list[Comparison]:
    sources = [drafter.source for drafter in args.engine.drafters]
    styles = dict(zip(sources, COLOURS, strict=False))
    legend = Text("each token in the colour of what proposed it: target")
    for source in sources:
        legend.append(", ").append(source, style=styles.get(source, ""))
    console.print(legend)
    results = []
    for prompt in prompts:
        plain, drafted = DemoRun(), DemoRun()
        _drain(client.stream(prompt.text, plain, speculative=False))
        console.print(Text(f"── {prompt.name}", style="bold"))
        printer = _Printer(console, styles, MAX_LINES // len(prompts))
        printer.show(
            prompt.text.splitlines()[-1] + ("\n" if prompt.text.endswith("\n") else ""), "dim"
        )
        for piece in client.stream(prompt.text, drafted, speculative=True):
            printer.show_piece(piece)
        printer.finish()
        results.append(Comparison(prompt.name, plain, drafted))
    return results


def _drain(pieces: Iterable[Piece]) -> None:
    for _ in pieces:
        pass


class _Printer:
    """Prints pieces as they come, at most `num_lines` lines of the console's width."""

    def __init__(self, console: Console, styles: Mapping[str, str], num_lines: int) -> None:
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


def _print_table(results: Sequence[Comparison], console: Console) -> None:
    total = _total(results)
    sources = sorted(total.drafted.accepted)
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("prompt", max_width=30, no_wrap=True)
    titles = ["plain tok/s", "drafted tok/s", "speedup", "tau", "same text"]
    for title in [*titles, *(f"by {source}" for source in sources)]:
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(*_row(result, sources))
    if len(results) > 1:
        table.add_row(*_row(total, sources), style="bold")
    console.print(table)
    num_equal = sum(result.is_equal for result in results)
    console.print(f"{num_equal} of {len(results)} texts are the same with drafting off and on")


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


def _total(results: Sequence[Comparison]) -> Comparison:
    return Comparison(
        "all",
        _sum([result.plain for result in results]),
        _sum([result.drafted for result in results]),
    )


def _sum(runs: Sequence[DemoRun]) -> DemoRun:
    """Several runs as one; its tau is weighted by verification steps (tokens / tau)."""
    tokens = sum(run.num_tokens for run in runs)
    steps = sum(run.num_tokens / run.tau for run in runs)
    accepted: Counter[str] = Counter()
    for run in runs:
        accepted.update(run.accepted)
    return DemoRun(
        text="\n".join(run.text for run in runs),
        num_tokens=tokens,
        seconds=sum(run.seconds for run in runs),
        tau=tokens / steps if steps else 1.0,
        accepted=accepted,
    )
