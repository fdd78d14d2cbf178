"""Tenants of the HTTP API: their settings, and keys that are kept as digests only."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ...cluster.checked_settings import Settings
from ...core.errors import ConfigError

AtLeastOne = Annotated[int, Field(ge=1)]
SHA256 = re.compile(r"[0-9a-f]{64}")


class TenantConfig(Settings):
    """One tenant. Its plain keys are read when this is made and never kept.

    No error shows a value of the key fields: it might be a key in the wrong place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        # Repeated in each class, as in `cluster/config.py`.
        super().__init__(**values)

    name: str = Field(description="its name, also in metrics and usage records")
    key_sha256: tuple[str, ...] = Field(
        default=(),
        description="SHA-256 of its keys, in hexadecimal; holds the digests of all its keys "
        "after loading",
    )
    key_env: tuple[str, ...] = Field(
        default=(), description="environment variables that hold one plain key each"
    )
    key_file: tuple[str, ...] = Field(
        default=(), description="files that hold plain keys, one a line"
    )
    learn: bool = Field(
        default=True, description="false: drafters and stores do not learn from its requests"
    )
    min_priority: int = Field(
        default=0,
        description="lowest priority value for its requests; lower values go first, so a value "
        "below 0 lets it go before others",
    )
    namespace: str | None = Field(
        default=None,
        description="namespace of its retrieval data, learned texts and KV prefixes; default: "
        "its name",
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0, description="its share of the engine's time relative to other tenants"
    )
    requests_per_minute: AtLeastOne | None = Field(
        default=None, description="requests in a minute; further ones get 429"
    )
    tokens_per_minute: AtLeastOne | None = Field(
        default=None,
        description="tokens of prompts and answers in a minute; a prompt that does not fit gets "
        "429, and answers count as they come",
    )
    max_concurrency: AtLeastOne | None = Field(
        default=None, description="requests in progress at once; further ones get 429"
    )
    max_context: AtLeastOne | None = Field(
        default=None, description="most tokens of a request, prompt and answer together"
    )
    models: tuple[str, ...] | None = Field(
        default=None, description="models that it may use; others get 403; default: all"
    )
    drafters: tuple[str, ...] | None = Field(
        default=None,
        description="names of drafters that may draft for it; a request that names another gets"
        " 403; default: all",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = {name: _texts(name, values.get(name)) for name in KEY_FIELDS}
        digests = _all_digests(values, KEY_FIELDS)
        return values | given | {"key_sha256": digests}

    @field_validator("name", "namespace")
    @classmethod
    def _check_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        # The help of `draftline serve` must not wait for numba.
        from ...retrieval_store.search.lookup import SHARED  # noqa: PLC0415
        from ...retrieval_store.store import check_namespace  # noqa: PLC0415

        try:
            check_namespace(value)
        except ConfigError as error:
            raise ConfigError(info.field_name or "name", error.message) from error
        if value == SHARED and info.field_name == "name":
            raise ConfigError("name", f"{SHARED} is what all read; its keys are server.api_keys")
        return value

    @property
    def space(self) -> str:
        """Its namespace."""
        return self.namespace or self.name


KEY_FIELDS = ("key_sha256", "key_env", "key_file")
OPERATOR_KEY_FIELDS = ("api_key_sha256", "api_key_env", "api_key_file")


def key_digest(key: str) -> str:
    """SHA-256 of a key, 64 hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_tenants(value: object) -> tuple[TenantConfig, ...]:
    """The tenants of a list of mappings. Raises `ConfigError` naming the tenant and its field."""
    if not isinstance(value, list | tuple):
        raise ConfigError("tenants", "must be a list of tenants, each with a name and a key")
    return tuple(_tenant(index, item) for index, item in enumerate(value))


def operator_keys(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The settings of a server that name the operator's keys, with digests in place of plain keys.

    Raises `ConfigError`, which shows no key.
    """
    plain = [key_digest(key) for key in _texts("api_keys", values.get("api_keys"))]
    given = {field: _texts(field, values.get(field)) for field in OPERATOR_KEY_FIELDS}
    digests = dict.fromkeys([*plain, *_all_digests(values, OPERATOR_KEY_FIELDS)])
    return given | {"api_keys": (), "api_key_sha256": tuple(digests)}


def require_known_by(tenants: tuple[TenantConfig, ...], *, names_suffice: bool) -> None:
    """Raise `ConfigError` unless each has a key, or a gateway may name it."""
    for index, tenant in enumerate(tenants):
        if not (tenant.key_sha256 or names_suffice):
            raise ConfigError(
                f"tenants[{index}].{KEY_FIELDS[0]}",
                f"is missing; give one of {', '.join(KEY_FIELDS)}, or server.trusted_proxies, "
                "which may name it",
            )


def require_distinct(api_keys: tuple[str, ...], tenants: tuple[TenantConfig, ...]) -> None:
    """Raise `ConfigError` unless every name is one tenant's, and every digest of a key too."""
    owners = dict.fromkeys(api_keys, "api_keys")
    names: set[str] = set()
    for tenant in tenants:
        if tenant.name in names:
            raise ConfigError("tenants", f"two are named {tenant.name!r}; one may have many keys")
        names.add(tenant.name)
        for digest in tenant.key_sha256:
            owner = owners.setdefault(digest, tenant.name)
            if owner != tenant.name:
                raise ConfigError("tenants", f"{tenant.name!r} has a key of {owner!r}")


def _tenant(index: int, item: object) -> TenantConfig:
    field = f"tenants[{index}]"
    if isinstance(item, TenantConfig):
        return item
    if not isinstance(item, dict):
        raise ConfigError(field, "must be a mapping with a name and a key")
    try:
        return TenantConfig(**{str(key): value for key, value in item.items()})
    except ConfigError as error:
        raise ConfigError(f"{field}.{error.field}", error.message) from error


def _all_digests(values: Mapping[str, Any], fields: tuple[str, str, str]) -> tuple[str, ...]:
    """Digests of all keys that three fields name: digests, environment variables, files."""
    as_digest, as_variable, as_file = fields
    texts = {field: _texts(field, values.get(field)) for field in fields}
    digests = [_checked_digest(as_digest, text) for text in texts[as_digest]]
    keys = [_variable(as_variable, name) for name in texts[as_variable]]
    keys += [key for path in texts[as_file] for key in _lines(as_file, path)]
    return tuple(dict.fromkeys([*digests, *map(key_digest, keys)]))


def _texts(field: str, value: object) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts):
        return tuple(texts)
    raise ConfigError(field, "must be a text or a list of texts, none of them empty")


def _checked_digest(field: str, text: str) -> str:
    if SHA256.fullmatch(text.lower()) is None:
        raise ConfigError(field, "must be 64 hexadecimal digits: printf %s KEY | sha256sum")
    return text.lower()


def _variable(field: str, name: str) -> str:
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(field, f"the environment variable {name} is not set, or empty")
    return key


def _lines(field: str, path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(field, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(field, f"{path} is not a text file") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(field, f"{path} holds no key")
    return keys
