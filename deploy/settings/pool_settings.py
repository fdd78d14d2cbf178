"""Settings of a pool: drafter servers in a Ray Serve application of their own."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from ...cluster.checked_settings import Settings
from ...cluster.config import DrafterConfig, EngineConfig
from ...core.errors import ConfigError

# What says where a drafter's servers are.
PLACES = ("address", "drafter_pool", "servers")


class PoolConfig(Settings):
    """One drafter, and how many servers of it there are; bounds and delays are Ray Serve's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        # Each class has one, or type checkers would not know that it takes mappings.
        super().__init__(**values)

    target: str = Field(description="the served model; a drafter made for another model is refused")
    drafter: DrafterConfig = Field(
        description="kind, name and options as in an engine's settings; with tls_ca, "
        "tls_certificate and tls_key its servers use TLS"
    )
    min_replicas: Annotated[int, Field(ge=1)] = Field(1, description="fewest servers")
    max_replicas: Annotated[int, Field(ge=1)] = Field(4, description="most servers")
    target_open_requests: Annotated[float, Field(gt=0)] = Field(
        16.0, description="open requests of all engines for each server"
    )
    cpus_per_drafter: Annotated[float, Field(ge=0)] = Field(
        1.0, description="CPUs that a server reserves"
    )
    gpus_per_drafter: Annotated[float, Field(ge=0)] = Field(
        0.0, description="GPUs that a server reserves; 0: it runs on CPUs"
    )

    @field_validator("drafter", mode="before")
    @classmethod
    def _build_drafter(cls, value: Any) -> Any:
        if isinstance(value, DrafterConfig):
            return value
        if not isinstance(value, dict):
            raise ConfigError("drafter", "must be a mapping with a kind")
        for key in PLACES:
            if key in value:
                raise ConfigError(f"drafter.{key}", "is for engines; the pool is its servers")
        try:
            return DrafterConfig(**{**value, "transport": "grpc"})
        except ConfigError as error:
            raise ConfigError(f"drafter.{error.field}", error.message) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ConfigError("max_replicas", f"is below min_replicas, {self.min_replicas}")
        return self

    @property
    def engine(self) -> EngineConfig:
        """What a drafter is told of the engines that it drafts for."""
        # Its process may use what it reserves, and nothing else.
        gpus = min(self.gpus_per_drafter, 1.0)
        return EngineConfig(model=self.target, backend="ray", gpus_per_drafter=gpus)
