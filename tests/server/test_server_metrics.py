"""What the server tells of itself: metrics, the state of the live page, traces."""

import json
import re
import sys
import threading

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import serving

from jaxllm.engine.outputs import RequestOutput
from jaxllm.errors import ConfigError
from jaxllm.executor.step_programs import CompileProgress
from jaxllm.sched.ledger import PreemptionRecord, StepRecord
from jaxllm.server.config import ServerConfig
from jaxllm.server.stats import NUM_SECONDS, Stats
from jaxllm.server.tracing import Tracer
from jaxllm.types import RequestMetrics


@pytest.fixture(scope="module")
def server():
    """A server that has had to preempt: eight requests of 60 tokens in 20 blocks of 16."""
    engine = {"num_gpu_blocks_override": 20, "num_host_blocks": 20, "max_model_len": 128}
    with serving(engine) as running:
        body = {"prompt": [[index + 1, 5, 7] * 8 for index in range(8)], "max_tokens": 60, "ignore_eos": True}
        assert running.post("/v1/completions", body)[0] == 200
        assert running.post("/v1/completions", body)[0] == 200
        assert running.post("/v1/completions", {**body, "temperature": -1})[0] == 400
        assert running.post("/v1/completions", {**body, "stream": True})[0] == 200
        running.wait_until_idle()
        yield running


@pytest.fixture(scope="module", autouse=True)  # before any test sends more
def told(server):
    """The metrics, and the live state."""
    return server.request("GET", "/metrics")[2].decode(), server.request("GET", "/live")[2]


@pytest.fixture(scope="module")
def samples(told):
    text, _ = told
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[(sample.name, *sorted(labels.items()))] = sample.value
    return found


def test_tokens_and_requests_are_counted(samples):
    assert samples[("jaxllm:generation_tokens_total",)] == 3 * 8 * 60
    assert samples[("jaxllm:request_success_total", ("finished_reason", "length"))] == 24
    assert samples[("jaxllm:prefix_cache_queries_total",)] == 3 * 8 * 24
    recomputed, cached = samples[("jaxllm:recomputed_tokens_total",)], 0.0
    for tier in ("device", "host", "disk"):
        cached += samples[("jaxllm:prefix_cache_hits_total", ("tier", tier))]
    assert cached > 0
    assert samples[("jaxllm:prompt_tokens_total",)] >= 3 * 8 * 24 - cached
    assert recomputed >= 0
    paths = ("path", "/v1/completions")
    assert samples[("jaxllm:http_requests_total", paths, ("status", "200"))] == 3
    assert samples[("jaxllm:http_requests_total", paths, ("status", "400"))] == 1


def test_preemptions_are_counted_by_action(told, samples):
    swaps = samples[("jaxllm:num_preemptions_total", ("action", "swap"))]
    drops = samples[("jaxllm:num_preemptions_total", ("action", "recompute"))]
    assert swaps + drops > 0
    if drops:
        assert samples[("jaxllm:recomputed_tokens_total",)] > 0
    if swaps:
        assert samples[("jaxllm:swapped_bytes_total", ("direction", "out"))] > 0
    totals = told[1]["totals"]
    assert (totals["preemptions_swap"], totals["preemptions_recompute"]) == (swaps, drops)


@pytest.mark.parametrize(
    "name",
    [
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_weighted_turnaround",
    ],
)
def test_each_request_is_in_the_histograms(samples, name):
    assert samples[(f"jaxllm:{name}_count",)] == 24
    buckets = [value for key, value in samples.items() if key[0] == f"jaxllm:{name}_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 24
    least = 24 if name == "request_weighted_turnaround" else 0
    assert samples[(f"jaxllm:{name}_sum",)] >= least


def test_gauges_are_those_of_an_idle_engine(samples):
    for name in ("running", "waiting", "swapped"):
        assert samples[(f"jaxllm:num_requests_{name}",)] == 0
    for tier in ("device", "host"):
        assert samples[("jaxllm:kv_cache_usage_perc", ("tier", tier))] == 0
    assert samples[("jaxllm:engine_healthy",)] == 1
    assert samples[("jaxllm:compilations_total",)] > 0
    assert samples[("jaxllm:inter_token_latency_seconds_count",)] > 0


def test_drafts_are_counted_and_shown(told):
    assert told[1]["drafts"] is None
    drafts = {"policy": "fixed", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with serving({"max_model_len": 128, "speculative_config": drafts}) as running:
        body = {"prompt": [[5, 6, 7, 8] * 10] * 2, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        assert running.post("/v1/completions", body)[0] == 200
        running.wait_until_idle()
        text, state = running.request("GET", "/metrics")[2].decode(), running.request("GET", "/live")[2]
    shown = state["drafts"]
    assert 0 < shown["kept"] <= shown["drafted"]
    assert shown["measured_gain"] is shown["predicted_gain"] is None  # a fixed number predicts nothing
    names = {"drafts": "verifications", "draft_tokens": "drafted", "accepted_tokens": "kept"}
    for name, key in names.items():
        (value,) = re.findall(rf"^jaxllm:spec_decode_num_{name}_total{{.*}} (.*)$", text, re.MULTILINE)
        assert float(value) == shown[key]


def test_the_live_state_adds_up(told):
    _, state = told
    for tier in ("device", "host"):
        pool = state["pool"][tier]
        assert pool["held"] + pool["cached"] + pool["free"] == pool["total"]
    assert state["pool"]["device"]["cached"] > 0
    assert state["queues"] == {"waiting": 0, "running": 0, "swapped": 0}
    history, totals = state["history"], state["totals"]
    assert len({len(column) for column in history.values()}) == 1
    assert history["time"] == list(range(history["time"][0], history["time"][0] + len(history["time"])))
    assert sum(history["output_tokens"]) <= totals["output_tokens"] == 3 * 8 * 60
    assert state["limits"]["num_gpu_blocks"] == 20
    decided = totals["preemptions_swap"] + totals["preemptions_recompute"]
    assert len(state["decisions"]) == min(50, decided)
    for decision in state["decisions"]:
        assert decision["action"] in ("swap", "recompute")
        assert decision["num_blocks"] > 0
        assert decision["is_back"]
        assert decision["bound_ms"] is not None  # whoever was preempted again, and whatever compiled
        assert decision["measured_ms"] in (None, decision["bound_ms"])
    assert list(state["latencies"]) == ["ttft_ms", "ttft_p99_ms", "e2e_ms", "e2e_p99_ms"]
    times = [decision["time"] for decision in state["decisions"]]
    assert times == sorted(times, reverse=True)


def test_requests_under_way_are_in_the_live_state(server):
    body = {"prompt": [9, 8, 7], "max_tokens": 120, "ignore_eos": True}
    threads = [threading.Thread(target=server.post, args=("/v1/completions", body)) for _ in range(4)]
    for thread in threads:
        thread.start()
    most = []
    while any(thread.is_alive() for thread in threads):
        state = server.request("GET", "/live")[2]
        most = max(most, state["requests"], key=len)
    for thread in threads:
        thread.join()
    assert most
    assert {one["status"] for one in most} <= {"waiting", "running", "swapped"}
    assert all(one["num_prompt_tokens"] == 3 and one["max_total_tokens"] == 123 for one in most)


def step(**changes):
    return StepRecord(**{**dict.fromkeys(StepRecord.__dataclass_fields__, 0), **changes})


def test_history_is_by_the_second_and_bounded():
    now = [1000.0]
    stats = Stats(lambda: now[0])
    stats.on_record(step(num_prefill_tokens=5, num_running=2, num_dropped=1, num_used_blocks=7))
    stats.count_output(3)
    now[0] = 1003.5
    stats.on_record(step(num_prefill_tokens=1, num_running=1))
    stats.refused()
    now[0] = 1004.2
    history = stats.history()
    assert history["time"] == [1000, 1001, 1002, 1003]
    assert history["prompt_tokens"] == [5, 0, 0, 1]
    assert history["output_tokens"] == [3, 0, 0, 0]
    assert history["running"] == [2, 0, 0, 1]
    assert history["dropped"] == [1, 0, 0, 0]
    assert history["device_blocks"] == [7, 0, 0, 0]
    assert history["refused"] == [0, 0, 0, 1]
    assert history["ttft_ms"] == history["ttft_p99_ms"] == history["e2e_p99_ms"] == [None] * 4
    stats.on_record(step(num_running=4))
    stats.is_busy = lambda replica: True
    now[0] = 1007.0
    assert stats.history()["running"][-3:] == [4, 4, 4]  # one iteration that takes long
    stats.is_busy = lambda replica: False
    now[0] = 9000.0
    assert len(stats.history()["time"]) == NUM_SECONDS - 1
    assert set(stats.history()["output_tokens"]) == {0}


def test_medians_come_with_99th_percentiles():
    now = [1000.0]
    stats = Stats(lambda: now[0])
    assert set(stats.latencies().values()) == {None}
    for milliseconds in range(1, 201):
        metrics = RequestMetrics(arrival_time=0.0, first_token_time=milliseconds / 1e3, finished_time=1.0)
        stats.finished(RequestOutput("r", None, [1], None, [], True, metrics), [])
    now[0] = 1001.0
    expected = {"ttft_ms": 100.5, "ttft_p99_ms": 198.0, "e2e_ms": 1000.0, "e2e_p99_ms": 1000.0}
    assert stats.latencies() == expected
    assert {name: stats.history()[name][-1] for name in expected} == expected
    now[0] = 1100.0
    assert set(stats.latencies().values()) == {None}


def test_programs_that_compile_are_in_the_live_state(monkeypatch):
    with serving() as running:
        executor = running.service.made.executor
        monkeypatch.setattr(executor, "compile_progress", lambda: CompileProgress(3, 12, 1.0))
        found = running.request("GET", "/live")[2]["compiling"]
        assert found == {"num_compiled": 3, "num_programs": 12}
        monkeypatch.setattr(executor, "compile_progress", lambda: CompileProgress(12, 12, 1.0))
        assert running.request("GET", "/live")[2]["compiling"] is None


def test_decisions_are_kept_and_filled_in_later():
    stats = Stats(lambda: 5.0)
    record = PreemptionRecord(1, 0.5, "r", 9, 2, [], "swap", 0.1, 0.2)
    stats.on_record(record)
    record.measured_seconds = 0.3
    [(when, kept)] = stats.decisions
    assert (when, kept.measured_seconds) == (5.0, 0.3)
    assert (stats.totals.preemptions_swap, stats.totals.preemptions_recompute) == (1, 0)


def test_traces_have_a_span_for_each_request(monkeypatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("jaxllm.server.app.Tracer", lambda service: Tracer(service, exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving() as running:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "user": "me"}
        assert running.post("/v1/completions", body, headers={"traceparent": parent})[0] == 200
        assert running.request("GET", "/health")[0] == 200
        [header] = [running.post("/v1/completions", {**body, "n": 0})[1]["x-request-id"]]
        assert header
    [span] = exporter.get_finished_spans()
    values = dict(span.attributes)
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert (values["http.response.status_code"], values["enduser.id"]) == (200, "me")
    assert values["gen_ai.latency.e2e"] >= values["gen_ai.latency.time_to_first_token"] > 0
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert re.fullmatch("[0-9a-f]{32}", values["gen_ai.request.id"])


def test_a_collector_needs_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(ConfigError, match="jaxllm\\[otel\\]"),
        serving(otlp_traces_endpoint="http://127.0.0.1:9"),
    ):
        pass
    assert ServerConfig().otlp_traces_endpoint is None


def test_tokens_count_as_they_are_sampled_whoever_reads_them(server):
    totals = server.service.stats.totals
    before = totals.output_tokens
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    content = json.dumps(body).encode()
    with server.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        while (counted := totals.output_tokens - before) == 0:
            pass
        assert counted < 100  # although nothing is answered yet
    server.wait_until_idle()
    assert totals.output_tokens - before <= 100


def test_prompts_have_a_size_in_bytes():
    stats = Stats()

    def answered(text, num_tokens):
        stats.note_size(RequestOutput("0", text, [5] * num_tokens, None, [], True))

    answered("é" * 300, 400)
    assert stats.bytes_per_token is None  # of so few tokens nothing is known
    answered(None, 800)
    assert stats.bytes_per_token == pytest.approx((600 + 3200) / 1200)
    for _ in range(400):
        answered("a" * 2000, 1000)
    assert stats.bytes_per_token == pytest.approx(2.0, rel=0.01)


def test_truncated_prompts_have_no_size(server):
    before = server.service.stats._prompt_sizes
    body = {"prompt": "some words " * 50, "max_tokens": 1, "truncate_prompt_tokens": 4}
    assert server.post("/v1/completions", body)[0] == 200
    assert server.service.stats._prompt_sizes == before


def test_what_failed_is_counted_and_paths_are_those_of_routes():
    with serving() as running:
        running.request("GET", "/v1/models/demo_model")
        running.request("GET", "/v1/models/other")
        running.service.stats.on_failed()
        text = running.request("GET", "/metrics")[2].decode()
    for status in (200, 404):
        label = f'path="/v1/models/{{name:path}}",status="{status}"'
        assert f'jaxllm:http_requests_total{{model_name="demo_model",{label}}} 1.0' in text
    assert 'jaxllm:request_success_total{finished_reason="error",model_name="demo_model"} 1.0' in text
