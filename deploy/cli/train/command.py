"""`draftline train`: its commands and their flags."""

# ruff: noqa: PLC0415 - the command line's help must not wait for torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..flag_command import FlagCommand

if TYPE_CHECKING:
    from ..flags import FlagGroup

train_app = typer.Typer(
    help="Train drafters of a target: heads, and small models.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip
console = Console(highlight=False, soft_wrap=True)
# Each has a recipe in `job.RECIPES`, which the help must not wait for.
KINDS = {
    "griffin": "Train a GRIFFIN head.",
    "hass": "Train an EAGLE head with replaced context (HASS).",
    "eagle2": "Train an EAGLE head.",
    "fspad": "Train an FSPAD head.",
    "eagle3": "Train an EAGLE-3 head.",
    "specformer": "Train a SpecFormer.",
    "medusa": "Train Medusa's heads.",
    "dflash": "Train a DFlash drafter.",
    "dspark": "Train a DSpark drafter.",
    "p_eagle": "Train a P-EAGLE drafter.",
    "model": "Distil a small model to the target.",
}


class DataCommand(FlagCommand):
    """`train data`, whose flags are a `DataJob`'s fields and some settings of its engine."""

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the texts, then those of the engine."""
        from .job import DATA
        from .texts import ENGINE

        return DATA, ENGINE


class HeadCommand(FlagCommand):
    """`train griffin` and its siblings, whose flags are a `HeadJob`'s fields and of an engine's
    settings those of `STAGES`."""

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of the training, then those of the target's stages."""
        from .job import HEAD
        from .stages import STAGES

        return HEAD, STAGES

    def get_params(self, ctx: Any) -> list[Any]:
        """All of them; those of other kinds are refused by name, and the help leaves them out."""
        from .job import has_flag

        options = super().get_params(ctx)
        for option in options:
            option.hidden = option.hidden or not has_flag(self.name or "", option.name)
        return options


@train_app.command(cls=DataCommand)
def data(ctx: typer.Context) -> None:
    """Let a target answer prompts, with speculation, and keep what it says."""
    from ....cluster.config import EngineConfig
    from .job import DataJob
    from .texts import make_texts

    make_texts(DataJob(**ctx.obj[DataJob]), ctx.obj[EngineConfig], console)


@train_app.command()
def export(
    head: Annotated[str, typer.Argument(help="Folder or hub id of an EAGLE-3 head.")],
    *,
    model: Annotated[str, typer.Option(help="Its target.")] = "demo",
    output: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write an EAGLE-3 head as vLLM and SGLang load it, with its output head."""
    from .export import export_published

    export_published(head, model, output)
    console.print(f"eagle3 head in {output}")


def _head_command(kind: str) -> Callable[[typer.Context], None]:
    def train(ctx: typer.Context) -> None:
        from ....cluster.config import EngineConfig
        from .fit import fit_head
        from .job import HeadJob, head_job
        from .stages import with_stages

        job = with_stages(head_job(kind, ctx.obj[HeadJob]), ctx.obj[EngineConfig])
        fit_head(kind, job, console)

    return train


for _kind, _help in KINDS.items():
    train_app.command(_kind, cls=HeadCommand, help=_help)(_head_command(_kind))
