"""Settings of a server of several models: a list under `models`, and shared ones beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import ConfigError
from .ray_settings import DeploymentConfig
from .settings import ServeArgs, ServerConfig, build_serve_args, merge_settings

MODELS = "models"
# Fields of `server` that a model may set; the others are shared.
MODEL_SERVER_FIELDS = ("tool_call_parser", "reasoning_parser")
# Fields of `deployment` that a model may not set: there is one ingress.
INGRESS_FIELDS = ("num_ingress_replicas", "ingress_cpus")
# Ray Serve takes any name, but marks parts of its own names by some characters.
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
ENGINE_NAME = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppArgs:
    """All settings of an application.

    server      the HTTP server's settings
    deployment  the ingress's
    models      each with its own engine, deployment and, in its server's settings, parsers
    """

    server: ServerConfig
    deployment: DeploymentConfig
    models: tuple[ServeArgs, ...]

    @classmethod
    def of(cls, args: ServeArgs) -> AppArgs:
        """An application of one model."""
        return cls(server=args.server, deployment=args.deployment, models=(args,))

    def engine_name(self, model: ServeArgs) -> str:
        """The name of a model's deployment, which is the same whatever others there are."""
        return ENGINE_NAME if len(self.models) == 1 else _engine_name(model.model_name)


def build_app_args(settings: Mapping[str, Any]) -> AppArgs:
    """Validated settings of one model, as `build_serve_args` takes them, or of several.

    Settings beside `models` are defaults of each model. Raises `ConfigError`
    naming the field.
    """
    if MODELS not in settings:
        return AppArgs.of(build_serve_args(settings))
    shared = {name: value for name, value in settings.items() if name != MODELS}
    for name in ("model", "served_model_name"):
        if name in shared:
            raise ConfigError(name, f"stands in each of {MODELS}, not beside them")
    entries = settings[MODELS]
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(MODELS, "must be a list of models, each with the keys of a server's file")
    whole = build_serve_args(shared)
    models = tuple(_model(shared, index, entry) for index, entry in enumerate(entries))
    _require_distinct(models)
    return AppArgs(
        server=whole.server,
        deployment=whole.deployment,
        # Keys are read once, in one place.
        models=tuple(
            replace(model, server=_with_parsers(whole.server, model.server)) for model in models
        ),
    )


def _model(shared: Mapping[str, Any], index: int, entry: object) -> ServeArgs:
    field = f"{MODELS}[{index}]"
    if not isinstance(entry, Mapping) or "model" not in entry:
        raise ConfigError(f"{field}.model", "is missing")
    _require_own(field, entry)
    defaults = {name: value for name, value in shared.items() if name != "server"}
    try:
        return build_serve_args(merge_settings(defaults, entry))
    except ConfigError as error:
        raise ConfigError(f"{field}.{error.field}", error.message) from error


def _require_own(field: str, entry: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a model has settings that are shared by all models."""
    if "pools" in entry:
        raise ConfigError(f"{field}.pools", "are applications of their own: deploy/pool.yaml")
    server = [name for name in _section(field, entry, "server") if name not in MODEL_SERVER_FIELDS]
    for name in server:
        own = ", ".join(MODEL_SERVER_FIELDS)
        raise ConfigError(f"{field}.server.{name}", f"goes beside {MODELS}; a model's own: {own}")
    for name in INGRESS_FIELDS:
        if name in _section(field, entry, "deployment"):
            raise ConfigError(f"{field}.deployment.{name}", f"goes beside {MODELS}")


def _section(field: str, entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = entry.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{field}.{name}", "must be a mapping")
    return section


def _with_parsers(server: ServerConfig, model: ServerConfig) -> ServerConfig:
    given = {
        name: getattr(model, name) for name in MODEL_SERVER_FIELDS if name in model.model_fields_set
    }
    return server.model_copy(update=given)


def _require_distinct(models: Sequence[ServeArgs]) -> None:
    """Raise `ConfigError` where two models have one name, or one file of traces."""
    names: dict[str, int] = {}
    traces: dict[str, int] = {}
    for index, model in enumerate(models):
        field = f"{MODELS}[{index}]"
        first = names.setdefault(_engine_name(model.model_name), index)
        if first != index:
            raise ConfigError(
                f"{field}.served_model_name",
                f"{model.model_name!r} is, or is spelled much like, the name of {MODELS}[{first}]",
            )
        trace = model.engine.trace_steps
        if trace is not None and traces.setdefault(str(trace), index) != index:
            raise ConfigError(f"{field}.trace_steps", "one file cannot hold those of two models")


def _engine_name(model_name: str) -> str:
    return f"{ENGINE_NAME}-{NOT_IN_NAMES.sub('-', model_name)}"
