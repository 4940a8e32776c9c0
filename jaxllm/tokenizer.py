"""Loading a checkpoint's tokenizer, encoding prompts, finding stop tokens.

transformers takes seconds to import, so it is imported when a tokenizer is loaded and not before.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, RequestError
from jaxllm.json_text import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the same class, by its names of two versions
_encoding = threading.Lock()  # tokenizers encode for one thread at a time
_WITHOUT_TOKENIZER = "pass skip_tokenizer_init=True and give prompts as token ids"


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder. Reads local files only and runs no code from them.

    Raises:
        ConfigError: the folder holds no tokenizer, a broken one, or one that needs its own code.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"no tokenizer in {str(folder)!r}: it is not a folder. Give the folder that holds "
            f"tokenizer.json and tokenizer_config.json, or {_WITHOUT_TOKENIZER}."
        )
    with quiet_transformers():
        try:
            return _tokenizer_class(folder).from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True, use_fast=True
            )
        except Exception as error:  # transformers and tokenizers raise anything, bare Exception included
            remedy = (
                f"Put the model's tokenizer.json and tokenizer_config.json there, or {_WITHOUT_TOKENIZER}"
            )
            if "trust_remote_code" in str(error):
                remedy = f"It needs code of its own, which jaxllm never runs; {_WITHOUT_TOKENIZER}"
            raise ConfigError(
                f"cannot load a tokenizer from {str(folder)!r} ({summary(error)}). {remedy}."
            ) from error


def _tokenizer_class(folder: Path) -> Any:
    """What loads a folder's tokenizer: the generic class where that is named, which never needs torch."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_bytes())["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        named = None  # AutoTokenizer says what is wrong
    if named in _GENERIC and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a prompt, with the tokenizer's special tokens added exactly once, or not at all.

    A text that already starts with the beginning-of-sequence token, as a rendered chat template does,
    gets no second one.

    Raises:
        RequestError: `text` is no string, or holds code points that are no characters.
    """
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be a string or a list of token ids, not {type(text).__name__}.")
    token_ids = _encode(tokenizer, text, add_special_tokens=add_special_tokens)
    bos = tokenizer.bos_token_id
    if (
        add_special_tokens
        and bos is not None
        and token_ids[:2] == [bos, bos]
        and text.startswith(str(tokenizer.bos_token))
    ):
        del token_ids[0]
    return token_ids


def eos_token_ids(
    model_dir: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> frozenset[int]:
    """Token ids that end a sequence, as any source of the checkpoint names them.

    The union of `eos_token_id` in config.json and generation_config.json (a number, a list or null;
    either file may be absent) and the tokenizer's. `eos_token_id` of `hf_overrides` replaces config.json's.

    Raises:
        ConfigError: a file is no JSON object, or names something that is no token id.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_dir) / name
        if name == "config.json" and hf_overrides and "eos_token_id" in hf_overrides:
            found |= _token_id_set(hf_overrides["eos_token_id"], "hf_overrides")
            continue
        if not path.exists():
            continue
        found |= _token_id_set(read_object(path).get("eos_token_id"), repr(str(path)))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)


def _token_id_set(value: Any, source: str) -> set[int]:
    token_ids = set()
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(
                f"{source}: eos_token_id={value!r} must be a token id, a list of them or null. Correct it."
            )
        token_ids.add(token_id)
    return token_ids


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        # verbose=False: no warning about model_max_length; the engine has its own limit and error.
        with _encoding:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
    except (TypeError, UnicodeError) as error:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as surrogate:
            raise RequestError(
                f"the prompt holds U+{ord(text[surrogate.start]):04X} at character {surrogate.start}, a lone "
                "surrogate, which is no character. Decode the source with the right encoding."
            ) from error
        raise


def summary(error: Exception) -> str:
    """First line of an error, without its full stop."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip(' .')}" if lines else type(error).__name__


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable that is not set, for a while."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' import and loading from warning about what jaxllm does not use (torch...)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _environment("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"):  # "PyTorch was not found"
            import transformers  # noqa: F401
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(level)
