"""Where checkpoints are: folders, the embedded one, ids in Hugging Face's cache, downloads when asked for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.system.json_text import parse

_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_OTHER_FILES = ("*/*.json", "*/*.safetensors", "*/*.txt", "consolidated*.safetensors")


def demo_model_path() -> Path:
    """Folder of the small Llama that comes with the package."""
    return Path(__file__).parents[1] / "demo_model"


def checkpoint_folder(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download: bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """The folder of a checkpoint: `model` itself, or where the cache of `huggingface_hub` keeps that id.

    Args:
        model: path of a folder, which goes first, or an id such as "organisation/name".
        revision: branch, tag or commit of an id; "main" if None.
        download: fetch what the cache lacks: weights in safetensors, configuration, tokenizer, templates.
            What the cache has is used as it is; nothing is looked up. None: the caller cannot say so.
        cache_dir: the cache; that of the environment (HF_HUB_CACHE, HF_HOME) if None.

    Raises:
        ConfigError: there is neither, or the download failed.
    """
    name, path = os.fspath(model), Path(model)
    if name and _exists(path):
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} is one of a Hub id, and {str(path)!r} is a folder here: leave it out"
            )
        return path
    # Only the path of something that is not here needs this import.
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(
            f"model folder {name[:200]!r} does not exist, nor is it an id like 'organisation/name': pass the "
            "path of a folder with config.json and *.safetensors"
        ) from None
    found = None
    with contextlib.suppress(LocalEntryNotFoundError):
        found = _snapshot(name, revision, cache_dir, local_files_only=True)
    if found is not None and (not download or (_is_complete(found) and _has_tokenizer(found))):
        return found
    if download:
        try:
            return _snapshot(name, revision, cache_dir, local_files_only=False)
        except ConfigError:
            if found is not None and _is_complete(found):
                return found  # there may be no tokenizer on the Hub either
            raise
    cache = cache_dir or constants.HF_HUB_CACHE
    at = "" if revision is None else f" at revision {revision!r}"
    raise ConfigError(
        f"model folder {name!r} does not exist, and the Hugging Face cache in {os.fspath(cache)} has none of "
        f"that id{at}: pass the path of a folder with config.json and *.safetensors"
        + ("" if download is None else ", or download=True (--download) to fetch it")
        + " (models are not downloaded unasked)"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _snapshot(
    name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None, *, local_files_only: bool
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=list(_FILES),
                ignore_patterns=list(_OTHER_FILES),
            )
        )
    except Exception as error:  # of the Hub, the network or the file system
        if local_files_only and isinstance(error, LocalEntryNotFoundError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"cannot fetch {name!r} from the Hub ({lines[0][:200].rstrip(' .')}): check the id, the network, "
            "and for gated models the token (HF_TOKEN), or pass the path of a folder"
        ) from error


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has its configuration and all of its weights; others fetch files singly."""
    names = [path.name for path in folder.iterdir()]
    if "config.json" not in names:
        return False
    if "model.safetensors" in names:
        return True
    try:
        index: Any = parse((folder / "model.safetensors.index.json").read_bytes())
        return {*index["weight_map"].values()} <= {*names}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
