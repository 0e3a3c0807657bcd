"""OpenTelemetry: a span for each request, if the user has its packages and its variables ask for traces. Nothing is imported otherwise.

`opentelemetry-instrument agent-sandbox serve --http` works as for any program. Without it, `OTEL_TRACES_EXPORTER` (`otlp` or `console`) or
`OTEL_EXPORTER_OTLP_ENDPOINT` are enough: they mean what the specification of OpenTelemetry says. A span has the verb, the status and the
exit code, and continues the trace of the request's `traceparent`. It has no command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_WANTED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE = "agent-sandbox"


class Traces:
    """Spans of requests. One that is switched off has none."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Open a span for a block, which may add attributes to the dictionary."""
        attributes: dict[str, Any] = {}
        if self._provider is None:
            yield attributes
            return
        from opentelemetry import propagate, trace  # the user's to install

        tracer = self._provider.get_tracer("agent_sandbox")
        with tracer.start_as_current_span(name, propagate.extract(dict(headers)), trace.SpanKind.SERVER) as span:
            try:
                yield attributes
            finally:
                span.set_attributes(attributes)
                if attributes.get("http.response.status_code", 0) >= 500:
                    span.set_status(trace.StatusCode.ERROR)

    def flush(self) -> None:
        """Send what was not sent yet, before this process ends."""
        with suppress(Exception):  # what ends does not wait for who collects its traces
            self._provider.force_flush(1000)


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user asks for traces."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and (any(environ.get(name) for name in _WANTED) or "opentelemetry.sdk" in sys.modules)


def start_traces() -> Traces:
    """Return the spans of this process. Raises ImportError if they are wanted and a package is missing."""
    if not wanted():
        return Traces()
    from opentelemetry import trace  # the user's to install
    from opentelemetry.sdk.resources import Resource  # the user's to install
    from opentelemetry.sdk.trace import TracerProvider  # the user's to install
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter  # the user's to install

    if isinstance(present := trace.get_tracer_provider(), TracerProvider):  # somebody has set it up, such as opentelemetry-instrument
        return Traces(present)
    exporter: SpanExporter
    if os.environ.get("OTEL_TRACES_EXPORTER") == "console":
        exporter = ConsoleSpanExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # the user's to install

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)
