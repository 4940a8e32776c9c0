"""One run: a trace played against a server, and its result as a JSON object."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from tqdm import tqdm

from jaxllm.errors import ConfigError
from jaxllm.research.bench.serving.answers import Answer
from jaxllm.research.bench.serving.client import Client
from jaxllm.research.bench.serving.metrics import Report, details, figures
from jaxllm.research.bench.serving.play import Play
from jaxllm.research.bench.serving.server_metrics import metrics_after, read_metrics, server_figures
from jaxllm.research.bench.serving.workload import RequestFields, Requests
from jaxllm.research.workloads import ArrivalProcess, GammaBursts, Poisson, Trace

_BACKENDS = {"completions": "openai", "chat": "openai-chat"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent to a server, and what is reported of it.

    Args:
        trace: the requests.
        arrivals: what its arrivals were drawn from; None if they were recorded.
        fields: what all requests have in common.
        report: what to report.
        model: the model's name on the server; the first it has if None.
        api_key: sent if there is one.
        tokenizer_id: what the tokenizer is called.
        max_concurrency: most requests under way.
        num_warmups: requests before the run, one after another.
        timeout: seconds that a request may take.
        keep_details: whether the result has what became of each request.

    Raises:
        ConfigError: a number is out of range.
    """

    trace: Trace
    arrivals: ArrivalProcess | None
    fields: RequestFields
    report: Report
    model: str | None = None
    api_key: str | None = None
    tokenizer_id: str | None = None
    max_concurrency: int | None = None
    num_warmups: int = 1
    timeout: float = 3600.0
    keep_details: bool = False

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups} must be at least 0")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout={self.timeout:g} must be seconds above 0")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A run's result, and the answers that it is made of."""

    result: dict[str, Any]
    answers: list[Answer]


async def measure(base_url: str, load: Load) -> Measured:
    """Play a trace against a server.

    Raises:
        ConfigError: the server cannot be reached, or does not answer a request like these beforehand.
    """
    fields = load.fields
    client = Client(base_url, endpoint=fields.endpoint, api_key=load.api_key, timeout=load.timeout)
    async with client:
        model = await client.first_model(load.model)
        requests = Requests(load.trace, fields, model)
        for _ in range(load.num_warmups):
            await _warm_up(client, requests)
        before = await read_metrics(client)
        date = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        with tqdm(total=len(load.trace), unit="req", disable=None) as progress:  # None: only on terminals
            play = Play(client, requests, max_concurrency=load.max_concurrency, on_answer=progress.update)
            await play.run()
        num_completed = sum(not answer.error for answer in play.answers)
        after = await metrics_after(client, before, num_completed)
    result = {
        "date": date,
        "endpoint_type": _BACKENDS[fields.endpoint],
        "backend": _BACKENDS[fields.endpoint],
        "label": None,
        "model_id": model,
        "tokenizer_id": load.tokenizer_id,
        "num_prompts": len(load.trace),
        **_traffic(load),
        **figures(play.answers, play.seconds, load.report),
        **server_figures(before, after),
        "num_without_usage": sum(not (one.error or one.has_usage) for one in play.answers),
    }
    if load.keep_details:
        result |= details(play.answers)
    return Measured(result, play.answers)


async def _warm_up(client: Client, requests: Requests) -> None:
    answer = Answer(0)
    await client.send(answer, requests.warm_up_body())
    if answer.error:
        raise ConfigError(
            f"{client.base_url} does not answer a request of this workload, so that nothing was measured: "
            f"{answer.error}"
        )


def _traffic(load: Load) -> dict[str, Any]:
    """Rate and burstiness as vLLM names them: a gamma distribution's shape, 1 of a Poisson process."""
    arrivals, trace = load.arrivals, load.trace
    rate: float | str | None = "inf"
    burstiness: float | None = 1.0
    if isinstance(arrivals, Poisson | GammaBursts):
        rate = arrivals.rate
        burstiness = arrivals.cv**-2 if isinstance(arrivals, GammaBursts) else 1.0
    elif trace.arrival_times.any():
        rate, burstiness = trace.summary()["request_rate"], None
    return {
        "request_rate": rate,
        "burstiness": burstiness,
        "max_concurrency": load.max_concurrency or trace.num_clients or None,
    }
