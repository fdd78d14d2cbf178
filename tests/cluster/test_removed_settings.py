"""What draftline had once is refused by what to use instead."""

from typing import Any

import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"kind": "cascade"}, "kind: 'cascade' was removed; list its drafters themselves")],
)
def test_a_drafter_s_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(DrafterConfig(**settings))
    with pytest.raises(ConfigError, match=rf"drafters\[0\]\.{message}"):
        EngineConfig(model="demo", drafters=[settings])
