"""Prometheus metrics, with vLLM's stems under our prefix."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxllm.engine.outputs import RequestOutput
from jaxllm.server.live import cost_reports, pools
from jaxllm.server.service import Service

PREFIX = "jaxllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_INTERVALS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
_RATIOS = (1, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens.", _INTERVALS),
    "inter_token_latency_seconds": ("Time between the tokens of streams, as they are written.", _INTERVALS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to its first iteration.", _SECONDS),
    "request_prompt_tokens": ("Tokens of prompts.", _TOKENS),
    "request_generation_tokens": ("Tokens of outputs.", _TOKENS),
    "request_weighted_turnaround": (
        "(finish - arrival) / (finish - first iteration), at least 1.",
        _RATIOS,
    ),
}


class Metrics:
    """The metrics of a service, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        disable_created_metrics()  # a series more for each one, which nobody looks at
        self.registry = CollectorRegistry()
        self._model = service.model_names[0]
        self._histograms = {
            name: Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            ).labels(self._model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests, by route and status.",
            ["model_name", "path", "status"],
            registry=self.registry,
        )
        self.registry.register(_Engine(service))
        ProcessCollector(registry=self.registry)
        service.stats.on_finished = self._finished
        service.stats.on_failed = self._success.labels(self._model, "error").inc
        service.core.on_abort = self._success.labels(self._model, "abort").inc
        service.stats.inter_token_seconds = self._histograms["inter_token_latency_seconds"].observe

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_http(self, path: str, status: int) -> None:
        """Take a response."""
        self._http.labels(self._model, path, str(status)).inc()

    def _finished(self, output: RequestOutput, samples: Sequence[tuple[int, str]]) -> None:
        for _, reason in samples:
            self._success.labels(self._model, reason).inc()
        histograms, metrics = self._histograms, output.metrics
        histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        counts = [count for count, _ in samples]
        histograms["request_generation_tokens"].observe(sum(counts))
        if metrics is None or metrics.finished_time is None:
            return
        end, arrival = metrics.finished_time, metrics.arrival_time
        histograms["e2e_request_latency_seconds"].observe(end - arrival)
        if metrics.first_scheduled_time is not None:
            histograms["request_queue_time_seconds"].observe(metrics.first_scheduled_time - arrival)
            if end > metrics.first_scheduled_time:
                ratio = (end - arrival) / (end - metrics.first_scheduled_time)
                histograms["request_weighted_turnaround"].observe(ratio)
        first, last = metrics.first_token_time, metrics.last_token_time
        if first is not None and last is not None:
            histograms["time_to_first_token_seconds"].observe(first - arrival)
            if max(counts) > 1:
                seconds = (last - first) / (max(counts) - 1)
                histograms["request_time_per_output_token_seconds"].observe(seconds)


class _Engine(Collector):
    """What the engines know at the moment they are asked: sums, and how well the first one predicts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """One family after another."""
        service = self._service
        made, totals, model = service.made, service.stats.totals, service.model_names[0]
        schedulers = service.schedulers
        block_bytes = service.block_bytes
        tiers = pools(service)

        gauge = functools.partial(_family, GaugeMetricFamily, model)
        counter = functools.partial(_family, CounterMetricFamily, model)
        num_running = sum(one.num_running for one in schedulers)
        num_waiting = sum(one.num_waiting for one in schedulers)
        num_swapped = sum(one.num_swapped for one in schedulers)
        yield gauge("num_requests_running", "Requests that hold blocks.", {(): num_running})
        yield gauge("num_requests_waiting", "Requests that wait to begin.", {(): num_waiting})
        yield gauge("num_requests_swapped", "Requests whose KV is on the host.", {(): num_swapped})
        shares = {("device",): _share(tiers["device"]), ("host",): _share(tiers["host"])}
        if (disk := tiers["disk"]) is not None:
            shares[("disk",)] = disk["bytes"] / disk["limit_bytes"]
        yield gauge("kv_cache_usage_perc", "Share of KV memory in use, 1 is all.", shares, "tier")
        yield counter("prefix_cache_queries", "Prompt tokens looked up.", {(): totals.looked_up_tokens})
        hits = {(tier,): float(count) for tier, count in totals.cached_tokens.items()}
        yield counter("prefix_cache_hits", "Prompt tokens found, by where.", hits, "tier")
        yield counter("prompt_tokens", "Prompt tokens computed.", {(): totals.prompt_tokens})
        yield counter("generation_tokens", "Output tokens.", {(): totals.output_tokens})
        preempted = {("swap",): totals.preemptions_swap, ("recompute",): totals.preemptions_recompute}
        yield counter("num_preemptions", "Preemptions, by what was done.", preempted, "action")
        copied = {("out",): totals.blocks_out * block_bytes, ("in",): totals.blocks_in * block_bytes}
        yield counter("swapped_bytes", "KV copied to the host, and back.", copied, "direction")
        yield counter(
            "recomputed_tokens", "Tokens computed again after preemptions.", {(): totals.recomputed_tokens}
        )
        if drafted := [one.speculation.counts for one in schedulers if one.speculation is not None]:
            num_verifications = sum(one.num_verifications for one in drafted)
            num_drafted = sum(one.num_drafted for one in drafted)
            num_kept = sum(one.num_kept for one in drafted)
            yield counter("spec_decode_num_drafts", "Verifications of drafts.", {(): num_verifications})
            yield counter("spec_decode_num_draft_tokens", "Drafts verified.", {(): num_drafted})
            yield counter("spec_decode_num_accepted_tokens", "Drafts kept.", {(): num_kept})
        errors = {
            (str(kind),): report.error_after
            for kind, report in cost_reports(made.costs).items()
            if report.error_after is not None
        }
        yield gauge("prediction_error_ratio", "Mean of |predicted - measured| / measured.", errors, "kind")
        yield counter(
            "compilations",
            "Programs compiled, or loaded from the cache of compiled ones.",
            {(): sum(len(one.executor.programs) for one in service.replicas)},
        )
        yield gauge("engine_healthy", "1 if the engine takes requests.", {(): float(service.core.is_healthy)})


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    model: str,
    name: str,
    text: str,
    values: Mapping[tuple[()], float] | Mapping[tuple[str], float],
    *labels: str,
) -> Metric:
    """A metric with a value for each combination of labels."""
    family = kind(PREFIX + name, text, labels=["model_name", *labels])
    for key, value in values.items():
        family.add_metric([model, *key], value)
    return family


def _share(tier: dict[str, int]) -> float:
    return tier["held"] / tier["total"] if tier["total"] else 0.0
