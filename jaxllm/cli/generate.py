"""`jaxllm generate`: complete prompts from arguments or a file, as JSON Lines that survive a crash."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm.cli import generate_ray
from jaxllm.commands.needs import only_with
from jaxllm.commands.options import (
    add_engine_options,
    check_distinct,
    engine_settings,
    load_llm,
    note,
    note_compile_report,
    only_errors,
)
from jaxllm.commands.progress import Progress
from jaxllm.commands.words import known_elsewhere
from jaxllm.errors import ConfigError, EngineError, JaxllmError
from jaxllm.jobs.output_file import OutputFile
from jaxllm.jobs.prompt_files import read_prompts
from jaxllm.jobs.prompts_io import PromptRow, prompts_from_arguments
from jaxllm.jobs.row_requests import (
    checked_token_ids,
    completion_content,
    fingerprint_context,
    with_seed,
)
from jaxllm.sampling.params import OTHER_NAMES, SamplingParams
from jaxllm.system.options import add_flags, given

if TYPE_CHECKING:
    from jaxllm.llm import LLM

_DEFAULT_MAX_TOKENS = 128
_FEW_PROMPTS = 64  # up to here, compiling fewer programs beats filling each of them better
_FEW_PROMPTS_TOKENS = 512
_TEMPLATE_TOKENS = 64  # what a chat template may add, roughly
_SIZE_SETTINGS = {"max_num_seqs", "max_num_batched_tokens", "decode_buckets", "prefill_buckets"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Complete prompts, and write a JSON line for each as soon as it is complete. Each line holds the "
        "prompt's index in the input, its id, the text, the token ids and the finish reason."
    )
    parser.epilog = (
        "A .jsonl or .ndjson input has an object per line: one of prompt, prompt_token_ids and messages; "
        "optionally id, num_dropped_tokens (cut at its front), and sampling_params that override the "
        "options. A .csv or .parquet input has a column of prompts, and others that go to the output. A "
        ".txt input, or one without a suffix, holds a prompt per line. Any of them may end in .gz. A row "
        "that is bad is answered by an error."
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; quote it")
    parser.add_argument(
        "--input", metavar="FILE", help="prompts: .txt, .jsonl, .csv or .parquet; instead of PROMPT"
    )
    parser.add_argument(
        "--column", metavar="NAME", help="of --input that holds the prompts (default: prompt)"
    )
    parser.add_argument("--id-column", metavar="NAME", help="of --input that holds the ids (default: id)")
    parser.add_argument(
        "--where",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="only rows of --input whose column has this value; may be given again for others",
    )
    parser.add_argument(
        "--rows",
        metavar="START:STOP",
        help="only these rows of --input, counted from 0; either end may be left out",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="append JSON lines to FILE, each safe on disk (default: stdout)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted --output: run only what it lacks"
    )
    parser.add_argument(
        "--text", action="store_true", help="write readable text to stdout instead of JSON lines"
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user message")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="template for conversations: a Jinja file, its text, or the name of one of the checkpoint's",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    sampling = parser.add_argument_group("sampling options")
    add_flags(sampling, SamplingParams, max_tokens=_DEFAULT_MAX_TOKENS)
    sampling.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="each prompt is sampled with a seed made of N and its index (default: %(default)s)",
    )
    only_with(parser, "input", options=("column", "id_column", "where", "rows"))
    only_with(parser, "output", options=("resume",))
    only_with(parser, "chat", "input", options=("chat_template",))
    generate_ray.add_options(parser)
    add_engine_options(parser)
    known_elsewhere(parser, OTHER_NAMES)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts; returns the exit code."""
    if args.text and args.output is not None:
        raise ConfigError("--text is for stdout, and --output holds JSON lines: drop one of the two")
    settings = {"seed": args.seed, **engine_settings(args)}
    template = _chat_template(args.chat_template)
    if args.ray:
        return generate_ray.run(args, _sampling_params(args), settings)
    check_distinct({"--input": args.input, "--output": args.output, "--ledger": settings.get("ledger")})
    rows = _read_rows(args)
    with contextlib.ExitStack() as stack:
        if args.quiet:
            stack.enter_context(only_errors())
        sink: _Sink = _Stdout(rows, as_text=args.text)
        if args.output is not None:
            context = fingerprint_context(settings, args.chat, template)
            sink = stack.enter_context(OutputFile(args.output, rows, resume=args.resume, context=context))
        todo = [row for row in rows if row.index not in sink.done]
        if sink.done and not args.quiet:
            note(f"{len(sink.done)} of {len(rows)} prompts are in {args.output} already")
        if bad := [row for row in todo if row.error is not None]:
            _write_errors(sink, [(row, row.error) for row in bad])
        good = [row for row in todo if row.error is None]
        num_bad = len(bad)
        try:
            if good:
                llm = load_llm(
                    {
                        **few_prompts_settings(settings, [row for row in rows if row.error is None]),
                        **settings,
                    },
                    quiet=args.quiet,
                )
                num_bad += _write_completions(llm, good, sink, total=len(rows), args=args, template=template)
                if args.compile_report:
                    note_compile_report(llm)
        except KeyboardInterrupt:
            way_out = "run again with --resume to continue" if args.output else "use --output to keep results"
            note(f"interrupted: {len(sink.done)} of {len(rows)} prompts are complete; {way_out}")
            return generate_ray.EXIT_INTERRUPTED
        if num_bad and not args.quiet:
            note(f"{num_bad} of {len(rows)} prompts were bad, and have an error in place of an answer")
    return 0


class _Sink(Protocol):
    """Where completions go."""

    @property
    def done(self) -> frozenset[int]: ...

    def write(self, completions: Sequence[tuple[int, Mapping[str, Any]]], /) -> None: ...


class _Stdout:
    """JSON lines on stdout, or each prompt with its completion."""

    def __init__(self, rows: Sequence[PromptRow], *, as_text: bool) -> None:
        self._as_text = as_text
        self._ids = {row.index: row.id for row in rows}
        self._done: set[int] = set()

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._done)

    def write(self, completions: Sequence[tuple[int, Mapping[str, Any]]], /) -> None:
        for index, content in completions:
            if self._as_text and "error" in content:
                line = f"--- prompt {index}: {content['error']} ---\n"
            elif self._as_text:
                prompt = content.get("prompt") or ""
                line = "\n".join(
                    f"--- prompt {index}: {one['finish_reason']} ---\n{prompt}{one['text']}\n"
                    for one in content.get("outputs", [content])
                )
            else:
                line = json.dumps({"index": index, "id": self._ids[index], **content}, allow_nan=False)
            sys.stdout.write(line + "\n")
            self._done.add(index)
        sys.stdout.flush()


# Inputs


def _read_rows(args: argparse.Namespace) -> list[PromptRow]:
    if bool(args.prompts) == (args.input is not None):
        raise ConfigError("give prompts as arguments or with --input, one of the two")
    defaults = _sampling_params(args)
    wanted = _wanted_rows(args.rows)
    if args.input is None:
        rows = prompts_from_arguments(args.prompts, defaults)
    else:
        where = _conditions(args.where)
        rows = read_prompts(args.input, defaults, args.column, id_column=args.id_column, where=where)
    kept = [with_seed(row, args.seed) for row in rows if row.index in wanted]
    if not kept:
        last = rows[-1].index
        raise ConfigError(f"--rows {args.rows}: {args.input} has none of these, its rows are 0 to {last}")
    return kept


def _conditions(given: Sequence[str]) -> dict[str, str]:
    """The value that each column of wanted rows has."""
    conditions: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise ConfigError(f"--where {one!r} must be a column and its value, such as --where split=test")
        if conditions.setdefault(name, value) != value:
            raise ConfigError(f"--where asks for two values of {name!r}, which no row has: drop one")
    return conditions


def _wanted_rows(text: str | None) -> range:
    """The indices that START:STOP are."""
    if text is None:
        return range(sys.maxsize)
    found = re.fullmatch(r"(\d*):(\d*)", text, re.ASCII)
    wanted = found and range(int(found[1] or 0), int(found[2]) if found[2] else sys.maxsize)
    if not wanted:
        raise ConfigError(f"--rows {text!r} must be START:STOP, such as 0:100, 100: or :50, and not empty")
    return wanted


def _chat_template(given: str | None) -> str | None:
    """The text of a template: that of a file if it is the path of one."""
    if given is None or "\n" in given or "{" in given:
        return given
    try:
        return pathlib.Path(given).read_text(encoding="utf-8")
    except FileNotFoundError:
        if "/" in given or given.endswith((".jinja", ".txt")):
            raise ConfigError(f"--chat-template {given!r}: there is no such file") from None
        return given  # the name of one of the checkpoint's
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given!r} cannot be read: {error}") from error


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**given(args, SamplingParams))


def few_prompts_settings(settings: Mapping[str, Any], rows: Sequence[PromptRow]) -> dict[str, Any]:
    """Limits that make a short run start fast: no larger than `rows` need, and few sizes to compile for.

    Nothing for many prompts, or when the user chose any size.
    """
    num_samples = sum(row.sampling_params.num_samples for row in rows)
    if num_samples > _FEW_PROMPTS or _SIZE_SETTINGS & settings.keys():
        return {}
    max_num_seqs = _power_of_two(num_samples)
    prompt_tokens = sum(_most_tokens(row) for row in rows)
    max_num_batched_tokens = min(_FEW_PROMPTS_TOKENS, max(32, _power_of_two(prompt_tokens)))
    return {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "decode_buckets": _every_fourth(max_num_seqs, low=1 if max_num_seqs > 4 else max_num_seqs),
        "prefill_buckets": _every_fourth(max_num_batched_tokens, low=64),
    }


def _most_tokens(row: PromptRow) -> int:
    """A bound for the prompt's tokens before there is a tokenizer: a token has at least a byte."""
    if row.prompt_token_ids is not None:
        return len(row.prompt_token_ids)
    text = row.prompt or "" if row.messages is None else json.dumps(row.messages, ensure_ascii=False)
    return len(text.encode("utf-8", "replace")) + (_TEMPLATE_TOKENS if row.messages else 2)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _every_fourth(limit: int, low: int) -> list[int]:
    sizes = [limit]
    while sizes[-1] // 4 >= low:
        sizes.append(sizes[-1] // 4)
    return sorted(sizes)


# Outputs


def _write_completions(
    llm: LLM,
    rows: Sequence[PromptRow],
    sink: _Sink,
    *,
    total: int,
    args: argparse.Namespace,
    template: str | None,
) -> int:
    """Run the rows; returns how many of them were bad, which those of a file may be."""
    good: list[PromptRow] = []
    prompts: list[np.ndarray] = []
    bad: list[tuple[PromptRow, JaxllmError | None]] = []
    for row in rows:
        try:
            prompts.append(checked_token_ids(llm, row, args.chat, template))
            good.append(row)
        except EngineError:
            raise
        except JaxllmError as error:
            if args.input is None:
                raise
            bad.append((row, error))
    if bad:
        _write_errors(sink, bad)
    with Progress(total, total - len(good), "prompt", quiet=args.quiet) as progress:
        requests = (
            {
                "prompt_token_ids": prompt,
                "num_dropped_tokens": row.num_dropped_tokens,
                "sampling_params": row.sampling_params,
            }
            for row, prompt in zip(good, prompts, strict=True)
        )
        for output in llm.generate_iter(requests, in_order=False):
            row = good[int(output.request_id)]
            sink.write([(row.index, {**row.extras, **completion_content(row, output)})])
            progress.advance(output=output)
    return len(bad)


def _write_errors(sink: _Sink, bad: Sequence[tuple[PromptRow, JaxllmError | None]]) -> None:
    sink.write(
        [(row.index, {**row.extras, "error": f"{type(error).__name__}: {error}"}) for row, error in bad]
    )
