"""Sends spans to the OpenTelemetry collector of the settings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ..settings.settings import ServerConfig

if TYPE_CHECKING:
    from .spans import RequestTracer

EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def require_exporter(config: ServerConfig) -> None:
    """Raise `ConfigError` if a collector is set and the exporter is not installed."""
    if config.otlp_traces_endpoint is None:
        return
    try:
        found = find_spec(EXPORTER)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(
            "server.otlp_traces_endpoint", "needs pip install 'draftline[otel]', which sends spans"
        )


def request_tracer(config: ServerConfig, model_name: str, version: str) -> RequestTracer | None:
    """A tracer of requests; None if the settings name no collector.

    Raises `ConfigError` as `require_exporter` does.
    """
    if config.otlp_traces_endpoint is None:
        return None
    require_exporter(config)
    # The extra `otel`, which servers without a collector do without.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415
        ParentBased,
        TraceIdRatioBased,
    )

    from .spans import RequestTracer  # noqa: PLC0415

    named = {"service.name": "draftline", "service.version": version, "model": model_name}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.trace_sample_rate)),
        resource=Resource.create(named),
    )
    exporter = OTLPSpanExporter(endpoint=config.otlp_traces_endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider.get_tracer("draftline", version), provider.shutdown)
