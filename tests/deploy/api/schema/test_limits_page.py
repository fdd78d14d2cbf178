"""Every limit that can be set is on docs/operations.md or docs/serving.md with its default."""

from __future__ import annotations

import re

import pytest
from draftline.cluster.config import EngineConfig
from draftline.deploy.settings.settings import DeploymentConfig, RequestLimits, ServerConfig
from support.tools.pages import DOCS

LINES = [
    line
    for page in ("operations.md", "serving.md")
    for line in (DOCS / page).read_text("utf-8").splitlines()
]
NAMES = re.compile(r"(max_|_timeout|_timeout_s$|_timeout$)")
# Sizes of the engine, not answers to a client.
SIZES = {
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "limits",
    "drain_timeout_s", "graceful_shutdown_timeout_s",
}  # fmt: skip


def settings() -> list[tuple[str, object]]:
    found = [(f"limits.{name}", one.default) for name, one in RequestLimits.model_fields.items()]
    for model in (EngineConfig, ServerConfig, DeploymentConfig):
        found += [
            (name, one.default)
            for name, one in model.model_fields.items()
            if NAMES.search(name) and name not in SIZES
        ]
    return found


@pytest.mark.parametrize(("name", "default"), settings())
def test_a_limit_is_on_the_page(name: str, default: object) -> None:
    lines = [line for line in LINES if f"{name}`" in line]
    assert lines, f"{name} is on neither page"
    number = f"{default:g}" if isinstance(default, float) else str(default)
    spellings = {number, f"{default:,}" if isinstance(default, int) else number}
    if isinstance(default, int) and default % 2**20 == 0:
        spellings.add(f"{default // 2**20} MiB")
    assert any(f" {spelling}" in line for spelling in spellings for line in lines), lines
