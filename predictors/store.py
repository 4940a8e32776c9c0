"""Profiles on disk: what was measured of one device and model, as `NAME.json` and `NAME.npz`.

The JSON file holds everything a reader would ask for, and the length and SHA-256 of the npz file beside it,
which holds the cost table. Neither is pickle. Each file is replaced atomically, arrays first: whoever reads
between the two is told that they do not belong together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxllm.errors import ConfigError, ProfileError
from jaxllm.predictors.base import ModelShape, check_integer
from jaxllm.predictors.table import TableCostModel
from jaxllm.system.options import checked_path

FORMAT = "jaxllm-profile"
FORMAT_VERSION = 4  # from 3 on rows of steps include padding, from 4 on a share of it

_MAX_FILE_BYTES = 64 * 2**20
_REMEDY = "measure again with `jaxllm profile`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of one device and model, distilled.

    Args:
        device: what the device calls itself.
        model: shape and dtype of the model.
        block_size: tokens per KV block, which the swap tables count in.
        versions: of what ran, by package name.
        num_samples: measurements, by kind of cost.
        errors: JSON-able error report by kind of cost (`FitReport.to_dict`).
        table: the predictions.

    Raises:
        ConfigError: a field has the wrong type, or holds what JSON cannot (such as `nan`).
    """

    device: str
    model: ModelShape
    block_size: int
    versions: Mapping[str, str]
    num_samples: Mapping[str, int]
    errors: Mapping[str, Any]
    table: TableCostModel

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(f"device must be a string that is not empty, got {self.device!r}")
        check_integer("block_size", self.block_size, 1, 1024)
        _check_mapping("versions", self.versions, str)
        _check_mapping("num_samples", self.num_samples, int)
        _check_mapping("errors", self.errors, object)
        for kind, count in self.num_samples.items():
            check_integer(f"num_samples[{kind!r}]", count, 0, 2**40)
        try:
            json.dumps(dict(self.errors), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"errors must hold JSON values: {error}") from error

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the two files under the name of device, model and dtype, in place of an older profile.

        Returns:
            The JSON file, which `load` takes.
        """
        path = profile_path(folder, self.device, self.model.name, self.model.dtype)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = self.table.to_arrays()
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # numbers only: nothing numpy would pickle
        content = buffer.getvalue()
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "device": self.device,
            "model": dataclasses.asdict(self.model),
            "block_size": self.block_size,
            "versions": dict(self.versions),
            "num_samples": dict(self.num_samples),
            "errors": dict(self.errors),
            "padding_share": self.table.padding_share,
            "arrays": {
                "num_bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "shapes": {name: list(array.shape) for name, array in arrays.items()},
            },
        }
        _write_atomically(path.with_suffix(".npz"), content)
        _write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile, and verify every field of it.

        Args:
            path: the JSON file; the npz file lies beside it.

        Raises:
            ProfileError: a file is missing or damaged; the message names file, field and what was expected.
        """
        path = Path(checked_path("path", path))
        document = _parse(path, _read(path))
        expected = {
            "format": str,
            "format_version": int,
            "device": str,
            "model": dict,
            "block_size": int,
            "versions": dict,
            "num_samples": dict,
            "errors": dict,
            "padding_share": float,
            "arrays": dict,
        }
        if document.get("format") != FORMAT:
            _fail(path, "format", FORMAT, document.get("format"))
        if document.get("format_version") != FORMAT_VERSION:
            _fail(path, "format_version", FORMAT_VERSION, document.get("format_version"))
        _check_fields(path, "", document, expected)
        model_fields = {field.name for field in dataclasses.fields(ModelShape)}
        document["model"].setdefault("kv_dtype", "auto")  # profiles of before have none
        _check_fields(path, "model.", document["model"], dict.fromkeys(model_fields, object))
        table = _load_table(path, document["arrays"], document["padding_share"])
        try:
            return cls(
                device=document["device"],
                model=ModelShape(**document["model"]),
                block_size=document["block_size"],
                versions=document["versions"],
                num_samples=document["num_samples"],
                errors=document["errors"],
                table=table,
            )
        except ConfigError as error:
            raise ProfileError(f"{path}: {error}; {_REMEDY}") from error

    def check_matches(self, *, device: str, model: ModelShape, block_size: int) -> None:
        """Verify that this profile is of this device, model and block size.

        Raises:
            ProfileError: it is not; the message names every difference.
        """
        pairs = {"device": (self.device, device), "block_size": (self.block_size, block_size)}
        for field in dataclasses.fields(ModelShape):
            pairs[f"model.{field.name}"] = (getattr(self.model, field.name), getattr(model, field.name))
        differences = [f"{name} {was!r}, not {now!r}" for name, (was, now) in pairs.items() if was != now]
        if differences:
            raise ProfileError(
                f"the profile was measured with {'; '.join(differences)}. {_REMEDY.capitalize()}"
            )


def profile_path(folder: str | os.PathLike[str], device: str, model: str, dtype: str) -> Path:
    """The JSON file of a device, model and dtype in `folder`; only letters, digits, `.`, `_` and `-`.

    The name ends in a hash of the three, so that names that differ in other characters do not collide.
    """
    digest = hashlib.sha256(json.dumps([device, model, dtype]).encode()).hexdigest()[:8]
    parts = [_slug(part) for part in (device, model, dtype)]
    return Path(folder) / f"{'--'.join([*parts, digest])}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower())[:48].strip("-.") or "unnamed"


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ProfileError(
                f"{path} has {path.stat().st_size} bytes; a profile has at most {_MAX_FILE_BYTES}"
            )
        return path.read_bytes()
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror or error}; {_REMEDY}") from error


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path} must hold a JSON object, got {type(document).__name__}; {_REMEDY}")
    return document


def _load_table(path: Path, description: dict[str, Any], padding_share: float) -> TableCostModel:
    _check_fields(path, "arrays.", description, {"num_bytes": int, "sha256": str, "shapes": dict})
    npz = path.with_suffix(".npz")
    content = _read(npz)
    digest = hashlib.sha256(content).hexdigest()
    if len(content) != description["num_bytes"] or digest != description["sha256"]:
        raise ProfileError(
            f"{npz} does not belong to {path.name}, which expects {description['num_bytes']} bytes "
            f"with SHA-256 {description['sha256']}: got {len(content)} bytes with {digest}; {_REMEDY}"
        )
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if shapes != description["shapes"]:
            _fail(path, "arrays.shapes", shapes, description["shapes"])
        return TableCostModel.from_arrays(arrays, padding_share)
    except (ValueError, OSError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{npz}: {error}; {_REMEDY}") from error


def _check_fields(path: Path, prefix: str, values: Mapping[str, Any], expected: Mapping[str, type]) -> None:
    for name in sorted(expected.keys() - values.keys()):
        raise ProfileError(f"{path}: field {prefix}{name} is missing; {_REMEDY}")
    for name in sorted(values.keys() - expected.keys()):
        raise ProfileError(
            f"{path}: field {prefix}{name} is unknown; expected {', '.join(expected)}; {_REMEDY}"
        )
    for name, kind in expected.items():
        if not isinstance(values[name], kind) or (kind is int and isinstance(values[name], bool)):
            _fail(path, f"{prefix}{name}", kind.__name__, values[name])


def _check_mapping(name: str, values: object, kind: type) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a mapping, got {values!r}")
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, kind):
            raise ConfigError(f"{name} must map str to {kind.__name__}, got {key!r}: {value!r}")


def _fail(path: Path, field: str, expected: object, got: object) -> NoReturn:
    raise ProfileError(f"{path}: field {field} must be {expected}, got {str(got)[:200]!r}; {_REMEDY}")


def _write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by a file of `content`, or leave it as it was."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
