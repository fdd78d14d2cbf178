"""docs/serving.md has a row for every setting, with its field's description, and no other."""

from __future__ import annotations

import pytest
from draftline.cluster.checked_settings import Settings
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.deploy.settings.pool_settings import PoolConfig
from draftline.deploy.settings.settings import DeploymentConfig, ServerConfig
from support.tools.pages import DOCS, sections

PAGE = DOCS / "serving.md"


@pytest.mark.parametrize(
    ("heading", "settings"),
    [
        ("Engine", EngineConfig),
        ("Drafters", DrafterConfig),
        ("Pools", PoolConfig),
        ("`server`", ServerConfig),
        ("`deployment`", DeploymentConfig),
    ],
)
def test_every_setting_has_a_row(heading: str, settings: type[Settings]) -> None:
    lines = sections(PAGE, level=3)[heading].splitlines()
    rows = [line.split(" | ", 2) for line in lines if line.startswith("| `")]
    told = {row[0]: row[2].removesuffix(" |") for row in rows}
    assert told == {f"| `{name}`": info.description for name, info in settings.model_fields.items()}
