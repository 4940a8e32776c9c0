"""Loading a checkpoint's tokenizer, encoding prompts, finding stop tokens.

transformers takes seconds to import, so it is imported when a tokenizer is loaded and not before.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxllm.errors import ConfigError, RequestError
from jaxllm.system.json_text import read_object
from jaxllm.system.options import checked_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_encoding = threading.Lock()  # tokenizers encode for one thread at a time


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder. Reads local files only and runs no code from them.

    Where there is a tokenizer.json, text becomes tokens as it says and not as the class does that
    tokenizer_config.json names. Chat templates and special tokens are those of tokenizer_config.json,
    special_tokens_map.json and the template files; where none names a special token, it is its class's.

    Raises:
        ConfigError: the folder holds no tokenizer, a broken one, or one that needs its own code.
    """
    folder = Path(checked_path("tokenizer", path))
    if not folder.is_dir():
        raise ConfigError(
            f"no tokenizer in {str(folder)!r}: it is not a folder. Give the folder that holds "
            "tokenizer.json and tokenizer_config.json"
        )
    with quiet_transformers():
        try:
            return _load(folder)
        except Exception as error:  # transformers and tokenizers raise anything, bare Exception included
            remedy = "Put the model's tokenizer.json and tokenizer_config.json there"
            if "trust_remote_code" in str(error):
                remedy = "It needs code of its own, which jaxllm never runs: give another tokenizer"
            raise ConfigError(
                f"cannot load a tokenizer from {str(folder)!r} ({summary(error)}). {remedy}"
            ) from error


def _load(folder: Path) -> PreTrainedTokenizerBase:
    import transformers

    config = _read_if_there(folder / "tokenizer_config.json")
    as_file_says = (folder / "tokenizer.json").is_file() and not _needs_code(config)
    kind: Any = transformers.PreTrainedTokenizerFast if as_file_says else transformers.AutoTokenizer
    tokenizer = kind.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True, use_fast=True
    )
    if as_file_says:
        _restore(tokenizer, _read_if_there(folder / "tokenizer.json"), config)
        named = {*config, *_read_if_there(folder / "special_tokens_map.json")}
        _name_as_class(tokenizer, _class_of(folder, config), named)
    if not tokenizer.chat_template:
        tokenizer.chat_template = _read_if_there(folder / "chat_template.json").get("chat_template")
    return cast("PreTrainedTokenizerBase", tokenizer)


def _read_if_there(path: Path) -> dict[str, Any]:
    """A file's JSON object, which is as lenient here as in transformers; an empty one without the file."""
    values = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must hold a JSON object, not {type(values).__name__}")
    return values


def _needs_code(config: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is of a class that comes with the checkpoint."""
    own, named = config.get("auto_map"), config.get("tokenizer_class")
    is_own = isinstance(own, list) or (isinstance(own, Mapping) and "AutoTokenizer" in own)
    return is_own and named is not None and _class_named(named) is None


def _restore(tokenizer: Any, file: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Undo what loading changed of tokenizer.json: how its tokens are found in text.

    Which tokens are special may come from the other files. Those say what is added to a prompt only where
    tokenizer.json has nothing on it.
    """
    from transformers import AddedToken

    backend = tokenizer.backend_tokenizer
    loaded, changed = backend.get_added_tokens_decoder(), []
    for entry in file.get("added_tokens") or []:
        fields = {name: value for name, value in entry.items() if name != "id"}
        found = loaded.get(entry["id"])
        token = AddedToken(
            **{**fields, "special": fields.get("special") or (found is not None and found.special)}
        )
        if repr(found) != repr(token):
            changed.append(token)
    backend.add_tokens(changed)
    if file.get("post_processor") is None:
        for name in ("add_bos_token", "add_eos_token"):
            if config.get(name) is True:
                setattr(tokenizer, name, True)


def _class_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that transformers would take; None if it knows none."""
    named = config.get("tokenizer_class")
    if named is None:
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

        model_type = _read_if_there(folder / "config.json").get("model_type")
        named = TOKENIZER_MAPPING_NAMES.get(str(model_type))
    return _class_named(named) if isinstance(named, str) else None


def _class_named(name: str) -> Any:
    """transformers' class of a name; None if it has none.

    Its table of automatic classes is asked last: importing that takes torch along, where torch is installed,
    which is seconds.
    """
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

        found = tokenizer_class_from_name(name)
    return found


def _name_as_class(tokenizer: Any, kind: Any, named: Set[str]) -> None:
    """Give special tokens that no file names those names that a class has for them, if they are tokens."""
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
    id_of = tokenizer.backend_tokenizer.token_to_id
    for name in _NAMED:
        default = parameters[name].default if name in parameters else None
        if name not in named and isinstance(default, str) and id_of(default) is not None:
            tokenizer.add_special_tokens({name: default})


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
