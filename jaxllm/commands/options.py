"""Engine options of the commands that load a model: the fields of `EngineConfig`, with dashes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.engine.config import ATTENTION_IMPLEMENTATIONS, DTYPES, LOAD_FORMATS, WARM_UPS
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import checkpoint_folder, demo_model_path
from jaxllm.system.json_text import parse

if TYPE_CHECKING:
    from jaxllm.llm import LLM

API_KEYS_VARIABLE = "JAXLLM_API_KEY"
"""Of the environment: keys that a server asks for."""
_PROGRAMS = "jaxllm.executor.step_programs"
_LOGGERS = _PROGRAMS, "jaxllm.server", "uvicorn", "ray.data"


def byte_count(text: str) -> int:
    """A number of bytes, with an optional suffix KiB, MiB or GiB."""
    for suffix, factor in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)):
        if text.endswith(suffix):
            number = float(text.removesuffix(suffix))
            if not 0 < number < math.inf:
                raise ValueError(text)
            return int(number * factor)
    return int(text)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    """An option's value that is a JSON object."""
    try:
        values = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON object: {error}") from None
    if not isinstance(values, dict):
        raise argparse.ArgumentTypeError(f"invalid JSON object: {text[:80]!r} is of another type")
    return values


def _paths(text: str) -> list[str]:
    return text.split(",")


def _cache_folder(text: str) -> str | None:
    return None if text == "none" else text


# What argparse calls them in "invalid ... value".
byte_count.__name__, _sizes.__name__ = "byte count", "list of sizes"
json_object.__name__ = "JSON object"

_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "tokenizer": (str, "DIR", "folder or id of the tokenizer (default: the model's)"),
    "revision": (str, "NAME", "branch, tag or commit of a model's id (default: main)"),
    "download_dir": (str, "DIR", "cache of models by id (default: Hugging Face's)"),
    "hf_overrides": (json_object, "JSON", "fields of config.json to replace"),
    "max_model_len": (int, "N", "longest sequence, prompt and output, in tokens"),
    "max_num_seqs": (int, "N", "most requests running at once"),
    "max_num_batched_tokens": (int, "N", "most prompt tokens in one prefill step"),
    "block_size": (int, "N", "tokens per KV block (default: 16)"),
    "num_gpu_blocks_override": (int, "N", "size of the KV pool in blocks, on any device"),
    "kv_cache_memory": (byte_count, "BYTES", "size of the KV pool; takes KiB, MiB and GiB"),
    "num_host_blocks": (int, "N", "pinned host memory for KV, in blocks (default: 4 GiB)"),
    "prefix_cache_dir": (str, "DIR", "folder in which the prefix cache outlives the engine"),
    "prefix_cache_dir_bytes": (byte_count, "BYTES", "most bytes of its files (default: 16 GiB)"),
    "host_bandwidth_limit": (float, "BYTES/S", "for experiments: slow the link to the host down to this"),
    "profile_seconds": (float, "S", "measure costs so long at start if no profile is stored"),
    "gpu_memory_utilization": (float, "F", "fraction to use of what JAX takes (default: 0.95)"),
    "scheduler_policy": (
        str,
        "NAME",
        "adaptive, paper, vllm, vllm_swap, or module:attribute (default: adaptive)",
    ),
    "num_scheduler_steps": (int, "N", "most decode steps in one device program (default: what takes 50 ms)"),
    "logits_processors": (_paths, "PATH,PATH,...", "module:function of JAX functions that change logits"),
    "ledger": (str, "FILE", "write the scheduler's decisions to this new file; see `jaxllm explain`"),
    "decode_buckets": (_sizes, "N,N,...", "batch sizes to compile decode programs for"),
    "attention_implementation": (
        str,
        "NAME",
        f"{', '.join(ATTENTION_IMPLEMENTATIONS)} (measured at start, program by program), or a tiling of "
        "triton's such as triton:k64,q64,w4,s2 (default: by the device)",
    ),
    "prefill_buckets": (_sizes, "N,N,...", "token counts to compile prefill programs for"),
    "compilation_cache_dir": (
        _cache_folder,
        "DIR",
        "JAX's persistent compilation cache; none leaves JAX's own settings (default: a user cache folder)",
    ),
}
_CHOICES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "dtype": (("auto", *DTYPES), "of weights and KV (default: auto: float32 on CPUs, else the checkpoint's)"),
    "load_format": (LOAD_FORMATS, "dummy makes random weights (default: auto)"),
    "warm_up": (
        WARM_UPS,
        "compile programs beside the engine, all of them first, or those of rare sampling as well",
    ),
}
_SWITCHES = {
    "download": "fetch what the cache lacks of a model that is given by id (default: off)",
    "async_scheduling": "let the host run one step ahead of the device (default: on)",
    "enable_prefix_caching": "compute prompts that begin alike once (default: on, if the policy can)",
}
_NAMES = ("model", *_SWITCHES, *_OPTIONS, *_CHOICES)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and the engine options; those not given keep the engine's defaults."""
    parser.add_argument(
        "--model", metavar="DIR", help="folder of a checkpoint, or its id (default: the demo model)"
    )
    group = parser.add_argument_group("engine options")
    for name, (convert, metavar, text) in _OPTIONS.items():
        group.add_argument(_flag(name), type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
    for name, (choices, text) in _CHOICES.items():
        group.add_argument(_flag(name), choices=choices, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--compile-report",
        action="store_true",
        help="list each program's shape, seconds and memory on stderr",
    )
    for name, text in _SWITCHES.items():
        group.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as arguments of `LLM`."""
    return {name: getattr(args, name) for name in _NAMES if hasattr(args, name)}


def model_name(settings: Mapping[str, Any]) -> str:
    """What to call the checkpoint: the last part of its path or id."""
    return Path(settings.get("model") or demo_model_path()).resolve().name


def model_folder(settings: Mapping[str, Any], name: str = "model") -> Path:
    """The folder of the checkpoint, or of its `tokenizer`; fetched if it has to be and may be."""
    chosen = settings.get(name) or settings.get("model") or demo_model_path()
    is_model = chosen == settings.get("model")
    return checkpoint_folder(
        chosen,
        revision=settings.get("revision") if is_model else None,
        download=settings.get("download", False),
        cache_dir=settings.get("download_dir"),
    )


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Verify that options name different files, whatever the spelling.

    Raises:
        ConfigError: two are one file.
    """
    seen: dict[object, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        try:
            found = os.stat(path)
            key: object = found.st_dev, found.st_ino
        except OSError:  # it is still to be made, or will be refused
            key = os.path.realpath(os.path.expanduser(path))
        other = seen.setdefault(key, option)
        if other != option:
            raise ConfigError(f"{other} and {option} are one file, {path!r}: name another for one of them")


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Keep logs and warnings below errors to themselves."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def loggers_put_back() -> Iterator[None]:
    """Leave the loggers that commands change as they were: whoever calls `main` goes on after it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers


def load_llm(settings: Mapping[str, Any], *, quiet: bool = False) -> LLM:
    """Make the `LLM`, telling on stderr what takes the time."""
    import jax

    from jaxllm.llm import LLM

    if not quiet:
        note(f"loading {model_name(settings)} and compiling its programs")
        tell_of_programs()
    llm = LLM(**settings)
    if not quiet:
        device = jax.devices()[0].device_kind
        seconds = llm.load_times.load_seconds + llm.load_times.warm_up_seconds
        note(f"ready on {device} in {llm.dtype} after {seconds:.1f} s")
    return llm


def note_compile_report(llm: LLM) -> None:
    """Tell what each program compiled so far took, and needs."""
    for program in llm.executor.compile_report():
        sizes = ", ".join(
            f"{kind} {'unknown' if size is None else f'{size / 2**20:.1f} MiB'}"
            for kind, size in (
                ("arguments", program.argument_bytes),
                ("in place", program.aliased_bytes),
                ("temporaries", program.temporary_bytes),
                ("outputs", program.output_bytes),
            )
        )
        fallback = "" if program.fallback is None else f" ({program.fallback})"
        note(
            f"{program.name}, attention {program.implementation}{fallback}: compiled in "
            f"{program.compile_seconds:.2f} s; {sizes}"
        )


def tell_of_programs() -> None:
    """Tell of each program that is compiled from now on."""
    logger = logging.getLogger(_PROGRAMS)
    if not logger.handlers:
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def note(message: str) -> None:
    """Tell the user something that is no result."""
    print(f"jaxllm: {message}", file=sys.stderr, flush=True)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
