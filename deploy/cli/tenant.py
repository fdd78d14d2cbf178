"""`draftline tenant`: its commands, over a file or a Redis database of tenants."""

# ruff: noqa: PLC0415 - the command line's help must not wait for pydantic and redis

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .flag_command import FlagCommand

if TYPE_CHECKING:
    from ..tenants import TenantStore
    from .flags import FlagGroup

tenant_app = typer.Typer(
    help="Create, change and end the keys of tenants, while servers run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
console = Console(highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="DRAFTLINE_TENANT_STORE",
        help="File (.yaml or .json) or redis:// URL; servers name it as server.tenant_store. A URL "
        "with a password goes into the variable, which no process list shows.",
    ),
]
# Their flags would be settings of a server: a store holds digests.
OWN = ("name", "key_sha256", "key_env", "key_file")
# Digits of a digest that name a key.
SHOWN_DIGITS = 12


class TenantCommand(FlagCommand):
    """A command whose flags are a tenant's settings."""

    left_out = OWN

    def groups(self) -> Sequence[FlagGroup]:
        """The flags of a tenant."""
        from ..settings.tenants import TenantConfig
        from .flags import FlagGroup

        return (FlagGroup(title="Tenant", kind=TenantConfig),)


@tenant_app.command(cls=TenantCommand)
def create(
    ctx: typer.Context,
    name: Name,
    *,
    store: Store,
    key: Annotated[
        bool,
        typer.Option(
            "--key/--no-key", help="--no-key: for one that only a gateway names (x-tenant-id)."
        ),
    ] = True,
) -> None:
    """Add a tenant, and print its key: the only time that it is shown."""
    from ..tenants import create_tenant

    made = create_tenant(_open(store), name, _given(ctx), with_key=key)
    if made is not None:
        _show_key(made.text)


@tenant_app.command("list")
def list_tenants(
    *,
    store: Store,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one tenant a line.")] = False,
) -> None:
    """List tenants with their settings and the first digits of their keys' digests."""
    from ..tenants import checked_tenants

    opened = _open(store)
    table = Table("tenant", "keys", "settings", box=None, pad_edge=False)
    for tenant in checked_tenants(opened.read(), opened.where):
        keys = [digest[:SHOWN_DIGITS] for digest in tenant.key_sha256]
        settings = tenant.model_dump(mode="json", exclude=set(OWN), exclude_defaults=True)
        if as_json:
            sys.stdout.write(f"{json.dumps({'name': tenant.name, 'keys': keys, **settings})}\n")
        else:
            table.add_row(tenant.name, " ".join(keys) or "none", _spelled(settings))
    if not as_json:
        console.print(table)


@tenant_app.command()
def rotate(
    name: Name,
    *,
    store: Store,
    keep_old: Annotated[
        bool,
        typer.Option(
            "--keep-old", help="Let the old keys work until tenant revoke NAME --key ends them."
        ),
    ] = False,
) -> None:
    """Give a tenant a new key, and print it. Its old keys work no more."""
    from ..tenants import rotate_key

    _show_key(rotate_key(_open(store), name, keep_old=keep_old).text)


@tenant_app.command()
def revoke(
    name: Name,
    *,
    store: Store,
    key: Annotated[
        str | None,
        typer.Option(
            help="First digits of one key's digest, as tenant list shows them. Default: all keys, "
            "and the tenant itself."
        ),
    ] = None,
) -> None:
    """End a tenant with all of its keys, or one key of it. Running requests continue."""
    from ..tenants import revoke_key

    removed = revoke_key(_open(store), name, key)
    keys = ", ".join(digest[:SHOWN_DIGITS] for digest in removed) or "none"
    what = f"tenant {name}" if key is None else f"a key of {name}"
    console.print(f"revoked {what}; keys that work no more: {keys}")


@tenant_app.command("set", cls=TenantCommand)
def set_settings(
    ctx: typer.Context,
    name: Name,
    *,
    store: Store,
    unset: Annotated[
        list[str] | None,
        typer.Option(help="Setting that gets its default again; may be repeated."),
    ] = None,
) -> None:
    """Change limits and rights of a tenant; others stay."""
    from ...core.errors import ConfigError
    from ..settings.tenants import TenantConfig
    from ..tenants import set_tenant

    given, names = _given(ctx), [text.replace("-", "_") for text in unset or ()]
    known = [field for field in TenantConfig.model_fields if field not in OWN]
    for field in names:
        if field not in known:
            raise ConfigError("unset", f"{field!r} is no setting; known: {', '.join(known)}")
    if not given and not names:
        raise ConfigError("set", "names nothing to change; see tenant set --help")
    set_tenant(_open(store), name, given, names)
    console.print(f"changed {name}: {', '.join(sorted({*given, *names}))}")


def _given(ctx: typer.Context) -> dict[str, Any]:
    """The settings of the flags that were given, as plain values."""
    from ..settings.tenants import TenantConfig

    given: Mapping[str, Any] = ctx.obj[TenantConfig]
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in given.items()
    }


def _open(store: str) -> TenantStore:
    from ..tenants import open_tenant_store

    return open_tenant_store(store)


def _show_key(text: str) -> None:
    """The key alone on stdout, so that a pipe takes it to where secrets are kept."""
    sys.stdout.write(f"{text}\n")
    sys.stderr.write("this key is not kept and cannot be shown again\n")


def _spelled(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={','.join(value) if isinstance(value, list) else value}"
        for name, value in settings.items()
    )
