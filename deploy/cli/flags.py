"""Makes flags of a command from the fields of a class, by their type, default and description.

The class is a pydantic model, or a dataclass whose fields have a pydantic `Field` in `Annotated`.
A field without a description, or of a type that one flag cannot hold, gets none.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import typer.main
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

TEXTS = tuple[str, ...]
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagGroup:
    """Flags that stand together in the help, of the fields of one class.

    title      their heading
    kind       the class
    only       fields that get flags; None: all
    names      field -> its flags, where they are not the field's name with dashes
    variables  field -> environment variable that gives its value where the flag does not
    """

    title: str
    kind: type
    only: Collection[str] | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def flag_options(group: FlagGroup, left_out: Collection[str] = ()) -> list[Any]:
    """Options of Typer, one for each field of the group but those that are `left_out`.

    A flag that is not given is None, so that the default stays the class's own. A value is checked
    as the class would; a wrong one ends the command with code 2 and a message that names the flag.
    """
    parameters = [
        _parameter(name, info, group)
        for name, info in _fields(group.kind).items()
        if name not in left_out
        and (group.only is None or name in group.only)
        and info.description
        and _flag_type(info.annotation) is not None
    ]
    app = typer.Typer(add_completion=False)
    app.command()(_with_parameters(parameters))
    return typer.main.get_command(app).params


def _with_parameters(parameters: list[inspect.Parameter]) -> Callable[..., None]:
    def command(**_: Any) -> None:
        """A command that is never run: Typer reads its parameters."""

    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return command


def _fields(kind: type) -> dict[str, FieldInfo]:
    if issubclass(kind, BaseModel):
        return dict(kind.model_fields)
    hints = get_type_hints(kind, include_extras=True)
    return {
        member.name: FieldInfo.from_annotation(hints[member.name])
        if member.default is dataclasses.MISSING
        else FieldInfo.from_annotated_attribute(hints[member.name], member.default)
        for member in dataclasses.fields(kind)
    }


def _flag_type(annotation: Any) -> Any:
    """What Typer reads for a field of this type; None where one flag cannot hold it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _flag_type(parts[0])
    if origin in (Union, UnionType):
        types = [part for part in parts if part is not NoneType]
        return _flag_type(types[0]) if len(types) == 1 else None
    if annotation == TEXTS:
        return list[str]
    is_scalar = origin is Literal or annotation in (str, int, float, bool, Path)
    return annotation if is_scalar else None


def _parameter(name: str, info: FieldInfo, group: FlagGroup) -> inspect.Parameter:
    kind, flag = _flag_type(info.annotation), name.replace("_", "-")
    own_name = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    option = typer.Option(
        *group.names.get(name, (own_name,)),
        help=_help(info),
        envvar=group.variables.get(name),
        callback=_checked(info),
        rich_help_panel=group.title,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if info.is_required() else None,
        annotation=Annotated[kind if info.is_required() else kind | None, option],
    )


def _checked(info: FieldInfo) -> Callable[[Any], Any]:
    """A callback that turns a flag's value into the field's, or refuses it as pydantic does."""

    kind: Any = Annotated[info.annotation, info]  # pyright: ignore[reportInvalidTypeForm]

    def check(value: Any) -> Any:
        if value is None:
            return None
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise typer.BadParameter(error.errors()[0]["msg"]) from None

    return check


def _help(info: FieldInfo) -> str:
    text = info.description or ""
    if _flag_type(info.annotation) == list[str]:
        text += "; may be repeated"
    notes = [f"default: {_spelled(info.default)}"] if _has_shown_default(info) else []
    if bounds := ", ".join(_bounds(info)):
        notes.append(bounds)
    text = f"{text[0].upper()}{text[1:]}."
    return f"{text}  [{'; '.join(notes)}]" if notes else text


def _has_shown_default(info: FieldInfo) -> bool:
    return not info.is_required() and info.default not in (None, (), "")


def _spelled(default: object) -> str:
    """A default as a user would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(default) if isinstance(default, tuple) else f"{default}"


def _bounds(info: FieldInfo) -> Iterator[str]:
    """Bounds of a number, such as `>=1`; also those of `Annotated[int, Field(ge=1)] | None`."""
    parts = [part for part in get_args(info.annotation) if get_origin(part) is Annotated]
    nested = [limit for part in parts for note in get_args(part)[1:] for limit in note.metadata]
    for limit in (*info.metadata, *nested):
        for name, sign in SIGNS.items():
            if hasattr(limit, name):
                yield f"{sign}{getattr(limit, name):g}"
