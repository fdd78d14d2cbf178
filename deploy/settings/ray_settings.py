"""Settings of the Ray Serve deployments and of pools of drafter servers."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from ...cluster.checked_settings import Settings
from ...cluster.config import DrafterConfig, EngineConfig
from ...core.errors import ConfigError


class DeploymentConfig(Settings):
    """The Ray Serve deployments; names and meanings are Ray Serve's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: Annotated[int, Field(ge=1)] = Field(
        default=1, description="engine replicas; each has its own stages and drafters"
    )
    autoscaling_config: dict[str, Any] | None = Field(
        default=None, description="Ray Serve's autoscaling fields; replaces num_replicas"
    )
    target_ttft_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="with autoscaling_config: also add replicas while first tokens take longer "
        "than this",
    )
    num_ingress_replicas: Annotated[int, Field(ge=1)] = Field(
        default=1, description="HTTP replicas; each counts its own metrics"
    )
    max_queued_requests: Annotated[int, Field(ge=-1)] = Field(
        default=256,
        description="requests that wait for a replica; further ones get 429; -1: no limit",
    )
    coordinator_cpus: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="CPUs of a replica"
    )
    ingress_cpus: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="CPUs of an HTTP replica"
    )
    placement_group_strategy: str = Field(
        default="PACK", description="PACK, SPREAD, STRICT_PACK or STRICT_SPREAD"
    )
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="how long running requests may take when their replica stops; then they "
        "continue at another. Default: drain_timeout_s of the server",
    )
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0,
        description="new replicas that an update starts before it stops old ones, in percent of"
        " their number; 0: old ones stop first. Without room the update waits",
    )

    @field_validator("placement_group_strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        known = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target_ttft_s is None:
            return self
        if self.autoscaling_config is None:
            raise ConfigError("target_ttft_s", "needs autoscaling_config, with max_replicas")
        if "policy" in self.autoscaling_config:
            raise ConfigError("target_ttft_s", "autoscaling_config has a policy of its own")
        return self


# Fields that place a drafter's servers.
PLACES = ("address", "drafter_pool", "servers")


class PoolConfig(Settings):
    """A drafter, and the number of its servers."""

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
        """The settings of an engine that a drafter of the pool is built with."""
        # Its process may use what it reserves, and nothing else.
        gpus = min(self.gpus_per_drafter, 1.0)
        return EngineConfig(model=self.target, backend="ray", gpus_per_drafter=gpus)
