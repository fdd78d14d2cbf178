"""Settings from a file and flags, and `--speculative-config` in our form or in vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....cluster.checked_settings import unknown_key
from ....cluster.config import EngineConfig
from ....core.errors import ConfigError
from ...settings.settings import (
    KEY_FLAG,
    KEY_VARIABLE,
    ServerConfig,
    merge_settings,
    parse_json,
    read_settings,
)
from ..flags import FlagGroup

ENGINE = FlagGroup(
    title="Engine",
    kind=EngineConfig,
    names={"pipeline_parallel_size": ("--pipeline-parallel-size", "-pp")},
)
SERVER = FlagGroup(
    title="Server",
    kind=ServerConfig,
    names={
        # The flag that `without_keys` takes out of the command line: a key has no other one.
        "api_keys": (KEY_FLAG,),
        "cors_allow_origins": ("--cors-allow-origin",),
        "request_timeout_s": ("--request-timeout-s", "--request-timeout"),
        "drain_timeout_s": ("--drain-timeout-s", "--drain-timeout"),
    },
    variables={"api_keys": KEY_VARIABLE},
)

FIELD = "speculative-config"
OWN_KEYS = ("drafters", "tree_nodes", "node_budget", "acceptance", "draft_deadline_ms")
# vLLM's method -> our kind.
METHODS = {"ngram": "prompt_lookup", "draft_model": "model", "suffix": "suffix"}
# vLLM's key -> the option of our kind.
OPTIONS = {
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "model": "model",
    "suffix_decoding_max_tree_depth": "max_match_len",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}


def read_speculative_config(text: str) -> dict[str, Any]:
    """Engine settings (those of `OWN_KEYS`) from JSON.

    A list is the drafters; an object has our keys, or vLLM's `method` and its keys.
    Raises `ConfigError`.
    """
    data = parse_json(FIELD, text)
    if isinstance(data, list):
        return {"drafters": data}
    if not isinstance(data, dict):
        raise ConfigError(FIELD, "must be a list of drafters or an object")
    if "method" in data:
        return {"drafters": [_from_vllm(data)]}
    for key in data:
        if key not in OWN_KEYS:
            raise unknown_key(FIELD, key, [*OWN_KEYS, "method"])
    return data


def _from_vllm(data: Mapping[str, Any]) -> dict[str, Any]:
    method = data["method"]
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ConfigError(
            f"{FIELD}.method", f"{method!r} is not supported; known: {known}; or list drafters"
        )
    drafter: dict[str, Any] = {"kind": METHODS[method]}
    for key, value in data.items():
        if key == "method":
            continue
        if key not in OPTIONS:
            raise unknown_key(FIELD, key, [*OPTIONS, "method"])
        drafter[OPTIONS[key]] = value
    return drafter


def command_settings(
    flags: dict[str, Any], config: Path | None, speculative_config: str | None
) -> dict[str, Any]:
    """Settings of the file under those of the flags.

    Raises `ConfigError`.
    """
    settings = read_settings(config) if config is not None else {}
    if speculative_config is not None:
        settings |= read_speculative_config(speculative_config)
    return merge_settings(settings, flags)
