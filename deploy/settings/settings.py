"""Settings of a server: YAML files and overrides; unknown keys are refused.

A file holds the engine's settings at its top (`cluster/config.py`), and those of the HTTP server,
of the Ray Serve deployments and of pools of drafters under `server`, `deployment` and `pools`.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import ConfigDict, Field, field_validator, model_validator

from ...cluster.checked_settings import Settings, unknown_key
from ...cluster.config import EngineConfig
from ...core.errors import ConfigError, RequestError
from .ray_settings import DeploymentConfig, PoolConfig
from .tenants import (
    TenantConfig,
    operator_keys,
    read_tenants,
    require_distinct,
    require_known_by,
)

AtLeastOne = Annotated[int, Field(ge=1)]


class RequestLimits(Settings):
    """Limits of one request. What exceeds one is refused with 400, before any work is done on it.

    The defaults leave room for every use we know of, and bound what a request can cost the
    others: the event loop's time, memory, and the engine's time between two steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    max_prompts: AtLeastOne = Field(default=256, description="prompts of a completion")
    max_prompt_chars: AtLeastOne = Field(
        default=1_000_000, description="characters of all prompts, or of all messages, together"
    )

    # Fixed: far beyond every use we know of.
    # Answers: n times the prompts.
    max_answers: ClassVar[int] = 256
    # Messages of a chat.
    max_messages: ClassVar[int] = 4096
    # Numbers, texts, lists and objects of a body together.
    max_json_values: ClassVar[int] = 250_000
    # Lists and objects within each other in one field.
    max_json_depth: ClassVar[int] = 64
    # Parts of all messages' contents together.
    max_content_parts: ClassVar[int] = 8192
    # Tools of a chat.
    max_tools: ClassVar[int] = 128
    # Bytes of all tools together, as JSON.
    max_tools_bytes: ClassVar[int] = 262_144
    # Stop texts.
    max_stop_texts: ClassVar[int] = 16
    # Characters of one stop text.
    max_stop_chars: ClassVar[int] = 4096
    # Characters of all stop texts together.
    max_stop_chars_total: ClassVar[int] = 16_384
    # Ids in each of stop_token_ids, allowed_token_ids and banned_token_ids.
    max_listed_tokens: ClassVar[int] = 16_384
    # Entries of logit_bias.
    max_logit_biases: ClassVar[int] = 1024
    # Bytes of a JSON schema, regular expression, grammar or list of choices.
    max_grammar_bytes: ClassVar[int] = 65_536
    # Texts of a list of choices.
    max_choices: ClassVar[int] = 1024
    # Log-probabilities of the prompts in an answer: for every token of every prompt and choice its
    # own, and those of prompt_logprobs others.
    max_logprob_entries: ClassVar[int] = 200_000
    # Log-probabilities of all answers: for every token that max_tokens allows its own, and those of
    # logprobs others.
    max_answer_logprobs: ClassVar[int] = 4_000_000
    # Token ids of one call of /detokenize.
    max_detokenize_tokens: ClassVar[int] = 131_072
    # Texts of bad_words.
    max_bad_words: ClassVar[int] = 256
    # Names of speculative.drafters.
    max_named_drafters: ClassVar[int] = 64

    def require(self, name: str, given: int, field: str, unit: str) -> None:
        """Raise `RequestError` for `field` where `given` exceeds the limit of this name.

        `unit`: what is counted, in the plural.
        """
        most = getattr(self, name)
        if given > most:
            where = f" (limits.{name} of the server)" if name in type(self).model_fields else ""
            raise RequestError(field, f"{given} {unit}; at most {most} are allowed{where}")


DEFAULT_LIMITS = RequestLimits()


ToolParserName = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParserName = Literal["none", "deepseek_r1", "qwen3"]
REDIS_SCHEMES = ("redis://", "rediss://")
# The server's application on Ray Serve.
APP_NAME = "draftline"
# The default drafters need no training, and are not asked where they do not pay.
DEFAULT_DRAFTERS = ({"kind": "suffix"}, {"kind": "prompt_lookup"})


class ServerConfig(Settings):
    """The HTTP server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant_store: str | None = Field(
        default=None,
        description="file or redis:// URL of further tenants, as draftline tenant keeps them; "
        "changes apply within about a second",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="networks of gateways that may name the tenant in x-tenant-id, such as "
        "10.0.0.0/8; from elsewhere the header is refused",
    )
    rate_limit_store: str | None = Field(
        default=None,
        description="redis:// URL that counts rates and concurrency of tenants for several "
        "replicas; default: in memory",
    )
    rate_limit_on_failure: Literal["open", "closed"] = Field(
        default="open",
        description="what tenants with limits get while that Redis does not answer; open: no "
        "limits, closed: 503",
    )
    usage_log: str | None = Field(
        default=None,
        description="file (JSON lines) or redis:// URL (a stream) for a record of each request "
        "that ends: tenant and counts, no text",
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; 0.0.0.0: all interfaces"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8000, description="port to listen on; 0: the system chooses"
    )
    api_keys: tuple[str, ...] = Field(
        default=(),
        description="bearer tokens of the operator, whose requests use the namespace shared. "
        "Without keys and tenants nothing is checked. Command lines are visible to "
        "other users: use DRAFTLINE_API_KEY or api_key_file. Only digests are kept",
    )
    tenants: tuple[TenantConfig, ...] = Field(
        default=(), description="tenants, each with keys and a namespace of its own"
    )
    request_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=600.0,
        description="longest time of a request, with its time in the queue; then 408. null: no "
        "limit",
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        default=20.0, description="how long running requests may take when the server stops"
    )
    ignore_unknown_fields: bool = Field(
        default=False,
        description="ignore unknown fields of a request and name them in the header "
        "x-draftline-ignored-fields, instead of a 400",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=4 * 1024 * 1024, description="largest body; a longer one gets 413"
    )
    limits: RequestLimits = Field(
        default=RequestLimits(), description="what one request may hold; more gets 400"
    )
    min_priority: int = Field(
        default=0,
        description="lowest priority value for the operator's requests, and for all requests "
        "without keys; lower values go first, so 0 lets no request go before others",
    )
    tool_call_parser: ToolParserName = Field(
        default="auto",
        description="how the model writes tool calls; auto: from its chat template",
    )
    reasoning_parser: ReasoningParserName = Field(
        default="none", description="how the model marks its reasoning, which answers then separate"
    )
    trust_request_chat_template: bool = Field(
        default=False,
        description="accept a chat template in a request. A template is code: it runs in a "
        "sandbox with a time limit, but may use much memory",
    )

    allow_unauthenticated: bool = Field(
        default=False,
        description="listen beyond this machine without any key",
    )
    api_key_sha256: tuple[str, ...] = Field(
        default=(),
        description="SHA-256 of the operator's keys, in hexadecimal; holds the digests of all "
        "keys after loading",
    )
    api_key_env: tuple[str, ...] = Field(
        default=(), description="environment variables that hold one key of the operator each"
    )
    api_key_file: tuple[str, ...] = Field(
        default=(), description="files with keys of the operator, one a line"
    )
    api_processes: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1,
        description="HTTP processes beside the engine's process; they share the port and "
        "max_connections. 0: one process for both. On Ray use num_ingress_replicas",
    )
    max_connections: Annotated[int, Field(ge=1)] = Field(
        default=1024,
        description="open connections; a further one closes the longest idle one, or gets 503",
    )
    stream_interval_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="each event of a stream but the last has exactly so many tokens, whatever "
        "was drafted",
    )
    stream_interval_ms: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="events of a stream leave at multiples of this time, whatever was drafted",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="format of the lines on stderr; json: one object a line"
    )
    log_requests: bool = Field(
        default=False,
        description="log each request and each answer: ids, times and counts, no text",
    )
    otlp_traces_endpoint: str | None = Field(
        default=None,
        description="OpenTelemetry collector that receives spans by HTTP, such as "
        "http://127.0.0.1:4318/v1/traces; needs the extra otel",
    )
    trace_sample_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="share of the requests that have spans, if no traceparent decides; their "
        "trees are not pipelined",
    )
    live_page: bool = Field(
        default=True,
        description="serve the page at /ui, on which an operator watches drafts; its data needs"
        " the operator's key",
    )
    cors_allow_origins: tuple[str, ...] = Field(
        default=(), description="web sites whose pages may call the API; *: all; empty: no CORS"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        # Plain keys are dropped here, before the settings are shown, sent or stored.
        return {**values, **operator_keys(values)}

    @field_validator("limits", mode="before")
    @classmethod
    def _read_limits(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return _build(RequestLimits, "limits", value)

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ConfigError("trusted_proxies", f"{text!r} is no network: {error}") from error
        return value

    @field_validator("rate_limit_store")
    @classmethod
    def _check_redis(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(REDIS_SCHEMES):
            raise ConfigError("rate_limit_store", "must be a redis:// or rediss:// URL")
        return value

    @field_validator("tenants", mode="before")
    @classmethod
    def _read_tenants(cls, value: Any) -> Any:
        return read_tenants(value)

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        require_known_by(self.tenants, names_suffice=bool(self.trusted_proxies))
        require_distinct(self.api_key_sha256, self.tenants)
        return self

    @property
    def has_keys(self) -> bool:
        """Whether callers need keys; without them every request is served."""
        named = self.tenants or self.tenant_store or self.trusted_proxies
        return bool(self.api_key_sha256 or named)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """All settings of a served model; `pools` by their applications' names."""

    engine: EngineConfig
    server: ServerConfig
    deployment: DeploymentConfig
    pools: Mapping[str, PoolConfig] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.engine.name


def read_settings(file: Path | str) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises `ConfigError` naming the file and line."""
    try:
        data = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{file} is not a text file: {error.reason}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError("config", f"{file}{where}: {problem}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("config", f"{file} must hold a mapping of settings")
    return data


def build_serve_args(settings: Mapping[str, Any]) -> ServeArgs:
    """Validated settings: the engine's at the top, `server`, `deployment` and `pools` below.

    Without `drafters` they are the `DEFAULT_DRAFTERS`; an empty list asks for plain decoding.
    Raises `ConfigError` naming the field, with the nearest known key for an unknown one.
    """
    if "models" in settings:
        raise ConfigError("models", "are for Ray Serve: serve run deploy/models.yaml")
    engine = {"drafters": DEFAULT_DRAFTERS, **settings}
    server = _section(engine, "server")
    deployment = _section(engine, "deployment")
    pools = _section(engine, "pools")
    known = [*EngineConfig.model_fields, "server", "deployment", "pools"]
    for key in engine:
        if key not in known:
            raise unknown_key(key, key, known)
    config = EngineConfig(**engine)
    args = ServeArgs(
        engine=config,
        server=_build(ServerConfig, "server", server),
        deployment=_build(DeploymentConfig, "deployment", deployment),
        pools={name: _pool(config, name, values) for name, values in pools.items()},
    )
    replicas = args.deployment
    if args.engine.trace_steps and (replicas.num_replicas > 1 or replicas.autoscaling_config):
        raise ConfigError("trace_steps", "one file cannot hold the steps of several replicas")
    return args


def merge_settings(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with every value of `over` that is not None; mappings are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            merged[key] = merge_settings(merged.get(key) or {}, value)
        elif value is not None:
            merged[key] = value
    return {key: value for key, value in merged.items() if value != {}}


def parse_json(field: str, text: str) -> Any:
    """JSON given on the command line. Raises `ConfigError` with the column at fault."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            field, f"not valid JSON ({error.msg} at column {error.colno}); quote it for the shell"
        ) from error


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.pop(name, None) or {}
    if not isinstance(section, dict):
        raise ConfigError(name, "must be a mapping")
    return section


def _pool(engine: EngineConfig, name: str, values: Any) -> PoolConfig:
    """A pool for this engine's model."""
    field = f"pools.{name}"
    if engine.backend != "ray":
        raise ConfigError(field, "needs backend: ray")
    if name in {"", APP_NAME}:
        raise ConfigError(field, f"is no name for a pool: {APP_NAME!r} is the server's application")
    if not isinstance(values, dict):
        raise ConfigError(field, "must be a mapping")
    return _build(PoolConfig, field, {"target": engine.model, **values})


def _build(kind: type[Any], name: str, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.field}", error.message) from error


KEY_VARIABLE = "DRAFTLINE_API_KEY"
KEY_FLAG = "--api-key"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at `host`; a name other than localhost is not.

    An empty host is every address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_keys(config: ServerConfig, host: str) -> None:
    """Raise `ConfigError` where others than this machine's users would be served without a key."""
    if config.has_keys or config.allow_unauthenticated or is_loopback(host):
        return
    raise ConfigError(
        "server.host",
        f"{host!r} is reached from other machines, and no API key is set: set {KEY_VARIABLE}, "
        "server.api_key_file or server.tenants, or say --allow-unauthenticated "
        "(server.allow_unauthenticated) to serve without keys",
    )


def check_key_variable(environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the variable is there but empty: it would open the server to all."""
    if not environment.get(KEY_VARIABLE, KEY_VARIABLE).strip():
        raise ConfigError(KEY_VARIABLE, "is set but empty; give it a key, or unset it")


def without_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its keys, and the keys.

    Every user of a machine sees the command lines of all processes, and Ray's job table shows that
    of the driver; a process's environment is its owner's.
    """
    rest: list[str] = []
    keys: list[str] = []
    values = iter(arguments)
    for argument in values:
        name, is_joined, value = argument.partition("=")
        if name == KEY_FLAG:
            keys.append(value if is_joined else next(values, ""))
        else:
            rest.append(argument)
    return rest, keys
