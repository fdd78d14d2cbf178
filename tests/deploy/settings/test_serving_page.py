"""docs/serving.md names every setting, and says of it what its field says."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline.cluster.checked_settings import Settings
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.deploy.settings.pool_settings import PoolConfig
from draftline.deploy.settings.settings import DeploymentConfig, ServerConfig

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.mark.parametrize(
    "settings", [EngineConfig, DrafterConfig, ServerConfig, DeploymentConfig, PoolConfig]
)
def test_every_setting_has_a_row(settings: type[Settings]) -> None:
    rows = [line.split(" | ", 2) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    told = {(row[0], row[2].removesuffix(" |")) for row in rows if len(row) == 3}
    fields = {(f"| `{name}`", info.description) for name, info in settings.model_fields.items()}
    assert not fields - told
