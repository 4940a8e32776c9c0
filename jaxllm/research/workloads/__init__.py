"""Workloads: traces of requests, drawn from distributions or read from public files. Imports no JAX."""

from jaxllm.research.workloads.arrivals import (
    AllAtOnce,
    ArrivalProcess,
    ClosedLoop,
    GammaBursts,
    Poisson,
    RecordedArrivals,
    parse_arrivals,
)
from jaxllm.research.workloads.conversations import load_conversations, make_conversations
from jaxllm.research.workloads.datasets import PromptDataset, load_dataset_file
from jaxllm.research.workloads.feed import Feed
from jaxllm.research.workloads.fitting import fit_trace
from jaxllm.research.workloads.lengths import (
    ALPACA,
    CHATBOT,
    DATASETS,
    SUMMARY,
    LognormalLengths,
    UniformLengths,
)
from jaxllm.research.workloads.recorded import load_trace
from jaxllm.research.workloads.synthetic import make_trace
from jaxllm.research.workloads.topics import TopicOutputs
from jaxllm.research.workloads.trace import Trace
from jaxllm.research.workloads.trace_csv import KNOWN_COLUMNS, load_trace_csv

__all__ = [
    "ALPACA",
    "CHATBOT",
    "DATASETS",
    "KNOWN_COLUMNS",
    "SUMMARY",
    "AllAtOnce",
    "ArrivalProcess",
    "ClosedLoop",
    "Feed",
    "GammaBursts",
    "LognormalLengths",
    "Poisson",
    "PromptDataset",
    "RecordedArrivals",
    "TopicOutputs",
    "Trace",
    "UniformLengths",
    "fit_trace",
    "load_conversations",
    "load_dataset_file",
    "load_trace",
    "load_trace_csv",
    "make_conversations",
    "make_trace",
    "parse_arrivals",
]
