"""`make_trace`: arrivals, prompt lengths and output lengths put together."""

from __future__ import annotations

from typing import Literal

from jaxllm.errors import ConfigError, shown
from jaxllm.research.workloads.arrivals import AllAtOnce, ArrivalProcess, ClosedLoop
from jaxllm.research.workloads.checks import MAX_LEN, MAX_REQUESTS, check_choice, check_integer
from jaxllm.research.workloads.datasets import PromptDataset
from jaxllm.research.workloads.lengths import (
    DATASETS,
    LognormalLengths,
    UniformLengths,
    max_outputs,
    uniform_outputs,
)
from jaxllm.research.workloads.seeding import Stream, generator
from jaxllm.research.workloads.topics import TopicOutputs
from jaxllm.research.workloads.trace import Trace

_ALL_AT_ONCE = AllAtOnce()


def make_trace(
    dataset: str | LognormalLengths | UniformLengths | PromptDataset,
    num_requests: int,
    max_output_len: int,
    *,
    outputs: Literal["max", "uniform"] | UniformLengths | LognormalLengths | TopicOutputs = "max",
    arrivals: ArrivalProcess = _ALL_AT_ONCE,
    seed: int = 0,
    name: str | None = None,
) -> Trace:
    """A trace drawn from distributions, or from the prompts of a file; the same for the same arguments.

    Prompts, outputs and arrivals have random streams of their own: changing one leaves the others as they
    were, and the first requests of a longer trace are those of a shorter one.

    Args:
        dataset: `"chatbot"`, `"alpaca"` or `"summary"` (the paper's), a distribution of prompt lengths, or
            what `load_dataset_file` gave, whose prompts are drawn without replacement.
        num_requests: how many.
        max_output_len: longest output, in tokens.
        outputs: `"max"`: every output is the longest; `"uniform"`: in `[ceil(max / 4), max]`; a
            distribution: drawn from it, and `max_output_len` bounds nothing; `TopicOutputs()`: as the prompts
            tell, which it makes, of the data set's lengths.
        arrivals: when requests are sent.
        seed: of everything drawn, in `[0, 2**63)`.
        name: the trace's; by default the data set's.

    Raises:
        ConfigError: an argument is out of range or unknown, or the data set has too few prompts.
    """
    num_requests = check_integer("num_requests", num_requests, 1, MAX_REQUESTS)
    max_output_len = check_integer("max_output_len", max_output_len, 1, MAX_LEN)
    if isinstance(outputs, str | type) or not hasattr(outputs, "sample"):
        check_choice("outputs", outputs, ("max", "uniform"))
    if isinstance(arrivals, type) or not hasattr(arrivals, "times"):
        raise ConfigError(
            f"arrivals={shown(arrivals)} is no arrival process; use AllAtOnce(), ClosedLoop(clients), ..."
        )
    rng = generator(seed, Stream.PROMPTS)
    token_ids = texts = None
    if isinstance(dataset, PromptDataset):
        default_name, notes = dataset.name, [f"prompts: drawn from {dataset.source}", *dataset.notes]
        if num_requests > len(dataset):
            raise ConfigError(
                f"num_requests={num_requests}, and the data set {dataset.name!r} has {len(dataset)} usable "
                "prompts; lower num_requests"
            )
        picks = rng.permutation(len(dataset))[:num_requests]
        prompt_lens = dataset.prompt_lens[picks]
        if dataset.prompt_token_ids is not None:
            token_ids = tuple(dataset.prompt_token_ids[pick] for pick in picks.tolist())
        if dataset.prompt_texts is not None:
            texts = tuple(dataset.prompt_texts[pick] for pick in picks.tolist())
    else:
        default_name = "custom"
        if isinstance(dataset, str):
            check_choice("dataset", dataset, tuple(DATASETS))
            default_name, dataset = dataset, DATASETS[dataset]
        if isinstance(dataset, type) or not hasattr(dataset, "sample"):
            raise ConfigError(f"dataset={dataset!r} is neither a name, nor lengths, nor a loaded data set")
        prompt_lens, notes = dataset.sample(num_requests, rng), [f"prompts: {dataset}"]
    output_rng = generator(seed, Stream.OUTPUTS)
    if isinstance(outputs, TopicOutputs):
        if isinstance(dataset, PromptDataset):
            raise ConfigError(f"outputs={outputs} makes prompts; data set {dataset.name!r} has its own")
        token_ids, output_lens = outputs.sample(prompt_lens, max_output_len, output_rng)
        notes.append(f"outputs: {outputs} of at most {max_output_len}")
    else:
        output_lengths: UniformLengths | LognormalLengths
        if isinstance(outputs, str):
            output_lengths = (max_outputs if outputs == "max" else uniform_outputs)(max_output_len)
        else:
            output_lengths = outputs
        output_lens = output_lengths.sample(num_requests, output_rng)
        notes.append(f"outputs: {output_lengths}")
    rng = generator(seed, Stream.ARRIVALS)
    loop = arrivals if isinstance(arrivals, ClosedLoop) else None
    return Trace(
        name=default_name if name is None else name,
        seed=seed,
        arrival_times=arrivals.times(num_requests, rng),
        num_clients=0 if loop is None else loop.num_clients,
        think_times=None if loop is None else loop.think_times(num_requests, rng),
        prompt_lens=prompt_lens,
        output_lens=output_lens,
        prompt_token_ids=token_ids,
        prompt_texts=texts,
        notes=(*notes, f"arrivals: {arrivals}"),
    )
