"""Commands whose flags are made from classes of settings, and the options that they share.

The classes are imported when the command is used or asked for its help: `draftline --help` waits
for none of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ...cluster.removed_settings import REMOVED_SETTINGS, removed_value

if TYPE_CHECKING:
    from .flags import FlagGroup

Model = Annotated[
    str | None,
    typer.Argument(
        help="Model folder, GGUF file, hub id or smollm2. Default: the bundled demo model.",
        metavar="MODEL",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; flags override it.")
]
Speculative = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='Drafters as JSON, such as \'[{"kind": "spectra"}]\'; [] switches drafting off.',
    ),
]


class FlagCommand(TyperCommand):
    """A command with the flags of `groups` beside its function's own parameters.

    The function reads those that were given from `ctx.obj`: class -> field -> value. A field gets
    no flag where the function has a parameter of its name, or `left_out` names it.
    """

    left_out: tuple[str, ...] = ()

    @abstractmethod
    def groups(self) -> Sequence[FlagGroup]:
        """The groups of flags, in the order of the help."""

    @cached_property
    def _flags(self) -> list[tuple[Any, type]]:
        """Every flag with the class of its field."""
        from .flags import flag_options  # noqa: PLC0415 - it waits for pydantic

        left_out = {*self.left_out, *(parameter.name for parameter in self.params)}
        flags = [
            (option, group.kind)
            for group in self.groups()
            for option in flag_options(group, left_out)
        ]
        names = [option.name for option, _ in flags]
        assert len(set(names)) == len(names), "two classes have a field of one name"
        return flags

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters of the command, its flags last."""
        return [*super().get_params(ctx), *(option for option, _ in self._flags)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer does. Removed flags and values are refused with what to use instead."""
        for argument, following in zip_longest(args, args[1:]):
            flag, _, value = argument.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            removed = removed_value(name, value or following)
            if name in REMOVED_SETTINGS:
                removed = f"was removed; {REMOVED_SETTINGS[name]}"
            if flag.startswith("--") and removed is not None:
                raise typer.BadParameter(removed, param_hint=f"'{flag}'")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the function, with the given flags in `ctx.obj`."""
        given: dict[type, dict[str, Any]] = {kind: {} for _, kind in self._flags}
        for option, kind in self._flags:
            value = ctx.params.pop(option.name)
            if value is not None:
                given[kind][option.name] = value
        ctx.obj = given
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the parameters under the headings of their groups."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            if record is not None:
                sections.setdefault("Arguments" if is_argument else panel, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
