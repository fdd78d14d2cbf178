"""Pages have a row for every setting, with its field's description, and no other."""

from __future__ import annotations

import re

import pytest
from draftline.cluster.checked_settings import Settings
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.deploy.settings.ray_settings import PoolConfig
from draftline.deploy.settings.settings import DeploymentConfig, ServerConfig
from draftline.deploy.settings.tenants import TenantConfig
from support.tools.pages import DOCS, sections

SERVING = sections(DOCS / "serving.md", level=3)
TENANTS = sections(DOCS / "operations.md")["Tenants"]
ROW = re.compile(r"^\| `(\w+)` \|.*? \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (SERVING["Engine"], EngineConfig),
        (SERVING["Drafters"], DrafterConfig),
        (SERVING["Pools"], PoolConfig),
        (SERVING["`server`"], ServerConfig),
        (SERVING["`deployment`"], DeploymentConfig),
        (TENANTS, TenantConfig),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_setting_has_a_row(section: str, settings: type[Settings]) -> None:
    told = dict(ROW.findall(section))
    assert told == {name: info.description for name, info in settings.model_fields.items()}
