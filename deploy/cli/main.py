"""The `draftline` command."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ... import __version__
from ...core.errors import DraftlineError, EngineFailed
from .bench.command import bench, lossless
from .corpus.command import corpus_app
from .corpus.learning import learning_app
from .corpus.upkeep import upkeep_app
from .serve.options import ConfigFile, Model, Speculative, Stages, command_settings

app = typer.Typer(
    name="draftline",
    help="Lossless speculative decoding for large language models, served on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (learning_app, upkeep_app):
    corpus_app.add_typer(part)
app.add_typer(corpus_app, name="corpus")
for command in (bench, lossless):
    app.command()(command)
console = Console(highlight=False, soft_wrap=True)

Backend = Annotated[
    str | None, typer.Option(help="local: this process; ray: Ray Serve. Default: local.")
]


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
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )


@app.command()
def serve(  # noqa: PLR0913 - one parameter a flag
    model: Model = None,
    *,
    config: ConfigFile = None,
    backend: Backend = None,
    pipeline_parallel_size: Stages = None,
    speculative_config: Speculative = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: the system chooses.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DRAFTLINE_API_KEY",
            help="Bearer token to ask for; may be repeated. All users of this machine see the "
            "command line: rather set DRAFTLINE_API_KEY, or give --api-key-file. Those of tenants "
            "are in the settings' file, server.tenants.",
        ),
    ] = None,
    api_key_file: Annotated[
        list[str] | None, typer.Option(help="File of bearer tokens, one a line; may be repeated.")
    ] = None,
    allow_unauthenticated: Annotated[
        bool | None,
        typer.Option(
            "--allow-unauthenticated",
            help="Without any key, listen beyond this machine all the same.",
        ),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Connections open at once. Default: 1024.")
    ] = None,
    stream_interval_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each event of a stream, whatever was drafted. Default: off."),
    ] = None,
    stream_interval_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds from event to event of a stream. Default: off."),
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web site whose pages may call the API, or *; may be repeated."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus answer, tokens.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Rows of one step.")] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="KV slots of every stage. Default: what a GPU has room for.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto or fp8.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory to use. Default: 0.9.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="Of weights: none or int8.")] = None,
    enforce_eager: Annotated[bool | None, typer.Option(help="No CUDA graphs.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    compile_: Annotated[
        str | None,
        typer.Option("--compile", help="on: compiled stages, slower to start; needs g++. Or off."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="coupled (the default: answers do not depend on drafts), rejection, block, "
            "traversal, k_seq, or typical, which is lossy."
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a request ends with 408. Default: 600."),
    ] = None,
    ignore_unknown_fields: Annotated[
        bool | None,
        typer.Option(
            "--ignore-unknown-fields",
            help="Leave out unknown fields of requests, where they would be refused with 400.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that running requests may take after SIGTERM or ctrl-c."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model calls tools: hermes (Qwen, too), llama3_json, mistral, none, or "
            "auto (the default): as its chat template tells."
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="How the model thinks: deepseek_r1, qwen3 or none (the default)."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--trust-request-chat-template",
            help="Let requests bring chat templates, which are code in a sandbox.",
        ),
    ] = None,
    trace_steps: Annotated[
        Path | None, typer.Option(help="File for one JSON line a step; see draftline trace.")
    ] = None,
    trace_steps_max_mb: Annotated[
        int | None,
        typer.Option(help="Most megabytes of that file and its older part, FILE.1. Default: 256."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Running Ray cluster, such as auto. Default: start one.")
    ] = None,
) -> None:
    """Serve a model with the OpenAI API."""
    from ..settings.exposure import check_key_variable
    from .serve.command import run_server

    check_key_variable(os.environ)
    flags = {
        "model": model,
        "backend": backend,
        "pipeline_parallel_size": pipeline_parallel_size,
        "served_model_name": served_model_name,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "gpu_memory_utilization": gpu_memory_utilization,
        "quantization": quantization,
        "enforce_eager": enforce_eager,
        "dtype": dtype,
        "device": device,
        "trace_steps": trace_steps,
        "trace_steps_max_mb": trace_steps_max_mb,
        "compile": compile_,
        "acceptance": acceptance,
        "server": {
            "host": host,
            "port": port,
            "api_keys": tuple(api_key) if api_key else None,
            "api_key_file": tuple(api_key_file) if api_key_file else None,
            "allow_unauthenticated": allow_unauthenticated,
            "max_connections": max_connections,
            "stream_interval_tokens": stream_interval_tokens,
            "stream_interval_ms": stream_interval_ms,
            "cors_allow_origins": tuple(cors_allow_origin) if cors_allow_origin else None,
            "request_timeout_s": request_timeout,
            "drain_timeout_s": drain_timeout,
            "ignore_unknown_fields": ignore_unknown_fields,
            "tool_call_parser": tool_call_parser,
            "reasoning_parser": reasoning_parser,
            "trust_request_chat_template": trust_request_chat_template,
        },
    }
    run_server(command_settings(flags, config, speculative_config), ray_address, console)


@app.command()
def generate(  # noqa: PLR0913 - one parameter a flag
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    *,
    model: Annotated[str | None, typer.Option(help="Model folder or hub id.")] = None,
    config: ConfigFile = None,
    pipeline_parallel_size: Stages = None,
    speculative_config: Speculative = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="One seed, one text.")] = None,
) -> None:
    """Continue one prompt and print the text as it comes; statistics go to stderr."""
    from ...core.request.sampling_params import SamplingParams
    from .generate import run_generate

    flags = {"model": model, "pipeline_parallel_size": pipeline_parallel_size}
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    run_generate(command_settings(flags, config, speculative_config), text, params)


@app.command()
def demo(
    *,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to show.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of the sampling.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 3,
    greedy: Annotated[bool, typer.Option("--greedy", help="Temperature 0.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture of the output here.")] = None,
) -> None:
    """Serve the bundled model, show speculation at work, compare, and shut down."""
    from .demo.client import DemoSampling
    from .demo.command import DemoJob, run_demo

    sampling = DemoSampling(max_tokens, 0.0 if greedy else temperature, seed)
    sys.exit(run_demo(DemoJob(prompts, sampling, svg)))


@app.command()
def trace(
    file: Annotated[
        Path, typer.Argument(help="What serve --trace-steps wrote; FILE.1 is read, too.")
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="PNG of the steps' timeline.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="First step. Default: the first.")] = None,
    to_step: Annotated[int | None, typer.Option(help="Last step. Default: the last.")] = None,
) -> None:
    """Summarise a step trace, and draw it: who worked on what, and where it waited."""
    from .trace.command import run_trace

    run_trace(file, output, (from_step, to_step), console)


@app.command()
def doctor() -> None:
    """Check this machine: versions, devices, services, models, and what would be picked."""
    from .doctor import run_doctor

    sys.exit(run_doctor(console))


def _hide_keys() -> None:
    """Start again with the keys of the command line in the environment."""
    from ..settings.exposure import KEY_VARIABLE, without_keys

    arguments, keys = without_keys(sys.orig_argv)
    # Keys in the variable are separated by spaces. What is no key gets its error message later.
    if keys and all(key.split() == [key] for key in keys):
        os.environ[KEY_VARIABLE] = " ".join(keys)
        os.execv(sys.executable, [sys.executable, *arguments[1:]])


def main() -> None:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    if sys.argv[1:2] == ["serve"]:
        _hide_keys()
    try:
        app()
    except DraftlineError as error:
        sys.stderr.write(f"error: {error}\n")
        # A supervisor starts the process again; a user's mistake would stay one.
        sys.exit(1 if isinstance(error, EngineFailed) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
