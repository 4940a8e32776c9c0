"""Traces of requests for OpenTelemetry, if its packages are installed and a collector is named."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.server.guard import Exchange
    from jaxllm.server.service import Service

_NAME = "llm_request"


class Tracer:
    """Sends a span for each request that generated something; without a collector it does nothing.

    Attributes have the names of OpenTelemetry's conventions for generative AI, and vLLM's for times. A
    request's `traceparent` header is its span's parent.

    Raises:
        ConfigError: a collector is named, and the packages are missing.
    """

    def __init__(self, service: Service, exporter: Any = None) -> None:
        """`exporter` of opentelemetry's, instead of one for `otlp_traces_endpoint`."""
        self._model, self._provider = service.model_names[0], None
        endpoint = service.config.otlp_traces_endpoint
        if endpoint is None and exporter is None:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ConfigError(
                f'otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install "jaxllm[otel]" ({error})'
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxllm.server")

    def record(self, exchange: Exchange) -> None:
        """Take a request that has ended."""
        if self._provider is None or not exchange.log.num_prompts:
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        log, metrics = exchange.log, exchange.log.metrics
        now, end = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            _NAME,
            context=extract(dict(exchange.headers)),
            kind=SpanKind.SERVER,
            start_time=end - int((now - exchange.started) * 1e9),
        )
        values: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": exchange.request_id,
            "gen_ai.usage.prompt_tokens": log.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": log.num_output_tokens,
            "http.request.method": exchange.method,
            "http.route": exchange.path,
            "http.response.status_code": exchange.status,
            "enduser.id": log.user,
        }
        if metrics is not None:
            arrival = metrics.arrival_time
            times = {
                "time_in_queue": metrics.first_scheduled_time,
                "time_to_first_token": metrics.first_token_time,
                "e2e": metrics.finished_time,
            }
            for name, when in times.items():
                values[f"gen_ai.latency.{name}"] = None if when is None else when - arrival
            values["jaxllm.num_preemptions"] = metrics.num_preemptions
            values["jaxllm.num_swaps"] = metrics.num_swaps
        for name, value in values.items():
            if value is not None:
                span.set_attribute(name, value)
        if log.error is not None:
            span.set_status(Status(StatusCode.ERROR, log.error))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()
