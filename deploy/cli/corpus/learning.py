"""`draftline corpus learn|forget`: what is learned of a tenant, and what is kept of it."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy and torch

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console

from .command import SHARED, Store

learning_app = typer.Typer()
console = Console(highlight=False, soft_wrap=True)


@learning_app.command()
def learn(
    namespace: Annotated[str, typer.Argument(help="Whose texts: one tenant's name.")],
    *,
    store: Store,
    on: Annotated[
        bool,
        typer.Option(
            "--on/--off",
            help="--off: no server learns of it from now on, whatever its settings; what was "
            "learned stays until corpus forget. --on: servers with learn: true may.",
            show_default=False,
        ),
    ],
) -> None:
    """Say in the store itself whether a namespace may be learned. It may until it is forbidden."""
    from ....retrieval_store.serving.open_store import open_policy

    with closing(open_policy(store, writes=True)) as policy:
        policy.switch(namespace, learns=on)
    console.print(f"learning of {namespace} is {'allowed' if on else 'off'} in this store")


@learning_app.command()
def forget(
    namespace: Annotated[str, typer.Argument(help="Whose data: one tenant's name, or shared.")],
    *,
    store: Store,
    keep_learning: Annotated[
        bool,
        typer.Option(
            "--keep-learning",
            help="Do not switch learning off; requests that end later are learned again.",
        ),
    ] = False,
) -> None:
    """Switch learning of a namespace off, delete all of it, and verify that nothing is left."""
    from ....retrieval_store.learning.erasure import forget_namespace
    from ....retrieval_store.serving.open_store import open_eraser, open_policy

    switches = not keep_learning and namespace != SHARED
    with closing(open_eraser(store)) as eraser, closing(open_policy(store, writes=True)) as policy:
        count = forget_namespace(eraser, namespace, policy if switches else None)
        is_off = namespace in policy.off()
    console.print(f"forgot {namespace}: {count} entries deleted, nothing is left")
    if is_off:
        console.print(f"learning stays off; draftline corpus learn {namespace} --on allows it")
