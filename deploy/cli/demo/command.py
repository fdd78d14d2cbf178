"""`draftline demo`: the served system at work, with drafting off and on."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....cluster.engine.assembly import plan_model
from ....core.errors import ConfigError, DraftlineError
from ....core.request.output import TARGET_SOURCE
from ....models.load.checkpoint import answers_chats
from ...engine.placement import stages_have_gpu
from ...ray_serve.runtime import quiet_libraries, serve_on_ray
from ...settings.settings import ServeArgs, build_serve_args
from ..serve.command import base_url, compile_cpu_kernels, describe, with_port
from ..serve.listening import free_port
from .prompts import QUESTIONS, DemoPrompt, held_out_prompts

# Asked first, so that every part is warm: none of the prompts, whose answers drafters would know.
WARM_UP = "Name three colours."
# A first request may wait for every part to warm up on a busy machine.
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DemoSampling:
    """What every completion of the demo is asked with; a temperature of 0 is greedy."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class DemoRun:
    """One completion. `seconds` is from sending the request to its last token."""

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    tau: float = 1.0
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Speed as a client sees it."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class DraftedText:
    """Text that one token made final, and the source that proposed the token."""

    text: str
    source: str


class DemoClient:
    """A client of one server. Not for several threads."""

    def __init__(
        self, base_url: str, model: str, sampling: DemoSampling, *, is_chat: bool = False
    ) -> None:
        """`is_chat`: prompts are questions of a chat, whose answers end where the model ends."""
        self._client = httpx.Client(base_url=base_url, timeout=TIMEOUT_S)
        self._is_chat = is_chat
        self._body = {
            "model": model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": not is_chat,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def stream(self, prompt: str, run: DemoRun, *, speculative: bool) -> Iterator[DraftedText]:
        """Pieces of an answer as they come; fills `run`. Raises `DraftlineError`."""
        body = self._body | {"speculative": {"enabled": speculative, "report": True}}
        if self._is_chat:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
        else:
            path, body["prompt"] = "/v1/completions", prompt
        begin = time.perf_counter()
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise DraftlineError(response.read().decode())
            for event in _events(response):
                if event["choices"]:
                    choice = event["choices"][0]
                    run.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    run.num_tokens += len(event["draftline"]["token_ids"])
                    run.seconds = time.perf_counter() - begin
                    report = event["draftline"]
                    for text, source in zip(report["texts"], report["sources"], strict=True):
                        yield DraftedText(text, source)
                else:
                    _read_metrics(event["metrics"]["speculative_decoding"], run)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise DraftlineError(event["error"]["message"])
        yield event


def _read_metrics(block: dict[str, Any], run: DemoRun) -> None:
    run.tau = block["mean_acceptance_length"]
    for source, counts in block["by_source"].items():
        run.accepted[source] += counts["num_accepted_tokens"]


@dataclass(frozen=True, slots=True)
class DemoComparison:
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


def total(results: Sequence[DemoComparison]) -> DemoComparison:
    """All prompts as one."""
    return DemoComparison(
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

    def stream(self, prompt: DemoPrompt, num_prompts: int) -> StreamPrinter:
        """Print a prompt's name and last line; the printer takes its completion."""
        self._console.print(Text(f"── {prompt.name}", style="bold"))
        printer = StreamPrinter(self._console, self._styles, MAX_LINES // num_prompts)
        ending = "\n" if prompt.is_question or prompt.text.endswith("\n") else ""
        printer.show(prompt.text.splitlines()[-1] + ending, "dim")
        return printer

    def table(self, results: Sequence[DemoComparison], sampling: DemoSampling) -> None:
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

    def show_piece(self, piece: DraftedText) -> None:
        """Print a token's text in the colour of its source."""
        style = "" if piece.source == TARGET_SOURCE else self._styles.get(piece.source, "")
        self.show(piece.text, style)

    def show(self, text: str, style: str) -> None:
        """Print text as far as there is room."""
        for char_run in text.expandtabs(4).splitlines(keepends=True):
            line = char_run.rstrip("\r\n")
            if self._column and self._column + len(line) > WIDTH:
                self._end_line()
                line = line.lstrip()
            if not self._lines_left:
                return
            line = line[:WIDTH]
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


def _comparison_table(results: Sequence[DemoComparison]) -> Table:
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


def _row(result: DemoComparison, sources: Sequence[str]) -> list[str]:
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
        return "greedy: a small model repeats itself, and repeated text is easily drafted"
    return (
        f"sampled at temperature {sampling.temperature:g}, seed {sampling.seed}; "
        "--greedy shows text that repeats, where drafts fit best"
    )


@dataclass(frozen=True, slots=True)
class DemoJob:
    """Which model to show, how much, how its tokens are chosen, and where a picture of it goes."""

    num_prompts: int
    sampling: DemoSampling
    svg: Path | None = None
    model: str = "demo"

    @property
    def is_chat(self) -> bool:
        """Whether the model is asked questions, and not to continue code."""
        return answers_chats(self.model)

    @property
    def prompts(self) -> list[DemoPrompt]:
        """What is asked."""
        return QUESTIONS[: self.num_prompts] if self.is_chat else held_out_prompts(self.num_prompts)


def run_demo(job: DemoJob) -> int:
    """Run it; 0 if all texts were equal, else 1. Raises `DraftlineError`."""
    if job.svg is not None and not job.svg.absolute().parent.is_dir():
        raise ConfigError("svg", f"folder {job.svg.parent} does not exist")
    quiet_libraries()
    screen = Screen()
    # The parts of a cluster: two stages, and the default drafters (docs/decisions.md).
    args = build_serve_args(
        {"model": job.model, "pipeline_parallel_size": 2, "backend": "ray", "server": {"port": 0}}
    )
    plan_model(args.engine, has_gpu=stages_have_gpu(args.engine))
    screen.line(describe(args))
    results = _serve_and_compare(with_port(args, free_port(args.server)), screen, job)
    screen.table(results, job.sampling)
    if job.svg is not None:
        screen.save_svg(job.svg)
    return 0 if all(result.is_equal for result in results) else 1


def _serve_and_compare(args: ServeArgs, screen: Screen, job: DemoJob) -> list[DemoComparison]:
    compile_cpu_kernels(args.engine)
    with ExitStack() as stack:
        with screen.phase("starting Ray, two stages and the drafters (half a minute)"):
            stack.enter_context(serve_on_ray(args))
            client = DemoClient(base_url(args), args.model_name, job.sampling, is_chat=job.is_chat)
            stack.callback(client.close)
            prompts = job.prompts
            for speculative in (False, True):
                _drain(client.stream(WARM_UP, DemoRun(), speculative=speculative))
        screen.legend([drafter.source for drafter in args.engine.drafters])
        results = compare_all(client, prompts, screen)
        with screen.phase("shutting down"):
            stack.close()
    return results


def compare_all(
    client: DemoClient, prompts: Sequence[DemoPrompt], screen: Screen
) -> list[DemoComparison]:
    """Complete every prompt plainly, then with drafts, which is what the screen shows."""
    results = []
    for prompt in prompts:
        plain, drafted = DemoRun(), DemoRun()
        _drain(client.stream(prompt.text, plain, speculative=False))
        printer = screen.stream(prompt, len(prompts))
        for piece in client.stream(prompt.text, drafted, speculative=True):
            printer.show_piece(piece)
        printer.finish()
        results.append(DemoComparison(prompt.name, plain, drafted))
    return results


def _drain(pieces: Iterable[DraftedText]) -> None:
    for _ in pieces:
        pass
