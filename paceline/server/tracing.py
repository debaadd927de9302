"""An OpenTelemetry span for each answered request, with vLLM's attribute names.

The SDK and its exporter come with the extra: pip install 'paceline[tracing]'.
"""

# pyright: reportMissingImports=false

import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError


class Traced(Protocol):
    """What a span says of a request; `answers.Answering` has it."""

    request: Any
    params: Any
    head: dict[str, Any]
    log: dict[str, Any]
    last: dict[int, Any]
    watch: Any

    def figures(self) -> dict[str, Any]:
        """Of its rounds."""
        ...


class Tracer:
    """Sends spans to a collector. A request with a `traceparent` header (W3C Trace Context) joins that trace.

    endpoint: an OTLP endpoint over HTTP, such as http://localhost:4318/v1/traces. exporter: used instead, for tests.
    Raises `ConfigError` without the packages.
    """

    def __init__(self, endpoint: str, exporter: Any = None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"tracing needs {error.name}", fix="pip install 'paceline[tracing]'") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "paceline"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("paceline.server")

    def record(self, run: Traced, reasons: Sequence[str]) -> str:
        """Record a request that has just ended; returns its trace id.

        reasons: the finish reason of each choice; with "error" the span has the status error.
        """
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        begin_ns = time.time_ns() - int(run.watch.seconds * 1e9)
        parent = TraceContextTextMapPropagator().extract(run.request.headers)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, _attributes(run, reasons), (), begin_ns)
        if "error" in reasons:
            span.set_status(StatusCode.ERROR)
        span.end()
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _attributes(run: Traced, reasons: Sequence[str]) -> dict[str, Any]:
    """The attributes of a span; the longest times of several prompts."""
    queue, prefill, decode = (
        max((seconds(output.metrics) for output in run.last.values()), default=0.0)
        for seconds in (lambda t: t.queue, lambda t: t.vision + t.prefill, lambda t: t.decode)
    )
    said = {
        "gen_ai.request.id": run.head["id"],
        "gen_ai.response.model": run.head["model"],
        "gen_ai.request.n": run.params.n,
        "gen_ai.request.max_tokens": run.params.max_tokens,
        "gen_ai.request.temperature": run.params.temperature,
        "gen_ai.request.top_p": run.params.top_p,
        "gen_ai.response.finish_reasons": list(reasons),
        "gen_ai.usage.prompt_tokens": run.log["prompt_tokens"],
        "gen_ai.usage.completion_tokens": run.log["completion_tokens"],
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_to_first_token": run.watch.first_s,
        "gen_ai.latency.e2e": run.watch.seconds,
    }
    said |= {f"paceline.{name}": value for name, value in run.figures().items()}
    return {name: value for name, value in said.items() if value is not None}
