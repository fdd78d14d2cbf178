"""`draftline lossless`: all checks of one live server."""

from __future__ import annotations

import asyncio
import json

from rich.console import Console

from ....core.errors import ConfigError
from ....measure.clients.http_endpoint import HttpEndpoint
from ....measure.clients.setting import matched_settings
from ....measure.prompts.bench_prompt import spread
from ....measure.report.lossless_report import LosslessReport
from ....measure.runs.distribution import check_first_token, check_seeds
from ....measure.runs.lossless import check_answers
from .job import LosslessJob
from .prompts import bench_prompts


def run_lossless(job: LosslessJob, console: Console) -> int:
    """Check, print, write; 0 if nothing differs, else 1. Raises `DraftlineError`."""
    report = asyncio.run(_check(job, console))
    report.print(console)
    if job.output is not None:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        job.output.write_text(json.dumps(report.fields(), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {job.output}")
    return 0 if report.is_lossless else 1


async def _check(job: LosslessJob, console: Console) -> LosslessReport:
    prompts = spread(bench_prompts(job.prompts), job.num_prompts)
    tell = console.print if console.is_terminal else lambda _text: None
    async with HttpEndpoint(job.base_url, job.api_key) as endpoint:
        info = (await endpoint.connect(job.model)).info
        if not info.is_draftline:
            raise ConfigError("base-url", f"{job.base_url} is no draftline server")
        settings = matched_settings(info.drafters, job.drafters)
        if len(settings) == 1:
            raise ConfigError("base-url", f"{job.base_url} has no drafters, so nothing can differ")
        checks = await check_answers(
            endpoint,
            settings,
            prompts,
            max_tokens=job.max_tokens,
            together=job.concurrency,
            tell=tell,
        )
        tell("distribution")
        seeds = await check_seeds(
            endpoint, settings[0], settings[-1], seeds=job.seeds, together=job.concurrency
        )
        first = await check_first_token(endpoint, settings[-1], seeds=job.seeds)
    server = {"base_url": job.base_url, "model": info.model, "drafters": list(info.drafters)}
    return LosslessReport(server, checks, seeds, first)
