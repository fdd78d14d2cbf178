"""`draftline generate`: one prompt, in this process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from ...core.request.output import Delta
from ...core.request.sampling_params import SamplingParams
from ..engine.async_engine import AsyncEngine
from ..ray_serve.runtime import quiet_libraries
from ..settings.settings import build_serve_args
from .progress import progress


def run_generate(settings: Mapping[str, Any], prompt: str, params: SamplingParams) -> None:
    """Stream the continuation to stdout, statistics to stderr. Raises `DraftlineError`."""
    quiet_libraries()
    args = build_serve_args({**settings, "backend": "local"})
    asyncio.run(_generate(AsyncEngine(args.engine, progress=progress), prompt, params))


async def _generate(engine: AsyncEngine, prompt: str, params: SamplingParams) -> None:
    await engine.start()
    last: Delta | None = None
    begin = time.perf_counter()
    try:
        async for delta in engine.stream(prompt, params):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            last = delta
    finally:
        await engine.close()
    sys.stdout.write("\n")
    if last is None or last.metrics is None:
        return
    metrics = last.metrics
    by_source = ", ".join(f"{name} {count}" for name, count in metrics.accepted_by_source.items())
    speed = metrics.generated_tokens / (time.perf_counter() - begin)
    sys.stderr.write(
        f"{metrics.generated_tokens} tokens, {speed:.0f} tokens/s, "
        f"tau {metrics.acceptance_length:.2f}, accepted: {by_source or 'none'}\n"
    )
