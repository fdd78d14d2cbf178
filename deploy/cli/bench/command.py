"""`draftline bench`: what speculation brings; `draftline lossless`: that it changes nothing."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy, torch and openai

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ....core.errors import ConfigError
from ..flag_command import ConfigFile, FlagCommand, Model, Speculative

if TYPE_CHECKING:
    from ..flags import FlagGroup
    from .job import BenchJob, LosslessJob

console = Console(highlight=False, soft_wrap=True)


class BenchCommand(FlagCommand):
    """`bench`, whose flags are a `BenchJob`'s fields and the settings of an engine."""

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the measurement, then those of the engine."""
        from ..serve.options import ENGINE
        from .job import BENCH

        return BENCH, ENGINE


class LosslessCommand(FlagCommand):
    """`lossless`, whose flags are a `LosslessJob`'s fields and the settings of an engine."""

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the checks, then those of the engine."""
        from ..serve.options import ENGINE
        from .job import LOSSLESS

        return LOSSLESS, ENGINE


def bench(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    speculative_config: Speculative = None,
) -> None:
    """Measure the target alone, each drafter and all of them on the same requests.

    With --base-url, MODEL is the name that the server knows. On a server that is not draftline's,
    only latencies and throughputs are measured. Exits 1 if any answer differs from the target's.
    """
    from .job import BenchJob
    from .run import run_bench
    from .suites import with_suite

    job = BenchJob(model=model, **ctx.obj[BenchJob])
    settings = _engine_settings(ctx, job, config, speculative_config)
    _check_belongings(job)
    job = job.for_target(settings.get("model", "demo"), ctx.obj[BenchJob])
    if job.suite is not None:
        job, settings = with_suite(job, settings, console.print)
    sys.exit(run_bench(job, settings, console))


def _engine_settings(
    ctx: typer.Context,
    job: BenchJob | LosslessJob,
    config: Path | None,
    speculative_config: str | None,
) -> dict[str, Any]:
    """Settings of the engine in this process; empty with --base-url.

    Raises `ConfigError` where there are both.
    """
    from ....cluster.config import EngineConfig
    from ..serve.options import command_settings

    flags = ctx.obj[EngineConfig]
    if job.base_url is None:
        return command_settings({"model": job.model, **flags}, config, speculative_config)
    if flags or config or speculative_config:
        raise ConfigError("base-url", "a server has its own engine: leave out an engine's settings")
    return {}


def _check_belongings(job: BenchJob) -> None:
    """Raise `ConfigError` for a flag that needs another flag."""
    for field, suite in (("profile", "spectra"), ("heads", "heads")):
        if getattr(job, field) is not None and job.suite != suite:
            raise ConfigError(field.replace("_", "-"), f"belongs to a suite: --suite {suite}")
    for field in ("small_model", "host_slowdown"):
        if getattr(job, field) is not None and job.cost_profile is None:
            raise ConfigError(
                field.replace("_", "-"), "belongs to simulated times: give --cost-profile"
            )
    if job.suite_rows is not None and job.suite is None:
        raise ConfigError("suite-rows", "belongs to a suite: give --suite")


def lossless(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    speculative_config: Speculative = None,
) -> None:
    """Check that speculation changes no answer and no distribution of a model.

    The model runs in this process, with every draft that there is room for (node_budget: full)
    where no setting says otherwise. With --base-url a running draftline server is checked, and
    MODEL is the name that it knows. Exits 1 and lists the differences if anything differs.
    """
    from .job import LosslessJob
    from .run import run_lossless, run_shadow

    job = LosslessJob(model=model, **ctx.obj[LosslessJob])
    settings = _engine_settings(ctx, job, config, speculative_config)
    sys.exit(run_shadow(job, console) if job.shadow else run_lossless(job, settings, console))
