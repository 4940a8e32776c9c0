"""What the commands that load a model have in common: engine options, and what they tell of loading."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.needs import only_with
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.vllm_names import RENAMED, SETTINGS, translate
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import checkpoint_folder, demo_model_path
from jaxllm.system.json_text import parse as parse_json
from jaxllm.system.options import add_flags, byte_count, flag, given, options_of

if TYPE_CHECKING:
    from jaxllm.llm import LLM

API_KEYS_VARIABLE = "JAXLLM_API_KEY"
"""Of the environment: keys that a server asks for."""
_PROGRAMS = "jaxllm.executor.step_programs"
_LOGGERS = _PROGRAMS, "jaxllm.server", "uvicorn", "ray.data"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the engine options; those not given keep the engine's defaults."""
    group = parser.add_argument_group("engine options")
    add_flags(group, EngineConfig)
    group.add_argument(
        "--compile-report",
        action="store_true",
        help="list each program's shape, seconds and memory on stderr",
    )
    only_with(parser, "quantization", options=("quantize_lm_head",))
    _add_options_of_vllm(parser)


def _add_options_of_vllm(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that this engine has no setting for, unsaid: they are answered when given."""
    for name, (neutral, _) in SETTINGS.items():
        if flag(name) in parser._option_string_actions:
            continue
        keywords: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if any(isinstance(value, bool) for value in neutral):
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords["type"] = _literal
        parser.add_argument(flag(name), **keywords)
    for name in RENAMED:
        parser.add_argument(
            flag(name), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, type=byte_count
        )


def _literal(text: str) -> Any:
    """A value as JSON, or text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as arguments of `LLM`.

    Raises:
        ConfigError: one is vLLM's, and asks for what there is not.
    """
    others = {name: getattr(args, name) for name in (*SETTINGS, *RENAMED) if hasattr(args, name)}
    return translate(
        {**given(args, EngineConfig), **others}, [name for name, _, _ in options_of(EngineConfig)]
    )


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


def check_distinct(files: Mapping[str, str | os.PathLike[str] | None]) -> None:
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
            raise ConfigError(
                f"{other} and {option} are one file, {os.fspath(path)!r}: name another for one of them"
            )


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
