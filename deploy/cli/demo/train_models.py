"""Trains the bundled language models: `python -m draftline.deploy.cli.demo.train_models`.

Runs resume from `training/runs/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....training.demo_models import MODELS, build
from ..progress import progress

ROOT = Path(__file__).parents[3]


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to train; default: all.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Train the bundled demo models; an interrupted run goes on where it stopped."""
    for name in names or MODELS:
        folder = ROOT / "deploy" / "assets" / "models" / name
        run_dir = ROOT / "training" / "runs" / name
        perplexity = build(MODELS[name], run_dir, folder, threads, progress)
        typer.echo(f"{name}: held-out perplexity {perplexity:.2f}, written to {folder}")


if __name__ == "__main__":
    typer.run(main)
