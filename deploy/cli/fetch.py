"""`draftline fetch`, and what other commands do where a model must be fetched or unpacked first."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console

from ...core.errors import CheckpointError
from ...models.load.public_models import PUBLIC_MODELS, fetch, is_fetched
from .progress import progress


def run_fetch(name: str, console: Console) -> None:
    """Fetch a public model. Raises `CheckpointError`."""
    model = PUBLIC_MODELS.get(name)
    if model is None:
        raise CheckpointError(f"no public model {name!r}; there are {', '.join(PUBLIC_MODELS)}")
    if is_fetched(name):
        console.print(f"{name} is here already")
        return
    label = f"fetching {name} ({model.megabytes} MB)"
    with progress(label, total=None, unit="steps") as work:
        fetch(name, on_step=lambda step: work.advance(1, step))
    console.print(f"serve it: draftline serve {name}")


def make_ready(name: object, console: Console) -> None:
    """Unpack the GGUF file that a command names, or ask whether to fetch the public model; nothing
    where that was done.

    Without a terminal nothing is asked: loading the model says what to do. Raises
    `CheckpointError`.
    """
    if isinstance(name, str) and name.endswith(".gguf") and Path(name).is_file():
        from ...models.load.gguf_file import unpacked  # noqa: PLC0415 - loads torch

        with progress(f"unpacking {Path(name).name}", total=1, unit="files"):
            unpacked(Path(name))
        return
    if not isinstance(name, str) or name not in PUBLIC_MODELS or is_fetched(name):
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    model = PUBLIC_MODELS[name]
    question = f"{name} is not on this machine. Fetch it ({model.megabytes} MB, {model.licence})?"
    if typer.confirm(question, default=True):
        run_fetch(name, console)
