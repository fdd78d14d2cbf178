"""Commands whose flags are made from classes of settings, and the options that they share.

The classes are imported when the command is used or asked for its help: `draftline --help` waits
for none of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from .flags import FlagGroup

Model = Annotated[
    str | None,
    typer.Argument(
        help="Model folder or hub id. Default: the bundled demo model.", metavar="MODEL"
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
    def _kinds(self) -> dict[str, type]:
        """The class of every flag's field, by the field's name; the flags join `params`."""
        from .flags import flag_options  # noqa: PLC0415 - it waits for pydantic

        left_out = {*self.left_out, *(parameter.name for parameter in self.params)}
        kinds: dict[str, type] = {}
        for group in self.groups():
            for option in flag_options(group, left_out):
                assert option.name not in kinds, f"two classes have a field {option.name}"
                kinds[option.name] = group.kind
                self.params.append(option)
        return kinds

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters of the command."""
        assert self._kinds, "a command of this class has flags"
        return super().get_params(ctx)

    def invoke(self, ctx: Any) -> Any:
        """Run the function, with the given flags in `ctx.obj`."""
        given: dict[type, dict[str, Any]] = {kind: {} for kind in self._kinds.values()}
        for name, kind in self._kinds.items():
            value = ctx.params.pop(name)
            if value is not None:
                given[kind][name] = value
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
