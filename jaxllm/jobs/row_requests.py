"""What `jaxllm generate` makes of a row before and after it runs, be it here or on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.commands.options import model_folder
from jaxllm.errors import JaxllmError, RequestError, RequestTooLargeError
from jaxllm.jobs.prompts_io import PromptRow
from jaxllm.text import tokenizer as tokenization
from jaxllm.text.chat import apply_chat_template

if TYPE_CHECKING:
    from jaxllm.engine.outputs import RequestOutput
    from jaxllm.llm import LLM

_SAMPLE_BYTES, _SAMPLES_PER_FILE = 4096, 256
_SMALL_FILE = 4 * 2**20
_CONTEXT_SETTINGS = ("dtype", "load_format", "hf_overrides", "max_model_len")


def with_seed(row: PromptRow, seed: int) -> PromptRow:
    """The row with a seed of its own, so that no sample depends on the batch or on an interruption."""
    if row.sampling_params.seed is not None:
        return row
    digest = hashlib.sha256(f"{seed}:{row.index}".encode()).digest()
    params = dataclasses.replace(row.sampling_params, seed=int.from_bytes(digest[:8], "little"))
    return dataclasses.replace(row, sampling_params=params)


def fingerprint_context(settings: Mapping[str, Any], chat: bool, chat_template: str | None = None) -> str:
    """What completions depend on beside the prompts: a resumed run must have the same."""
    folder = model_folder(settings)
    chosen: dict[str, Any] = {name: settings.get(name) for name in _CONTEXT_SETTINGS}
    if settings.get("load_format") == "dummy":
        chosen["seed"] = settings.get("seed")
    tokenizer = model_folder(settings, "tokenizer")
    folders = [_folder_digest(folder)]
    if tokenizer != folder:
        folders.append(_folder_digest(tokenizer))
    template = [] if chat_template is None else [chat_template]
    return json.dumps([folders, chosen, chat, *template], sort_keys=True, default=str)


def _folder_digest(folder: Path) -> str:
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


def checked_token_ids(llm: LLM, row: PromptRow, chat: bool, chat_template: str | None = None) -> np.ndarray:
    """A row's token ids, known to be acceptable to the engine.

    `chat` makes prompts messages of a user; conversations are rendered by the checkpoint's template, or by
    the text of another one.

    Raises:
        RequestError, SamplingParamsError: they or its parameters are not; names its place in the input.
    """
    with naming(row):
        token_ids = _token_ids(llm, row, chat, chat_template)
        vocab_size = llm.model_config.vocab_size
        if not token_ids:
            raise RequestError("the prompt has no tokens; give at least one")
        if max(token_ids) >= vocab_size:
            raise RequestError(
                f"token id {max(token_ids)} is out of range; the model's are 0 to {vocab_size - 1}"
            )
        token_ids = llm.engine.inputs.truncated(token_ids, row.sampling_params, row.num_dropped_tokens)
        llm.engine.inputs.check_dropped(row.num_dropped_tokens, len(token_ids), row.sampling_params)
        num_tokens = len(token_ids) - row.num_dropped_tokens
        if num_tokens >= llm.max_model_len:
            raise RequestTooLargeError(
                f"the prompt has {num_tokens} tokens; with max_model_len={llm.max_model_len} at most "
                f"{llm.max_model_len - 1} leave room for output: shorten it or raise --max-model-len"
            )
        llm.engine.inputs.check_params(row.sampling_params)
    return np.array(token_ids, np.int32)


def _token_ids(llm: LLM, row: PromptRow, chat: bool, chat_template: str | None) -> Sequence[int]:
    if row.prompt_token_ids is not None:
        return row.prompt_token_ids
    assert llm.tokenizer is not None  # the command always loads one
    messages = row.messages
    if messages is None and chat:
        messages = ({"role": "user", "content": row.prompt},)
    if messages is not None:
        return apply_chat_template(llm.tokenizer, messages, chat_template=chat_template)
    return tokenization.encode(llm.tokenizer, row.prompt or "")


@contextlib.contextmanager
def naming(row: PromptRow) -> Iterator[None]:
    """Errors in the block name the row's place in the input."""
    try:
        yield
    except JaxllmError as error:
        raise type(error)(f"{row.source}: {error}") from error


def completion_content(row: PromptRow, output: RequestOutput) -> dict[str, Any]:
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
