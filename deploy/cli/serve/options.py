"""Options that several commands of `draftline` share, and the settings that they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        help="Model folder or hub id. Default: the bundled demo model.", metavar="MODEL"
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; flags override it.")
]
Stages = Annotated[
    int | None,
    typer.Option("--pipeline-parallel-size", "-pp", help="Stages that the layers are cut into."),
]
Speculative = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='Drafters as JSON, such as \'[{"kind": "spectra"}]\'; [] switches drafting off.',
    ),
]


def command_settings(
    flags: dict[str, Any], config: Path | None, speculative_config: str | None
) -> dict[str, Any]:
    """Settings of the file under those of the flags; the demo's where neither names a model.

    Raises `ConfigError`.
    """
    # The command line's help must not wait for pydantic and what it validates.
    from ...settings.settings import DEMO_FILE, merge_settings, read_settings  # noqa: PLC0415
    from .speculative_config import read_speculative_config  # noqa: PLC0415

    settings = read_settings(config) if config is not None else {}
    if settings.get("model") is None and flags.get("model") is None:
        settings = read_settings(DEMO_FILE) | settings
    if speculative_config is not None:
        settings |= read_speculative_config(speculative_config)
    return merge_settings(settings, flags)
