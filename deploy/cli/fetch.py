"""`draftline fetch`, and its question where a command names a public model that is not here yet."""

from __future__ import annotations

import sys

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


def offer_to_fetch(name: object, console: Console) -> None:
    """Ask whether to fetch the public model that a command names; nothing where it is here.

    Without a terminal nothing is asked: loading the model says what to do.
    """
    if not isinstance(name, str) or name not in PUBLIC_MODELS or is_fetched(name):
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    model = PUBLIC_MODELS[name]
    question = f"{name} is not on this machine. Fetch it ({model.megabytes} MB, {model.licence})?"
    if typer.confirm(question, default=True):
        run_fetch(name, console)
