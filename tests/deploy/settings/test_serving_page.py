"""docs/serving.md names every setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig, Settings
from draftline.deploy.settings.settings import DeploymentConfig, ServerConfig

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.mark.parametrize("settings", [EngineConfig, DrafterConfig, ServerConfig, DeploymentConfig])
def test_every_setting_has_a_row(settings: type[Settings]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [name for name in settings.model_fields if f"\n| `{name}` |" not in text]
    assert not missing
