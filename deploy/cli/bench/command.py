"""`draftline bench`: what speculation brings; `draftline lossless`: that it changes nothing."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy, torch and openai

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..serve.options import ConfigFile, Model, Speculative, Stages, command_settings

console = Console(highlight=False, soft_wrap=True)

BaseUrl = Annotated[
    str | None,
    typer.Option(help="Measure this OpenAI-compatible server instead of an engine in here."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="DRAFTLINE_API_KEY", help="Bearer token for the server.")
]
Drafters = Annotated[
    str | None,
    typer.Option(
        help="Settings parted by commas: a drafter, several joined by +, or all. "
        "Default: each drafter alone, then all.",
    ),
]


def bench(  # noqa: PLR0913 - one parameter a flag
    model: Model = None,
    *,
    config: ConfigFile = None,
    pipeline_parallel_size: Stages = None,
    speculative_config: Speculative = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines in Spec-Bench's form (turns), HumanEval's (task_id, prompt) or ours "
            "(name, prompt). Default: the bundled held-out prompts."
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of a round, spread evenly over the file.")
    ] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling and of the arrival times.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers go on to --max-tokens after an end token.")
    ] = True,
    concurrency: Annotated[
        int | None, typer.Option(help="Most requests at once. Default: 1; no limit at a rate.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean requests a second, at Poisson times.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every setting runs.")] = 3,
    drafters: Drafters = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="spectra: the rows of SPECTRA's tables and their recent peers, trees of 60 nodes "
            "unless --config says otherwise."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Of the suite: a store of the documents of lowest perplexity."),
    ] = None,
    unrefined_store: Annotated[
        str | None,
        typer.Option(help="Of the suite: a store of as many documents of any perplexity."),
    ] = None,
    one_engine: Annotated[
        bool,
        typer.Option(
            "--one-engine",
            help="All settings share one engine, with drafters where the settings put them: for "
            "models too large to load once for each. Drafters that a setting leaves out then take "
            "time still, as on a server.",
        ),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Also keep the target's own answers in this file, for --replay."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Take prompts and answers from this file and run no target: tau of any drafters "
            "in a fraction of the time. Times are then those of the engine without a target."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    output: Annotated[Path | None, typer.Option(help="JSON file of all figures.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots.")] = None,
) -> None:
    """Measure the target alone, each drafter and all of them on the same requests.

    With --base-url, MODEL is the name that the server knows. On a server that is not draftline's,
    only latencies and throughputs are measured. Exits 1 if any answer differs from the target's.
    """
    from ....measure.clients.load import Load
    from .job import BenchJob
    from .run import run_bench

    if concurrency is None and request_rate is None:
        concurrency = 1
    job = BenchJob(
        prompts=prompts,
        num_prompts=num_prompts,
        drafters=drafters,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        rounds=rounds,
        load=Load(concurrency=concurrency, request_rate=request_rate, seed=seed),
        base_url=base_url,
        model=model,
        api_key=api_key,
        one_engine=one_engine,
        record=record,
        replay=replay,
        output=output,
        plots=plots,
    )
    flags = {"model": model, "pipeline_parallel_size": pipeline_parallel_size}
    settings = {} if base_url else command_settings(flags, config, speculative_config)
    if suite is not None:
        from .suite import Stores, with_suite

        stores = Stores(store, unrefined_store)
        job, settings = with_suite(job, settings, suite, stores, console.print)
    sys.exit(run_bench(job, settings, console))


def lossless(  # noqa: PLR0913 - one parameter a flag
    base_url: Annotated[str, typer.Option(help="A running draftline server.")],
    *,
    model: Annotated[str | None, typer.Option(help="Name that the server knows.")] = None,
    api_key: ApiKey = None,
    drafters: Drafters = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines, as for bench. Default: the bundled prompts.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of every check.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    concurrency: Annotated[int, typer.Option(min=2, help="Requests at once, beside alone.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the distribution check.")] = 200,
    output: Annotated[Path | None, typer.Option(help="JSON file of the report.")] = None,
) -> None:
    """Check on a live server that speculation changes no answer and no distribution.

    Exits 1 and lists the differences if anything differs.
    """
    from .lossless_run import LosslessJob, run_lossless

    job = LosslessJob(
        base_url=base_url,
        model=model,
        api_key=api_key,
        drafters=drafters,
        prompts=prompts,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        concurrency=concurrency,
        seeds=seeds,
        output=output,
    )
    sys.exit(run_lossless(job, console))
