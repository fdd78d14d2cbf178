"""`draftline lossless --shadow`: what a server found that repeats requests of its own."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from ....core.errors import ConfigError
from .job import LosslessJob

FAMILY, RESULT = "draftline:shadow_requests", "result"
MEANINGS = {
    "same": "every token is the target's own",
    "near_tie": "differ where two scores are within rounding",
    "differs": "differ where they are not: a fault",
    "unknown": "differ, and parameters of the request change scores",
    "failed": "the repetition ended with an error",
    "skipped": "others were waiting, or a repetition was running",
}
TIMEOUT_S = 10.0


def run_shadow(job: LosslessJob, console: Console) -> int:
    """Print the counts; 1 where an answer differs that should not, or none was compared yet.

    Raises `ConfigError`.
    """
    counts = _counts(job)
    table = Table("requests", "result", "meaning", box=None)
    for result, meaning in MEANINGS.items():
        table.add_row(f"{counts.get(result, 0):,}", result, meaning)
    console.print(table)
    compared = sum(counts.get(name, 0) for name in ("same", "near_tie", "differs", "unknown"))
    if not compared:
        console.print("none was compared yet; is the server's shadow_rate above 0?")
    return int(not compared or bool(counts.get("differs")))


def _counts(job: LosslessJob) -> Mapping[str, int]:
    if job.base_url is None:
        raise ConfigError("shadow", "is what a server counted: give its --base-url")
    url = job.base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    headers = {} if job.api_key is None else {"Authorization": f"Bearer {job.api_key}"}
    try:
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise ConfigError("base-url", f"{url} does not answer: {error}") from error
    counts: dict[str, int] = {}
    try:
        families = [f for f in text_string_to_metric_families(answer.text) if f.name == FAMILY]
    except ValueError as error:
        raise ConfigError("base-url", f"{url} has no metrics of draftline") from error
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.endswith("_total"):
            result = sample.labels[RESULT]
            counts[result] = counts.get(result, 0) + int(sample.value)
    if not families:
        raise ConfigError("base-url", f"{url} has no {FAMILY}_total: it is no draftline server")
    return counts
