"""`draftline doctor --cluster` and `--sizes`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from ....core.errors import CheckpointError, ConfigError
from ...ray_serve.runtime import quiet_libraries
from ..doctor import Finding, print_findings
from .checks import checks
from .expectations import expectations, target_size
from .probe import ClusterFacts, read_cluster

# Where draftline keeps compiled code, on each node.
CACHE = "~/.cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQuestion:
    """What is asked of a cluster.

    redis_env  environment variable with a URL that all nodes shall reach
    stages     None: as few as have room
    context    tokens of a request, prompt and answer
    """

    address: str
    model: str
    redis_env: str | None
    stages: int | None
    context: int


def run_cluster_doctor(console: Console, question: ClusterQuestion) -> int:
    """Print all findings; 1 if something needed is missing, else 0. Raises `ConfigError`."""
    quiet_libraries()
    url = redis_url(question.redis_env, os.environ)
    facts = read_cluster(question.address, question.model, CACHE, url)
    return print_findings(console, findings(facts, question))


def findings(facts: ClusterFacts, question: ClusterQuestion) -> list[Finding]:
    """What is there, and what to expect of it. Raises `ConfigError`."""
    found = [*checks(facts, question.model)]
    if not facts.nodes:
        return found
    has_gpus = any(node.gpus for node in facts.nodes)
    try:
        target = target_size(question.model, has_gpus=has_gpus)
    except CheckpointError as error:
        # The head may hold the only copy; then its own finding says more.
        return [*found, Finding("prediction", f"needs the model here, too: {error}", False, False)]
    return [*found, *expectations(facts, target, question.stages, question.context)]


def redis_url(name: str | None, environment: Mapping[str, str]) -> str | None:
    """The URL in this environment variable; None: none is asked for. Raises `ConfigError`."""
    if name is None:
        return None
    url = environment.get(name, "")
    if not url:
        raise ConfigError("redis-env", f"the environment variable {name} is not set, or empty")
    return url


def run_sizes(console: Console) -> None:
    """Print the table of docs/sizing.md."""
    from ....measure.simulate.sizing_table import markdown  # noqa: PLC0415

    console.print(markdown(), markup=False)
