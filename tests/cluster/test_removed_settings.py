"""What draftline had once is refused by what to use instead."""

from typing import Any

import pytest
from draftline.cluster.checked_settings import Settings
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.cluster.removed_settings import REMOVED_SETTINGS
from draftline.core.errors import ConfigError
from draftline.deploy.settings.ray_settings import DeploymentConfig, PoolConfig
from draftline.deploy.settings.settings import RequestLimits, ServerConfig


def test_an_engine_s_settings() -> None:
    with pytest.raises(ConfigError, match="head_features: was removed; leave it out: stages"):
        EngineConfig(model="demo", head_features="sums")


@pytest.mark.parametrize(
    "kind", [EngineConfig, ServerConfig, DeploymentConfig, PoolConfig, RequestLimits]
)
@pytest.mark.parametrize("name", REMOVED_SETTINGS)
def test_a_name_that_left_is_refused(kind: type[Settings], name: str) -> None:
    assert name not in kind.model_fields
    with pytest.raises(ConfigError, match=f"{name}: was removed; {REMOVED_SETTINGS[name][:12]}"):
        kind(**{name: 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cascade"}, "kind: 'cascade' was removed; list its drafters themselves"),
        ({"kind": "model", "weights": "int4"}, "weights: 'int4' was removed; use int8"),
        ({"kind": "model", "vocabulary": "union"}, "vocabulary: 'union' was removed; use tli"),
        ({"kind": "model", "chat_template": "own"}, "chat_template: was removed; leave it out"),
        ({"kind": "head", "replay_features": True}, "replay_features: was removed; leave it out"),
        ({"kind": "head", "token_map": "demo"}, "token_map: was removed; leave it out"),
        ({"kind": "suffix", "window": 9}, "window: was removed; leave it out: the latest"),
        ({"kind": "suffix", "max_spec_offset": 1}, "max_spec_offset: was removed; use max_spec_f"),
        ({"kind": "model", "prefill_chunk": 9}, "prefill_chunk: was removed; leave it out"),
        ({"kind": "spectra", "forward": False}, "forward: was removed; leave it out: both dict"),
        ({"kind": "head", "tree_size": "full"}, "tree_size: was removed; leave it out: a head's"),
        ({"kind": "model", "stop": "schedule"}, "stop: 'schedule' was removed; use goodput"),
        ({"kind": "model", "ahead": True}, "ahead: was removed; use tree: dynamic or sequoia"),
        (
            {"kind": "retrieval", "server": "host:1,host:2", "learn": True, "token_file": "/token"},
            r"server: was removed; use transport: grpc and address: \[host:port, ...\] of drafter",
        ),
    ],
)
def test_a_drafter_s_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(DrafterConfig(**settings))
