"""`jaxllm generate`: complete prompts from arguments or a file, as JSON Lines that survive a crash."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxllm import tokenizer as tokenization
from jaxllm.chat import apply_chat_template
from jaxllm.cli.options import (
    add_engine_options,
    check_distinct,
    engine_settings,
    json_object,
    load_llm,
    model_folder,
    note,
    note_compile_report,
    only_errors,
)
from jaxllm.cli.prompts_io import (
    OutputFile,
    PromptRow,
    prompts_from_arguments,
    read_jsonl_file,
    read_text_file,
)
from jaxllm.errors import ConfigError, JaxllmError, RequestError, RequestTooLargeError
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from jaxllm.llm import LLM
    from jaxllm.outputs import RequestOutput

_EXIT_INTERRUPTED = 130
_DEFAULT_MAX_TOKENS = 128
_FEW_PROMPTS = 64  # up to here, compiling fewer programs beats filling each of them better
_FEW_PROMPTS_TOKENS = 512
_TEMPLATE_TOKENS = 64  # what a chat template may add, roughly
_SIZE_SETTINGS = {"max_num_seqs", "max_num_batched_tokens", "decode_buckets", "prefill_buckets"}
_SAMPLE_BYTES, _SAMPLES_PER_FILE = 4096, 256
_SMALL_FILE = 4 * 2**20
_CONTEXT_SETTINGS = ("dtype", "load_format", "hf_overrides", "max_model_len")

_SAMPLING_OPTIONS: Mapping[str, tuple[Callable[[str], Any], str, str]] = {
    "temperature": (float, "T", "0 is greedy (default: 1)"),
    "top_k": (int, "K", "sample among the K most likely tokens (default: all)"),
    "top_p": (float, "P", "sample among the fewest tokens of total probability P (default: 1)"),
    "min_p": (float, "P", "drop tokens less likely than P times the most likely one (default: 0)"),
    "presence_penalty": (float, "X", "-2..2, once per token in the output (default: 0)"),
    "frequency_penalty": (float, "X", "-2..2, per occurrence in the output (default: 0)"),
    "repetition_penalty": (float, "X", "factor for tokens of prompt and output (default: 1)"),
    "n": (int, "N", "samples of each prompt; sample i has the seed of the prompt plus i (default: 1)"),
    "best_of": (int, "N", "draw N samples, and return the n most likely"),
    "min_tokens": (int, "N", "no end of sequence before N tokens (default: 0)"),
    "logprobs": (int, "N", "return the N top log-probabilities of each output token"),
    "prompt_logprobs": (int, "N", "the same for the prompt's tokens"),
    "truncate_prompt_tokens": (int, "N", "use only the prompt's last N tokens; -1: what the model takes"),
    "structured_outputs": (
        json_object,
        "JSON",
        "an object of regex, json (a schema), choice, grammar or json_object: what the output must be",
    ),
}


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts",
        description=(
            "Complete prompts, and write a JSON line for each as soon as it is complete. Each line holds the "
            "prompt's index in the input, its id, the text, the token ids and the finish reason."
        ),
        epilog=(
            "A .jsonl input holds an object per line: one of prompt, prompt_token_ids and messages; "
            "optionally id, num_dropped_tokens (cut at its front), and sampling_params that override the "
            "options. Any other input file holds a prompt per line. All inputs are checked before the first "
            "one runs."
        ),
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; quote it")
    parser.add_argument("--input", metavar="FILE", help="prompts, .jsonl or text; instead of PROMPT")
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
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    sampling = parser.add_argument_group("sampling options")
    sampling.add_argument(
        "--max-tokens", type=int, metavar="N", default=_DEFAULT_MAX_TOKENS, help="default: %(default)s"
    )
    for name, (convert, metavar, text) in _SAMPLING_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        sampling.add_argument(flag, type=convert, metavar=metavar, default=argparse.SUPPRESS, help=text)
    sampling.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="each prompt is sampled with a seed made of N and its index (default: %(default)s)",
    )
    sampling.add_argument(
        "--stop", action="append", metavar="STR", default=[], help="end at this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the end of sequence")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts; returns the exit code."""
    if args.resume and args.output is None:
        raise ConfigError("--resume continues a file: name it with --output")
    if args.text and args.output is not None:
        raise ConfigError("--text is for stdout, and --output holds JSON lines: drop one of the two")
    settings = {"seed": args.seed, **engine_settings(args)}
    check_distinct({"--input": args.input, "--output": args.output, "--ledger": settings.get("ledger")})
    rows = _read_rows(args)
    with contextlib.ExitStack() as stack:
        if args.quiet:
            stack.enter_context(only_errors())
        sink: _Sink = _Stdout(rows, as_text=args.text)
        if args.output is not None:
            context = _context(settings, args.chat)
            sink = stack.enter_context(OutputFile(args.output, rows, resume=args.resume, context=context))
        todo = [row for row in rows if row.index not in sink.done]
        if sink.done and not args.quiet:
            note(f"{len(sink.done)} of {len(rows)} prompts are in {args.output} already")
        if not todo:
            return 0
        try:
            llm = load_llm(
                {**few_prompts_settings(settings, rows), **settings},
                quiet=args.quiet,
            )
            _write_completions(llm, todo, sink, total=len(rows), chat=args.chat, quiet=args.quiet)
            if args.compile_report:
                note_compile_report(llm)
        except KeyboardInterrupt:
            way_out = "run again with --resume to continue" if args.output else "use --output to keep results"
            note(f"interrupted: {len(sink.done)} of {len(rows)} prompts are complete; {way_out}")
            return _EXIT_INTERRUPTED
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
        self._ids = [row.id for row in rows]
        self._done: set[int] = set()

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._done)

    def write(self, completions: Sequence[tuple[int, Mapping[str, Any]]], /) -> None:
        for index, content in completions:
            if self._as_text:
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
    values = {name: getattr(args, name) for name in _SAMPLING_OPTIONS if hasattr(args, name)}
    defaults = SamplingParams(
        **values, max_tokens=args.max_tokens, stop=args.stop, ignore_eos=args.ignore_eos
    )
    if args.input is None:
        rows = prompts_from_arguments(args.prompts, defaults)
    elif args.input.endswith(".jsonl"):
        rows = read_jsonl_file(args.input, defaults)
    else:
        rows = read_text_file(args.input, defaults)
    return [_with_seed(row, args.seed) for row in rows]


def _with_seed(row: PromptRow, seed: int) -> PromptRow:
    """The row with a seed of its own, so that no sample depends on the batch or on an interruption."""
    if row.sampling_params.seed is not None:
        return row
    digest = hashlib.sha256(f"{seed}:{row.index}".encode()).digest()
    params = dataclasses.replace(row.sampling_params, seed=int.from_bytes(digest[:8], "little"))
    return dataclasses.replace(row, sampling_params=params)


def _context(settings: Mapping[str, Any], chat: bool) -> str:
    """What completions depend on beside the prompts: a resumed run must have the same."""
    folder = model_folder(settings)
    chosen: dict[str, Any] = {name: settings.get(name) for name in _CONTEXT_SETTINGS}
    if settings.get("load_format") == "dummy":
        chosen["seed"] = settings.get("seed")
    tokenizer = model_folder(settings, "tokenizer")
    folders = [folder_digest(folder)]
    if tokenizer != folder:
        folders.append(folder_digest(tokenizer))
    return json.dumps([folders, chosen, chat], sort_keys=True, default=str)


def folder_digest(folder: Path) -> str:
    """Tells model folders apart by their files: small ones in full, large ones by samples all over them."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        step = max(1, size // _SAMPLES_PER_FILE) if size > _SMALL_FILE else _SAMPLE_BYTES
        with path.open("rb") as file:
            for place in range(0, size, step):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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


def _tokenize(llm: LLM, rows: Sequence[PromptRow], chat: bool) -> list[np.ndarray]:
    """Token ids of all prompts, each known to be acceptable to the engine.

    Raises:
        RequestError, SamplingParamsError: a prompt or its parameters are not; names its place in the input.
    """
    prompts = []
    for row in rows:
        with _naming(row):
            token_ids = _token_ids(llm, row, chat)
            vocab_size = llm.model_config.vocab_size
            if not token_ids:
                raise RequestError("the prompt has no tokens; give at least one")
            if max(token_ids) >= vocab_size:
                raise RequestError(
                    f"token id {max(token_ids)} is out of range; the model's are 0 to {vocab_size - 1}"
                )
            token_ids = llm.engine.truncated(token_ids, row.sampling_params, row.num_dropped_tokens)
            llm.engine.check_dropped(row.num_dropped_tokens, len(token_ids), row.sampling_params)
            num_tokens = len(token_ids) - row.num_dropped_tokens
            if num_tokens >= llm.max_model_len:
                raise RequestTooLargeError(
                    f"the prompt has {num_tokens} tokens; with max_model_len={llm.max_model_len} at most "
                    f"{llm.max_model_len - 1} leave room for output: shorten it or raise --max-model-len"
                )
            llm.engine.check_params(row.sampling_params)
        prompts.append(np.array(token_ids, np.int32))
    return prompts


def _token_ids(llm: LLM, row: PromptRow, chat: bool) -> Sequence[int]:
    if row.prompt_token_ids is not None:
        return row.prompt_token_ids
    assert llm.tokenizer is not None  # the command always loads one
    messages = row.messages
    if messages is None and chat:
        messages = ({"role": "user", "content": row.prompt},)
    if messages is not None:
        return apply_chat_template(llm.tokenizer, messages)
    return tokenization.encode(llm.tokenizer, row.prompt or "")


@contextlib.contextmanager
def _naming(row: PromptRow) -> Iterator[None]:
    try:
        yield
    except JaxllmError as error:
        raise type(error)(f"{row.source}: {error}") from error


# Outputs


def _write_completions(
    llm: LLM, rows: Sequence[PromptRow], sink: _Sink, *, total: int, chat: bool, quiet: bool
) -> None:
    from tqdm import tqdm

    prompts = _tokenize(llm, rows, chat)
    progress = tqdm(
        total=total,
        initial=total - len(rows),
        desc="Processed prompts",
        unit="prompt",
        disable=True if quiet else None,  # None: where stderr is no terminal
    )
    with progress:
        for completions in _complete(llm, rows, prompts):
            sink.write([(row.index, _content(row, output)) for row, output in completions])
            progress.update(len(completions))


def _complete(
    llm: LLM, rows: Sequence[PromptRow], prompts: Sequence[np.ndarray]
) -> Iterator[list[tuple[PromptRow, RequestOutput]]]:
    """Run the prompts, some ahead of what fits the batch; yields those that finished in a step."""
    waiting = iter(zip(rows, prompts, strict=True))
    most_live = 2 * llm.executor.config.max_num_seqs
    live: dict[str, PromptRow] = {}
    exhausted = False
    while True:
        while not exhausted and len(live) < most_live:
            row, prompt = next(waiting, (None, None))
            if row is None or prompt is None:
                exhausted = True
                break
            with _naming(row):
                request = {"prompt_token_ids": prompt, "num_dropped_tokens": row.num_dropped_tokens}
                llm.engine.add_request(str(row.index), request, row.sampling_params)
            live[str(row.index)] = row
        if not live:
            return
        finished = [output for output in llm.engine.step() if output.finished]
        if finished:
            yield [(live.pop(output.request_id), output) for output in finished]


def _content(row: PromptRow, output: RequestOutput) -> dict[str, Any]:
    """What a line holds beside index, id and fingerprint."""
    values = output.to_dict()
    params = row.sampling_params
    hidden = set() if params.logprobs is not None else {"cumulative_logprob", "logprobs"}
    samples = [
        {name: value for name, value in completion.items() if name not in hidden}
        for completion in values["outputs"]
    ]
    content: dict[str, Any] = {} if row.prompt is None else {"prompt": row.prompt}
    content |= {name: value for name, value in samples[0].items() if name != "index"}
    content["num_prompt_tokens"] = len(values["prompt_token_ids"])
    if row.num_dropped_tokens:
        content["num_dropped_tokens"] = row.num_dropped_tokens
    if params.prompt_logprobs is not None:
        content["prompt_logprobs"] = values["prompt_logprobs"]
    if len(samples) > 1:
        content["outputs"] = samples
    return content
