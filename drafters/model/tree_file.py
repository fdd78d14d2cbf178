"""Reads static trees from JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .tree_shape import (
    FIELD,
    TreeShape,
    shape_of_paths,
    shape_of_top_next_tokens,
    shape_of_widths,
)


def read_tree_shape(path: Path) -> TreeShape:
    """A shape from a JSON file. Raises `ConfigError` naming the file.

    Medusa's and EAGLE's form is a list of paths, or that under `choices`. Sequoia's growth map has
    `TopNextTokens`, the children of each node, whose first is the root. `widths` is SpecInfer's.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    try:
        if isinstance(data, list):
            return shape_of_paths(data)
        if "choices" in data:
            return shape_of_paths(data["choices"])
        if "widths" in data:
            return shape_of_widths(data["widths"])
        return shape_of_top_next_tokens(data["TopNextTokens"])
    except (ConfigError, TypeError, KeyError, IndexError) as error:
        forms = "a list of paths, or has choices, widths or Top next tokens"
        raise ConfigError(FIELD, f"{path} is no tree ({forms}): {error}") from error
